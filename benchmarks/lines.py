"""Measure the size of the code: the book, the command line, each appendix, the arrows between them, the core, the longest files.

    python benchmarks/lines.py

Lines of code are all but blank lines, comments and docstrings. The core is the list in grpo/__init__.py; there all lines count.
An arrow `-> NAME n` is an appendix, or the command line, of which n names are imported.
"""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]


def code_lines(source: str) -> int:
    """Return the number of lines that have code."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    code = {n for n, line in enumerate(source.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    words: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr):  # all lines of a text count
            code |= {*range(node.lineno, node.end_lineno + 1)}
        elif isinstance(node, documented) and ast.get_docstring(node, clean=False):
            words |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return len(code - words)


def files() -> list[Path]:
    return sorted(path for folder in ("grpo", "tasks", "hydra_plugins") for path in (ROOT / folder).rglob("*.py"))


def place(path: Path) -> tuple[str, str]:
    """Return what a file belongs to, and the room or the appendix."""
    folder, *rest = path.relative_to(ROOT).parts
    if folder != "grpo":
        return folder, folder
    if rest[0] == "extras" and len(rest) > 2:
        return "the appendices", rest[1]
    line = rest[0] in ("config", "apps", "extras") or len(rest) == 1
    return ("the command line", "the command line") if line else ("the book", rest[0])


def by_place() -> dict[str, Counter[str]]:
    """Return the lines of code of each room and appendix, by what it belongs to."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for path in files():
        whole, part = place(path)
        sums[whole][part] += code_lines(path.read_text())
    return sums


def arrows() -> dict[tuple[str, str], list[str]]:
    """Return the names that the book or an appendix imports from another appendix or the command line: by place and target."""
    found = defaultdict(list)
    for path in (path for path in files() if place(path)[0] in ("the book", "the appendices")):
        whole, part = place(path)
        source = whole if whole == "the book" else part
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        for name in (f"{node.module}.{alias.name}" for node in nodes for alias in node.names):
            match name.split("."):
                case ["grpo", "extras", target, *_] if target != source:
                    found[source, target].append(f"{path.relative_to(ROOT)}: {name}")
                case ["grpo", "config" | "apps", *_]:
                    found[source, "the command line"].append(f"{path.relative_to(ROOT)}: {name}")
    return found


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


def main() -> None:
    places, names = by_place(), arrows()
    for whole, parts in sorted(places.items(), key=lambda pair: -sum(pair[1].values())):
        print(f"{whole:18}{sum(parts.values()):7,}")
        for part, count in parts.most_common() if len(parts) > 1 else ():
            there = ", ".join(f"{to} {len(found)}" for (source, to), found in sorted(names.items()) if source == part)
            print(f"  {part:16}{count:7,}{there and f'   -> {there}'}")
    print(f"{'lines of code':18}{sum(sum(parts.values()) for parts in places.values()):7,}")
    wrong = [name for (source, _), found in names.items() if source == "the book" for name in found]
    print(f"{'names in the book of what is not the book':42}{len(wrong)}", *wrong, sep="\n  ")
    print(f"{'core':18}{sum(core().values()):7,}   in {len(core())} files, docstrings included")
    longest = sorted(files(), key=lambda path: -len(path.read_text().splitlines()))[:3]
    print("longest files    ", ", ".join(f"{p.relative_to(ROOT)} {len(p.read_text().splitlines())}" for p in longest))
    print(
        "defined twice    ", ", ".join(f"{name} ({', '.join(where)})" for name, where in twice().items()) or "nothing"
    )


if __name__ == "__main__":
    main()
