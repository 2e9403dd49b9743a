"""The commands of tests/parity/table.py, which show row by row what docs/parity.md promises.

A command runs as typed, in a fork of this process: it has an exit code of its own, and does not import torch again.
"""

import inspect
import multiprocessing
import os
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import EXAMPLES, ROOT
from table import REFUSED, WORKS, Left
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

pytestmark = pytest.mark.slow
IMPORTED = (
    "lightning pandas peft torch.utils.tensorboard grpo.training.module grpo.runs.plots grpo.apps.serve.api train eval"
)
FORK = multiprocessing.get_context("fork")


def as_typed(line: str, file: str) -> None:
    """Do in this process what a shell would start a process for, and write both of its streams to the file."""
    with open(file, "a") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = shlex.split(line)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    sys.path[:0] = [os.getcwd(), str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    if words[1] == "-c":  # it asks what is imported, so it needs a process of its own
        sys.exit(subprocess.run([sys.executable, *words[1:]]).returncode)
    if words[1] == "-m":
        sys.argv = words[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        file = words[1] if Path(words[1]).exists() else str(ROOT / words[1])
        sys.argv = [file, *words[2:]]
        runpy.run_path(file, run_name="__main__")


def typed(lines: list[str], file: str) -> Left:
    """Run commands one after another, and beside the rest those that end with &, which get a Ctrl-C at the end."""
    codes, beside = [], []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    Path(file).unlink(missing_ok=True)
    for line in lines:
        line = line.replace("ROOT", str(ROOT)).replace("PORT", str(port))
        child = FORK.Process(target=as_typed, args=(line.removesuffix("&"), file))
        child.start()
        if line.endswith("&"):
            beside.append(child)
        else:
            child.join(120)
            child.kill()
            codes.append(child.exitcode)
    for child in beside:
        os.kill(child.pid, signal.SIGINT)
        child.join(30)
        child.kill()
    return Left(Path(file).read_text(), codes)


@pytest.fixture(scope="module")
def folder(toy, tmp_path_factory):
    """A user's folder: files of tests/parity, rows, a random model, a random classifier."""
    for module in IMPORTED.split():
        __import__(module)
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(ROOT / "tests" / "parity", folder, dirs_exist_ok=True)
    shutil.copytree(EXAMPLES, folder / "data", ignore=shutil.ignore_patterns("run"))
    for name in ("toy", "served"):
        shutil.copytree(toy, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(toy)
    tokenizer.save_pretrained(folder / "judge")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(folder / "judge")
    return folder


@pytest.mark.parametrize("name", WORKS)
def test_a_command_does_what_its_rows_promise(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    command = WORKS[name]
    for needed in command.after:
        if not Path(f"{needed}.out").exists():
            typed(WORKS[needed].lines, f"{needed}.out")
    left = typed(command.lines, f"{name}.out")
    assert left.codes == command.codes, left.out[-3000:]
    for rows, true in command.shows.items():
        assert true(left), f"{rows}: {inspect.getsource(true)}\n{left.out[-3000:]}"


@pytest.mark.parametrize("rows", REFUSED)
def test_what_is_refused_gets_one_line(rows, folder, monkeypatch):
    monkeypatch.chdir(folder)
    line, message = REFUSED[rows]
    left = typed([line], "refused.out")
    assert left.codes[0] and message in left.lines[-1], left.out
