"""The order of the rooms: a room imports only from itself and the rooms above it."""

import ast
import functools
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import lines  # benchmarks/lines.py
import walks  # benchmarks/walks.py
from helpers.appendices import LACKING, MAP
from helpers.project import imports

import grpo
from grpo.config.moved import COMMANDS, new_names

ROOT = Path(__file__).parents[1]
ROOMS = "system env data rewards objectives models engines rollout evaluation runs training".split()
COMMAND_LINE = {"config", "apps", "__init__", "__main__"}
EXTRAS = {path.name for path in (ROOT / "grpo" / "extras").iterdir() if (path / "__init__.py").is_file()}


def test_the_map_has_every_appendix():
    """So that a tree knows which ones it lacks."""
    assert {*EXTRAS} <= MAP and MAP - {*EXTRAS} == LACKING


def test_no_test_imports_another():
    """Shared code is in tests/helpers."""
    tests = {file.stem: file for file in (ROOT / "tests").rglob("test_*.py")}
    for file in [*tests.values(), *(ROOT / "tests" / "helpers").glob("*.py")]:
        assert not [name for name in imports(file) if name.partition(".")[0] in tests], file


def test_every_package_that_the_code_imports_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for some in project["optional-dependencies"].values() for one in some)]
    declared = {re.match(r"[\w.-]+", one)[0].lower().replace("-", "_") for one in wanted} | {
        "grpo",
        "hydra_plugins",
        "tasks",
    }
    others = {
        "hydra": "hydra_core",
        "PIL": "pillow",
        "sklearn": "scikit_learn",
        "yaml": "pyyaml",
        "mlflow": "mlflow_skinny",
        "exchange": "grpo",
        "tester": "grpo",
    }  # the last two are of the sandbox
    tops = {name.partition(".")[0] for file in lines.files() for name in imports(file)} - sys.stdlib_module_names
    assert {others.get(name, name) for name in tops} <= declared


@functools.cache
def of_ours(file: Path) -> set[str]:
    """Return the modules of grpo that a file names, also in a text."""
    return {name for name in [*imports(file), *named(file)] if name.startswith("grpo.")}


def extras_of(file: Path) -> set[str]:
    return {name.split(".")[2] for name in of_ours(file) if name.startswith("grpo.extras.")}


def test_a_room_of_the_book_imports_only_from_the_rooms_above_it():
    assert {path.stem for path in (ROOT / "grpo").iterdir()} - {"__pycache__"} == {
        *ROOMS,
        *COMMAND_LINE,
        "extras",
        "moved",
    }
    for i, room in enumerate(ROOMS):
        for file in (ROOT / "grpo" / room).rglob("*.py"):
            rooms = {name.split(".")[1] for name in of_ours(file)}
            assert rooms <= {*ROOMS[: i + 1]}, f"{file} imports {rooms - {*ROOMS[: i + 1]}}"


def test_an_appendix_imports_the_book_and_what_its_door_names():
    """A program of an appendix (PROGRAMS) is a part of the command line."""
    for name in EXTRAS:
        door = import_module(f"grpo.extras.{name}")
        assert door.__doc__
        needs, programs = getattr(door, "NEEDS", ()), getattr(door, "PROGRAMS", ())
        for file in (ROOT / "grpo" / "extras" / name).rglob("*.py"):
            assert extras_of(file) <= {name, *needs}, f"{file} imports {extras_of(file) - {name, *needs}}"
            line = {one.split(".")[1] for one in of_ours(file)} & COMMAND_LINE
            assert not line or file.stem in ("__main__", *programs), f"{file} imports {line}"


def test_no_module_is_imported_by_its_old_name():
    """Old names are for users: the log says the new one at each."""
    for file in [*lines.files(), *(ROOT / "tests").rglob("test_*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        old = {name for name in imports(file) if name in new_names() and name not in COMMANDS}
        assert not old or file.name in ("test_moved.py", "test_with_a_critic.py"), f"{file} imports {old}"


def missing(text: str) -> list[str]:
    """Return the names that a program imports from modules of grpo and that are not there."""
    froms = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module]
    ours = [(node.module, name.name) for node in froms if node.module.startswith("grpo.") for name in node.names]
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in (ROOT / "grpo").rglob("*.py")}
    made = [(module, name) for module, name in ours if f"{module}.{name}" not in modules]
    return [f"{module}.{name}" for module, name in made if not hasattr(import_module(module), name)]


def test_the_benchmarks_import_what_there_is():
    """No test runs all of them."""
    assert missing("from grpo.system.memory import held, gone") == ["grpo.system.memory.gone"]
    assert {name for file in (ROOT / "benchmarks").rglob("*.py") for name in missing(file.read_text())} == set()


def test_only_the_command_line_knows_tasks():
    for file in (ROOT / "grpo").rglob("*.py"):
        assert not any(name.startswith("tasks") for name in imports(file)), f"{file}: Hydra names tasks"


def named(file: Path) -> set[str]:
    """Return the modules of grpo that a file names in texts; sentences name none."""
    texts = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"grpo(\.\w+)+", text)}


def test_no_modules_import_each_other_in_a_circle():
    """Imports for types alone count. A planted circle is found."""
    edges = walks.imports()
    assert len(edges) > 200 and not walks.circles(edges)
    edges["grpo.system.errors"].add("grpo.rollout.types")
    assert {"grpo.system.errors", "grpo.rollout.types"} <= walks.circles(edges)[0]


def test_a_module_has_one_name():
    assert len(grpo.__path__) == 1


def test_only_programs_know_hydra_and_only_engines_know_vllm():
    for file in [*(ROOT / "grpo").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]:
        libraries = {name.split(".")[0] for name in imports(file)}
        program = {"config", "apps", "serve", "sweep", "launch", "migration", "demo", "forecast", "preflight"} & {
            *file.parts
        }
        assert not libraries & {"hydra", "omegaconf"} or program, f"{file} imports hydra"
        engine = {"engines", "shared_weights", "vllm_server", "of_vllm"} & {*file.parts, file.stem}
        assert "vllm" not in libraries or engine, f"{file} imports vllm"


def test_tasks_live_in_message_space():
    """A task may name the appendices of rewards. task=agent serves its programs over HTTP, in messages too."""
    for file in (ROOT / "tasks").glob("*.py"):
        rooms = {name.split(".")[1] for name in imports(file) if name.startswith("grpo.")}
        assert rooms <= {"system", "env", "data", "rewards", "extras"}, file
        serves = {"network", "serve", "sources"} if file.stem == "agent" else set()
        assert extras_of(file) <= {"datasets", "grading", "programs", "tools"} | serves, file


def test_the_core_can_be_read_in_an_evening():
    core = lines.core()
    assert core["train.py"] <= 105 and len(core) >= 20
    assert sum(core.values()) <= 2500


def test_the_book_and_each_appendix_are_small():
    """Nothing that a page promises goes for a count: what grows is split, or becomes an appendix."""
    places = lines.by_place()
    assert sum(places["the book"].values()) <= 9_500
    assert max(places["the appendices"].values()) <= 1_900


def test_no_file_is_long_and_no_name_means_two_things():
    assert max(len(file.read_text().splitlines()) for file in lines.files()) <= 320
    assert not lines.twice()
