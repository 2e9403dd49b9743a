"""The pieces of docs/objectives.md, taken from the page: they change a run, and a run that crashed goes on to the bit."""

import re

import lightning as L
import pytest
import torch
from conftest import ROOT, compose_config
from helpers.runs import rows
from safetensors.torch import load_file

from grpo.system.errors import UserError
from train import train

PAGE = (ROOT / "docs" / "objectives.md").read_text()
PIECES = re.findall(r"in `mine/(\w+)\.py`.*?```python\n(.*?)```", PAGE, re.S)
MINE = (
    "sampler._target_=leitner.Leitner",
    "selection._target_=surprise.Surprise",
    "+callbacks.spread._target_=fading.Spread",
)
MINE += ("algo/advantage=no_baseline", "algo.advantage._target_=fading.fading")


class Overwrites(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        batch.metrics["rollout/reward"] = 1.0


class Takes(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        module.note("rollout/reward", 1.0)


@pytest.fixture
def run(smoke, tmp_path, monkeypatch):
    """Makes a run with the pieces, and returns its rows."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in PIECES:
        (tmp_path / f"{name}.py").write_text(text)

    def run(name, *more):
        settings = ("callbacks=[checkpoint]", "callbacks.checkpoint.every=1", "rollout.num_rollouts=4", *MINE, *more)
        train(compose_config(*smoke(*settings, f"output_dir={tmp_path / name}")))
        return rows(tmp_path / name)

    return run


def changed(found: list[dict]) -> bool:
    return all(0 < row["mine/shortest_to_longest"] <= 1 and row["data/boxes"] >= 0 for row in found[1:])


@pytest.mark.slow
def test_pieces_of_the_page_are_short_and_change_a_run(run):
    assert [name for name, _ in PIECES] == ["leitner", "surprise", "fading"]
    assert all(len(text.splitlines()) <= 40 for _, text in PIECES)
    assert changed(run("short", "rollout.num_rollouts=2"))


@pytest.mark.slow
def test_pieces_of_the_page_are_resumed_to_the_bit(run, tmp_path):
    straight = run("straight")
    assert changed(straight)
    with pytest.raises(RuntimeError, match="the disk is full"):
        run("crashed", "+callbacks.crash={_target_: helpers.slots.Crash, rollout: 2}")
    resumed = run("resumed", f"ckpt_path={tmp_path / 'crashed'}", "resume.changes=allow")
    begun = int(resumed[0]["step"])
    assert 1 < begun < 4 and [plain(row) for row in resumed] == [plain(row) for row in straight[begun:]]
    weights = [load_file(tmp_path / name / "checkpoints/last/model.safetensors") for name in ("straight", "resumed")]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    for taken in ("Overwrites", "Takes"):
        with pytest.raises(UserError, match="rollout/reward"):
            run(taken, f"+callbacks.taken._target_=test_loop.{taken}")


def plain(row: dict) -> dict:
    """Return the numbers that do not depend on the clock."""
    return {name: value for name, value in row.items() if not name.startswith(("time/", "tokens/s", "memory/"))}
