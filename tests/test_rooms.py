"""The order of the rooms: a room imports only from itself and the rooms above it."""

import re
import sys
import tomllib
from pathlib import Path

import lines  # benchmarks/lines.py
from helpers.project import imports

ROOT = Path(__file__).parents[1]
ROOMS = "system env data rewards objectives models engines rollout evaluation runs training apps".split()


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
        "yaml": "pyyaml",
        "mlflow": "mlflow_skinny",
        "judge": "grpo",
    }  # the last is of the sandbox
    tops = {name.partition(".")[0] for file in lines.files() for name in imports(file)} - sys.stdlib_module_names
    assert {others.get(name, name) for name in tops} <= declared


def test_a_room_imports_only_from_the_rooms_above_it():
    assert {path.stem for path in (ROOT / "grpo").iterdir()} - {"__pycache__"} == {*ROOMS, "__init__"}
    for i, room in enumerate(ROOMS):
        for file in (ROOT / "grpo" / room).rglob("*.py"):
            rooms = {name.split(".")[1] for name in imports(file) if name.startswith("grpo.")}
            assert rooms <= {*ROOMS[: i + 1]}, f"{file} imports {rooms - {*ROOMS[: i + 1]}}"
            assert not any(name.startswith("tasks") for name in imports(file)), f"{file}: Hydra names tasks"


def test_only_programs_know_hydra_and_only_engines_know_vllm():
    for file in [*(ROOT / "grpo").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]:
        libraries = {name.split(".")[0] for name in imports(file)}
        assert not libraries & {"hydra", "omegaconf"} or "apps" in file.parts, f"{file} imports hydra"
        assert "vllm" not in libraries or "engines" in file.parts, f"{file} imports vllm"


def test_tasks_live_in_message_space():
    for file in (ROOT / "tasks").glob("*.py"):
        rooms = {name.split(".")[1] for name in imports(file) if name.startswith("grpo.")}
        assert rooms <= {"system", "env", "data", "rewards"}, file


def test_the_core_can_be_read_in_an_evening():
    core = lines.core()
    assert core["train.py"] <= 80 and len(core) >= 20
    assert sum(core.values()) <= 2500


def test_no_file_is_long_and_no_name_means_two_things():
    assert max(len(file.read_text().splitlines()) for file in lines.files()) <= 400
    assert not lines.twice()
