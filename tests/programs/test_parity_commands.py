"""The commands of tests/parity/commands.yaml, which show the features of other systems row by row.

A command runs as typed, in a process of tests/helpers/programs.py.
"""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import EXAMPLES, ROOT
from helpers.parity import COMMANDS, Left, holds
from helpers.programs import typed
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_does_what_its_rows_promise(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    command = COMMANDS[name]
    for needed in command.after:
        if not Path(f"{needed}.out").exists():
            typed(COMMANDS[needed].lines, f"{needed}.out")
    left = Left(*typed(command.lines, f"{name}.out"))
    assert left.codes == command.codes, left.out[-3000:]
    for rows, fact in command.shows.items():
        assert holds(fact, left), f"{rows}: {fact}\n{left.out[-3000:]}"
