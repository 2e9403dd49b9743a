"""The wheel that CONTRIBUTING.md builds, in an environment that has nothing else, away from the checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

HERE = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "train.py", "eval.py")
FOLDERS = ("grpo", "hydra_plugins", "conf", "tasks")
IN_PYTHON = """
import grpo
run = grpo.train("tiny", rollout={"num_rollouts": 2, "prompts": 4}, preflight="off", **{"eval.limit": 20}, output_dir="mine")
print(run.status, len(run.metrics), grpo.__file__)
"""


def output(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, env=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def source(tmp_path) -> Path:
    """The files from which a wheel is built, without what Python and a checkout keep beside them."""
    (folder := tmp_path / "source").mkdir()
    for name in FILES:
        os.link(ROOT / name, folder / name)
    for name in FOLDERS:
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, copy_function=os.link, ignore=skipped)
    return folder


def test_a_wheel_has_the_package_and_what_lies_beside_it(source, tmp_path):
    """Every file of both packages, and as grpo/project the settings, the tasks and the two programs."""
    output(sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", tmp_path / "built", cwd=source)
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    own = {path for path in files if path.parts[0] in ("grpo", "hydra_plugins")}
    beside = {path for path in files if path.parts[0] in ("conf", "tasks", "train.py", "eval.py")}
    built = {path.relative_to(tmp_path / "built") for path in (tmp_path / "built").rglob("*") if path.is_file()}
    assert built == own | {Path("grpo", "project") / path for path in beside} and len(own) > 100 < len(beside)


def test_an_installed_wheel_trains_the_demo(source, tmp_path):
    """Also evaluates it, resumes it, and knows the settings of other systems."""
    (empty := tmp_path / "empty").mkdir()
    output(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    output(python, "-m", "pip", "install", "--quiet", "build", cwd=tmp_path)
    output(python, "-m", "build", "--outdir", tmp_path / "dist", source, cwd=tmp_path)
    output(python, "-m", "pip", "install", "--quiet", *(tmp_path / "dist").glob("*.whl"), cwd=tmp_path)

    status, rollouts, file = output(python, "-c", IN_PYTHON, cwd=empty).splitlines()[-1].split()
    assert (status, rollouts) == ("finished", "3") and Path(file).is_relative_to(tmp_path / "venv")
    more = ("ckpt_path=mine", "hydra.run.dir=typed", "rollout.num_rollouts=3")
    output(python, "-m", "grpo", "train", *more, cwd=empty)
    assert json.loads((empty / "typed" / "manifest.json").read_text())["rollouts"] == 3
    output(python, "-m", "grpo", "eval", "run=typed", "eval.limit=10", cwd=empty)
    typed = subprocess.run(
        [python, "-m", "grpo", "train", "num_generations=4"], cwd=empty, env=HERE, capture_output=True, text=True
    )
    assert typed.returncode == 1 and "TRL's num_generations is rollout.group_size here" in typed.stderr
