"""Measure the size of the code: lines by room, the core, the longest files, and public names that are defined twice.

    python benchmarks/lines.py

Lines of code are all but blank lines, comments and docstrings. The core is the list in grpo/__init__.py; there all lines count.
"""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Return the number of lines that have code."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented) and ast.get_docstring(node)]
    words = {line for node in nodes for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for t in tokens if t.type not in SILENT for line in range(t.start[0], t.end[0] + 1)}
    return len(code - words)


def files() -> list[Path]:
    return sorted(path for folder in ("grpo", "tasks", "hydra_plugins") for path in (ROOT / folder).rglob("*.py"))


def by_room() -> Counter[str]:
    rooms: Counter[str] = Counter()
    for path in files():
        folder, *rest = path.relative_to(ROOT).parts
        rooms[rest[0] if folder == "grpo" and len(rest) > 1 else folder] += code_lines(path.read_text())
    return rooms


def core() -> dict[str, int]:
    """Return the files of the core in reading order, with their numbers of lines."""
    text = ast.get_docstring(ast.parse((ROOT / "grpo" / "__init__.py").read_text()))
    names = re.findall(r"^ +(\S+\.py) ", text.partition("The core")[2], re.MULTILINE)
    paths = {name: ROOT / name if name == "train.py" else ROOT / "grpo" / name for name in names}
    return {name: len(path.read_text().splitlines()) for name, path in paths.items()}


def twice() -> dict[str, list[str]]:
    """Return the public top-level classes and functions that more than one module of grpo defines."""
    found = defaultdict(list)
    for path in (path for path in files() if path.is_relative_to(ROOT / "grpo")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                found[node.name].append(str(path.relative_to(ROOT / "grpo")))
    return {name: places for name, places in sorted(found.items()) if len(places) > 1 and name != "main"}


if __name__ == "__main__":
    rooms = by_room()
    for room, lines in rooms.most_common():
        print(f"{room:14}{lines:7,}")
    print(f"{'lines of code':14}{sum(rooms.values()):7,}")
    print(f"{'core':14}{sum(core().values()):7,}   in {len(core())} files, docstrings included")
    longest = sorted(files(), key=lambda path: -len(path.read_text().splitlines()))[:3]
    print("longest files ", ", ".join(f"{p.relative_to(ROOT)} {len(p.read_text().splitlines())}" for p in longest))
    print("defined twice ", ", ".join(f"{name} ({', '.join(places)})" for name, places in twice().items()) or "nothing")
