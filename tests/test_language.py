"""Plain English: no docstring, comment, message or page has the worst habits of language."""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HABITS = {
    "begin a sentence with its subject, not with Of, What or Those": re.compile(
        r"(?:^|[.!?]\s+|\n\n)(?:Of (?!course)|What |Those )(?:(?![.!?](?:\s|$))[^\n]|\n(?!\n))*(?:[.!](?=\s|$)|$)(?<!\?)"
    ),
    "say resumed, continued": re.compile(r"\b(?:gone|goes|going|go|went) on with\b"),
    "say logged, printed, raised, reported": re.compile(r"\b(?:is|are|was|were|be|been|not|and) told\b|^[Tt]old\b"),
    "say on average": re.compile(r"\bin the mean\b(?! of)"),
    "name who does it": re.compile(r"\bnobody (?:could|can) tell\b"),
}


# a word that each habit has: a file without them is not parsed, which takes most of the time
WORDS = re.compile(r"\b(?:Of |What |Those |gone|goes|going|go|went|[Tt]old|mean|nobody)")
IN_COMMENTS = re.compile(rf"#.*{WORDS.pattern}")


def of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every string, and of every block of comments as one text, where one may have a habit."""
    if not WORDS.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    if not IN_COMMENTS.search(source):
        return
    block, last = [], -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1 and block:
                yield block[0][0], "\n".join(text for _, text in block)
                block = []
            block.append((token.start[0], token.string.lstrip("#- ")))
            last = token.start[0]
    if block:
        yield block[0][0], "\n".join(text for _, text in block)


def of_lines(lines: list[str], comments: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each line of prose: the comments of YAML, or Markdown without headings and code."""
    fenced = False
    for number, line in enumerate(lines, 1):
        fenced ^= line.startswith("```")
        if comments:
            yield number, line.partition("#")[2].strip()
        elif not fenced and not line.startswith("#"):
            yield number, re.sub(r"`[^`]*`", "x", line).lstrip("-*>| ")


def of_file(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return of_python(text)
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        return iter([*of_python(code), *of_lines(prose.split("\n"), comments=False)])
    return of_lines(text.split("\n"), comments=path.suffix == ".yaml")


FOLDERS = ("grpo", "tasks", "hydra_plugins", "conf", "docs", "notebooks", "benchmarks", "examples", "tests")
FILES = [
    *sorted(
        file for name in FOLDERS for kind in ("py", "yaml", "md", "ipynb") for file in (ROOT / name).rglob(f"*.{kind}")
    ),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "train.py", "eval.py")),
]


@pytest.mark.parametrize("folder", [*FOLDERS, "."])
def test_no_worst_habit(folder):
    files = [
        file
        for file in FILES
        if file.relative_to(ROOT).parts[0] == folder or folder == "." == str(file.parent.relative_to(ROOT))
    ]
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{line}: {advice}: {match[0].strip()[:80]}"
        for file in files
        if file != Path(__file__)
        for line, text in of_file(file)
        for advice, habit in HABITS.items()
        if (match := habit.search(text))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("Of each row.", True), ("Rows. Those that end are kept.", True), ("What it will come to.", True),
        ("What is a rollout?", False), ("They are told in one line", True), ("the mean of a group", False),
        ("0.3 in the mean, and more", True), ("it has gone on with the run", True), ("Of course it does.", False),
    ],
)  # fmt: skip
def test_the_habits_are_found(text, bad):
    assert any(habit.search(text) for habit in HABITS.values()) == bad
    assert WORDS.search(text) or not bad
