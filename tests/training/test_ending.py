"""However a run ends, its state after the last rollout that it learned from is on the disk, and it goes on as if nothing had happened."""

import json
import os
import socket

import lightning as L
import psutil
import pytest
import torch
from conftest import compose_config
from helpers.runs import learned, rows, state
from lightning.pytorch.callbacks import LambdaCallback, Timer

from grpo.engines.builtin.engine import TransformersEngine
from grpo.runs.runs import Run
from grpo.system.errors import UserError
from grpo.training.checkpoints import by_rollouts
from train import train

SETTINGS = """callbacks=[samples,checkpoint] callbacks.checkpoint.every=100 rollout.num_rollouts=4 eval.every=2 algo.num_minibatches=2
    engine=transformers engine._target_=test_ending.Engine""".split()


class Engine(TransformersEngine):
    """Fails at its call `at`. The calls are: evaluation, rollouts 1 and 2, evaluation, rollouts 3 and 4, evaluation."""

    calls, at, error = 0, 0, RuntimeError("CUDA error: an illegal memory access")

    def sample(self, *args, **named):
        Engine.calls += 1
        if Engine.calls == Engine.at:
            raise Engine.error
        return super().sample(*args, **named)


class Fault(L.Callback):
    """Raises in one hook of a rollout, at a call of it."""

    def __init__(self, hook: str, rollout: int = 3, call: int = 1, kind: str = "RuntimeError") -> None:
        self.now, self.calls = 0, 0

        def fail(*_: object) -> None:
            self.calls += self.now == rollout
            if self.calls == call:
                self.calls += 1
                raise {"RuntimeError": RuntimeError, "StopIteration": StopIteration, "MemoryError": MemoryError}[kind]("boom")

        begin = self.on_train_batch_start
        self.fail = fail
        if hook == "on_train_batch_start":
            self.on_train_batch_start = lambda *a: (begin(*a), fail())
        else:
            setattr(self, hook, fail)

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.now = batch.rollout + 1


def fault(hook: str, **more: object) -> str:
    values = ", ".join(f"{key}: {value}" for key, value in {"_target_": "test_ending.Fault", "hook": hook, **more}.items())
    return f"+callbacks.fault={{{values}}}"


@pytest.fixture(scope="module")
def straight(toy, tmp_path_factory):
    """The folder of a run that nothing ends."""
    Engine.calls = Engine.at = 0
    folder = tmp_path_factory.mktemp("straight")
    learned(own(toy, folder))
    return folder


def own(toy, folder, *more: str) -> list[str]:
    from conftest import EXAMPLES

    base = f"""task=gsm8k task.path={EXAMPLES} model=path model.path={toy} debug=smoke forecast=false preflight=off max_tokens=8
        optim.optimizer.lr=1e-3 output_dir={folder}""".split()
    return [*base, *SETTINGS, *more]


@pytest.mark.parametrize(
    ("at", "more", "after", "names"),
    [
        (5, "", 2, "RuntimeError"),  # in rollout 3
        (4, "", 2, "RuntimeError"),  # in the evaluation after rollout 2, which the resumed run makes
        (7, "", 4, "RuntimeError"),  # in the last one
        (0, fault("on_train_batch_start"), 2, "RuntimeError"),
        (0, fault("on_before_backward", kind="MemoryError"), 2, "MemoryError"),
        (0, fault("on_train_batch_end", rollout=2), 2, "RuntimeError"),
        (0, fault("on_train_batch_end", kind="StopIteration"), 3, "RuntimeError"),
        (0, fault("on_train_batch_start", kind="StopIteration"), 2, "UserError"),
    ],
)
def test_a_run_that_anything_ends_loses_nothing(toy, tmp_path, straight, caplog, at, more, after, names):
    """A checkpoint is written after `after` rollouts, though none was due. The resumed run equals one that nothing has ended."""
    Engine.calls, Engine.at = 0, at
    folder = tmp_path / "run"
    with pytest.raises((RuntimeError, MemoryError, UserError)) as ended:
        learned(own(toy, folder, *filter(None, [more])))
    assert type(ended.value).__name__ == names
    assert [*by_rollouts(folder / "checkpoints")] == [after] and (folder / "checkpoints" / "last").is_dir()
    assert f"stopped by {names}; to resume after {after} rollouts: python train.py ckpt_path={folder}" in caplog.text
    assert Run(folder).status == "failed" and len(rows(folder)) == after + 1
    Engine.at = 0
    learned(own(toy, folder, f"ckpt_path={folder}", "resume.changes=allow"))
    same(folder, straight)
    assert Run(folder).status == "finished"


def same(folder, straight) -> None:
    weights = [state(each)["state_dict"] for each in (folder, straight)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert rows(folder) == rows(straight)
    for table in ("samples", "evaluations"):
        assert getattr(Run(folder), table)().equals(getattr(Run(straight), table)())


def test_half_of_a_rollouts_updates_are_not_saved(toy, tmp_path, caplog):
    Engine.at = 0
    with pytest.raises(RuntimeError, match="boom"):
        learned(own(toy, tmp_path, fault("on_before_backward", call=2), "callbacks.checkpoint.every=1"))
    assert [*by_rollouts(tmp_path / "checkpoints")] == [2, 1]
    assert "rollout 3: no checkpoint in the middle of its updates" in caplog.text
