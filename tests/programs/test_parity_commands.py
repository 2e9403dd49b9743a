"""The commands of tests/parity/table.py, which show row by row what docs/parity.md promises.

A command runs as typed, in a process of tests/typed.py.
"""

import inspect
import os
import shlex
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch
from conftest import EXAMPLES, ROOT
from table import REFUSED, WORKS, Left
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification
from typed import start

pytestmark = pytest.mark.slow


def typed(lines: list[str], file: str) -> Left:
    """Run commands one after another, and beside the rest those that end with &, which get a Ctrl-C at the end."""
    codes, beside = [], []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    Path(file).write_text("")
    for line in lines:
        words = shlex.split(line.replace("ROOT", str(ROOT)).replace("PORT", str(port)).removesuffix("&"))
        given = dict(word.split("=", 1) for word in words[: words.index("python")])
        environment = {"PYTHONPATH": os.pathsep.join([os.getcwd(), str(ROOT)]), **given}
        streams = {"out": Path(file), "err": Path(file)}
        child = start(*words[len(given) + 1 :], **streams, folder=Path.cwd(), environment=environment)
        if line.endswith("&"):
            beside.append(child)
        else:
            child.join(900)
            child.kill()
            codes.append(child.exitcode)
    for child in beside:
        os.kill(child.pid, signal.SIGINT)
        child.join(300)
        child.kill()
    return Left(Path(file).read_text(), codes)


@pytest.fixture(scope="module")
def folder(toy, tmp_path_factory):
    """A user's folder: files of tests/parity, rows, a random model, a random classifier."""
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
