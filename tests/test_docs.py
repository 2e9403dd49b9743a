"""The documents are correct: commands compose, code runs, links resolve, public names are documented."""

import ast
import functools
import importlib
import re
import shutil
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import pytest
import yaml
from conftest import ROOT, compose_config
from helpers.documents import FENCE, PAGES, anchors, blocks, commands, composable
from helpers.project import holds

import grpo
from grpo.config.composing import options
from grpo.config.overview import help_text
from grpo.system.metrics import metric_table

BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CONFIGS = {"train.py": "train", "eval.py": "eval", "grpo.serve": "serve", "grpo.prefetch": "train"}


@functools.cache
def composes(*overrides: str, name: str) -> None:
    """Raise if the command line has a mistake. Cached, since several pages have the same one."""
    compose_config(*overrides, "output_dir=.", name=name)


def check(words: list[str], own: Sequence[str] = ()) -> None:
    """Fail if the command would fail for a user. own: choices `GROUP=OPTION` that the page itself adds."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z.][\w./-]*):", (ROOT / "Makefile").read_text(), re.M)
        assert all(word in targets or "=" in word for word in words[1:]), words
    elif words[0] == "pip" or words[1:3] == ["-m", "pip"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        wanted = [name for word in words for names in re.findall(r"\.\[([\w,-]+)\]", word) for name in names.split(",")]
        assert set(wanted) <= extras.keys(), words
    elif words[0] == "python":
        program, arguments = (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])
        name = next((config for ending, config in CONFIGS.items() if program.endswith(ending)), None)
        if name and "--help" in arguments:
            help_text(name, [word for word in arguments if word != "--help"])
        elif name:
            for flag in {"--cfg", "--config-dir", "--package"} & set(arguments):
                del arguments[arguments.index(flag) : arguments.index(flag) + 2]
            given = [word for word in composable(arguments) if not word.startswith("hydra.sweep") and word not in own]
            composes(*given, name=name)
        elif program == "pytest":
            paths = [word.partition("::")[0] for word in arguments if word.startswith("tests")]
            assert all((ROOT / path).exists() for path in paths), words
        elif words[1] == "-m":
            assert find_spec(program), words
        elif program.startswith("benchmarks/"):
            source = (ROOT / program).read_text()
            flags = [word.partition("=")[0] for word in arguments if word.startswith("--") and word != "--help"]
            assert all(f'"{flag}"' in source for flag in flags), words


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / "examples/agents").glob("*.py")], ids=lambda page: page.name)
@pytest.mark.slow
def test_every_command_is_one_that_the_programs_take(page):
    files = re.findall(r"conf/([\w/]+)/(\w+)\.yaml", page.read_text(encoding="utf-8"))
    own = [f"{group}={option}" for group, option in [*files, ("algo", "NAME")] if option not in options(group)]
    for words in commands(page):
        try:
            check(words, own)
        except Exception as error:
            pytest.fail(f"{page.name}: {' '.join(words)}: {error}")


def test_commands_are_found_and_a_wrong_one_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Use `make tset`.\n\n```bash\nOMP_NUM_THREADS=1 python train.py \\\n  -m seed=0,1  # a sweep\n```\n"
    )
    found = list(commands(page))
    assert found == [["python", "train.py", "-m", "seed=0,1"], ["make", "tset"]]
    check(found[0])
    for wrong in (
        found[1],
        ["python", "train.py", "rollout.group_sze=4"],
        ["pip", "install", ".[vlm]"],
        ["python", "-m", "grpo.x"],
    ):
        with pytest.raises(Exception):  # noqa: B017 - each program raises its own
            check(wrong)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.name == "python.md" else (), id=page.name) for page in PAGES],
)
def test_every_block_of_python_runs(page, tmp_path, monkeypatch):
    """Blocks run in order, in one namespace. After a line that ends with `FILE.py`: a block is also saved as that file."""
    shutil.copytree(ROOT / "tests" / "data" / "run", tmp_path / "outputs" / "wordmath" / "grpo" / "a_run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {"__name__": page.stem}
    for path, source in re.findall(r"`([\w/]+\.py)`:\n+```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        (tmp_path / Path(path).name).write_text(source)
    for source in blocks(page, "python"):
        exec(compile(source, f"{page.name}: {source.splitlines()[0]}", "exec"), namespace)
    for source in blocks(page, "yaml"):
        assert yaml.safe_load(source), source


@BY_NAME
def test_every_link_leads_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}#{anchor}"


def test_the_navigation_has_every_page():
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in site, page.name
    for name in re.findall(r": ([a-z]+\.md)$", site, re.M):
        assert (ROOT / "docs" / name).exists() or name in ("index.md", "contributing.md", "changelog.md"), name


def test_the_reference_of_the_site_has_every_key_and_every_metric(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    pages = importlib.import_module("hooks").reference_pages()
    keys = pages["reference/keys.md"]
    for name in ("train", "eval", "serve"):
        for key in compose_config("output_dir=.", name=name):
            assert re.search(rf"^## {key}\b", keys, re.M), key
    comments = [line for line in help_text("train", ["all"]).splitlines() if " # " in line]
    assert len(comments) > 150 and all(line in keys for line in comments)
    assert metric_table() in pages["reference/metrics.md"]
    for page in pages:
        assert f": {page}\n" in (ROOT / "mkdocs.yml").read_text()


def test_inline_code_of_the_site_may_be_broken_after_its_signs_alone(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    block = "<pre><span></span><code>algo.lr=1</code></pre>"
    page = f'<td><code>algo.old_policy=[a, 2] &gt;= <a href="x_y.html">w/z</a></code> <code>eval.py --help</code></td>{block}'
    content = importlib.import_module("hooks").on_page_content(page, None, None, None)
    assert re.sub("<wbr>|</?span[^>]*>", "", content) == page.replace("<span></span>", "") and content.endswith(block)
    assert '<code>eval.<wbr>py <span class="whole">--help</span></code>' in content
    assert '<code>algo.<wbr>old_<wbr>policy=[a, 2] &gt;= <a href="x_y.html">w/<wbr>z</a></code>' in content


def test_architecture_has_the_rooms_of_the_map_in_order_and_each_appendix_with_its_door_and_one_page():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = re.findall(r"^    ([a-z]+) {2,}\S", grpo.__doc__.partition("The appendices")[0], re.M)
    book = page.partition("## The book")[2].partition("## The rule")[0]
    assert re.findall(r"^\| `(\w+)` \|", book, re.M) == rooms
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| \[\w+\]\(\w+\.md[^)]*\) \|$", page, re.M)
    assert sorted(name for name, _ in rows) == sorted(
        path.parent.name for path in (ROOT / "grpo" / "extras").glob("*/__init__.py")
    )
    for door in (door for _, doors in rows for door in re.findall(r"`([^`]+)`", doors)):
        assert find_spec(door.split()[2]) if door.startswith("python -m") else door.startswith("python") or holds(door)
    slots = (ROOT / "docs" / "extension_points.md").read_text().partition("## Slots")[2]
    for slot in re.findall(r"^\| `\w+` \| `([\w.]+)\.(\w+)`", slots, re.M):
        assert hasattr(importlib.import_module(f"grpo.{slot[0]}"), slot[1]), slot


def test_every_public_name_has_a_docstring():
    """A method needs none if its name is documented elsewhere in the project, as in a Protocol, or is a hook of Lightning."""
    documented, missing = {*dir(L.Callback), *dir(L.LightningModule)}, []
    for file in sorted([*(ROOT / "grpo").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]):
        module = ast.parse(file.read_text(encoding="utf-8"))
        names = [("", node) for node in module.body if isinstance(node, DEFINITIONS)]
        for node in [node for _, node in names if isinstance(node, ast.ClassDef)]:
            names += [(f"{node.name}.", inner) for inner in node.body if isinstance(inner, DEFINITIONS[1:])]
        for owner, node in names:
            if f".{owner}{node.name}".count("._"):
                continue
            if not ast.get_docstring(node):
                missing.append((owner, node.name, file))
            elif owner:
                documented.add(node.name)
        if names and not ast.get_docstring(module):
            missing.append(("", "the module", file))
    assert not [name for name in missing if not name[0] or name[1] not in documented]
