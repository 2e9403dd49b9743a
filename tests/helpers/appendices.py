"""Leaves out the tests of appendices that a tree lacks (benchmarks/without.py makes one). Other trees run every test.

A test is skipped if its text, that of its fixtures and of functions that it calls, or its parameters name a module, an option or
a command that is gone, or if it says so: `@pytest.mark.extras("NAME")`, without names all of them. A file that imports at its top
what is gone is left out.
"""

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest

import grpo

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
TABLE = grpo.__doc__.partition("The appendices are")[2].partition("The command line")[0].partition("\n\n")[2]
MAP = set(re.findall(r"(\w+)/", TABLE))
LACKING = {name for name in MAP if not (ROOT / "grpo/extras" / name / "__init__.py").is_file()}
LINES = [line.split("\t") for line in (ROOT / "grpo/moved.tsv").read_text(encoding="utf-8").splitlines()]
GONE = [old for old, new in LINES if new.split(".")[1:3] in [["extras", name] for name in LACKING]]
MODULES = re.compile(
    rf"\bgrpo\.extras\.({'|'.join(LACKING)})\b|\b({'|'.join(map(re.escape, GONE))})\b" if GONE else "(?!)"
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    tested = LACKING and collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if tested and imports_gone(collection_path) else None


@functools.cache
def imports_gone(file: Path) -> bool:
    """Return whether a file imports, at its top or by a helper, what is not there."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    helpers = [ROOT / "tests/helpers" / f"{name.split('.')[1]}.py" for name in names if name.startswith("helpers.")]
    tasks = [ROOT / "tasks" / f"{name.split('.')[1]}.py" for name in names if name.startswith("tasks.")]
    return (
        any(MODULES.match(name) for name in names)
        or not all(task.is_file() or task.with_suffix("").is_dir() for task in tasks)
        or any(imports_gone(helper) for helper in helpers if helper.is_file())
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if LACKING else ():
        said = {name for mark in item.iter_markers("extras") for name in mark.args or LACKING}
        if why := sorted(said & LACKING) or named(item):
            item.add_marker(pytest.mark.skip(reason=f"not in this tree: {', '.join(why)}"))


def named(item: pytest.Item) -> list[str]:
    """Return the modules, commands and options of a test that are gone."""
    text = text_of(item)
    words = [match[0] for match in MODULES.finditer(text)]
    for group, chosen in re.findall(r"\b([a-z_]+(?:/[a-z_]+)*)=(\w+|\[[\w,]+\])", text):
        if (CONF / group).is_dir():
            options = re.findall(r"\w+", chosen)
            words += [f"{group}={one}" for one in options if gone(group, one)]
    return words


def gone(group: str, option: str) -> bool:
    return option not in ("null", "none", "auto") and not (CONF / group / f"{option}.yaml").is_file()


def text_of(item: pytest.Item) -> str:
    """Return the text of a test's function, of its fixtures, and of what they name in their modules."""
    fixtures = [one.func for found in item._fixtureinfo.name2fixturedefs.values() for one in found]
    todo, seen, texts = (
        [item.function, *fixtures],
        set(),
        [repr(getattr(item, "callspec", None) and item.callspec.params)],
    )
    while todo:
        function = inspect.unwrap(todo.pop())
        if function in seen or not in_tests(function):
            continue
        seen.add(function)
        texts.append(source := inspect.getsource(function))
        for word in {*re.findall(r"\w+", source)}:
            value = function.__globals__.get(word)
            if inspect.isfunction(value):
                todo.append(value)
            elif isinstance(value, str | list | tuple | dict):
                texts.append(repr(value))
    return "\n".join(texts)


def in_tests(function: object) -> bool:
    return inspect.isfunction(function) and Path(inspect.getfile(function)).is_relative_to(ROOT / "tests")
