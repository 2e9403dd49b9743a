"""However a run ends, its state after the last rollout that it learned from is on the disk, and it goes on from there."""

import json
import os
import signal
import socket
import time
from types import SimpleNamespace

import lightning as L
import psutil
import pytest
import torch
from conftest import EXAMPLES
from helpers.runs import learned, rows, state
from helpers.slots import Apart

from grpo.engines.builtin.engine import TransformersEngine
from grpo.runs.run import Run
from grpo.system.errors import StopError, UserError
from grpo.training.callbacks.ending import HOOK, Ending
from grpo.training.checkpoints import by_rollouts

SLOW = pytest.mark.slow
SETTINGS = """callbacks=[samples,checkpoint] callbacks.checkpoint.every=100 rollout.num_rollouts=4 eval.every=2
    algo.num_minibatches=2 engine=transformers engine._target_=test_ending.Engine""".split()


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
                raise {"RuntimeError": RuntimeError, "StopIteration": StopIteration, "MemoryError": MemoryError}[kind](
                    "boom"
                )

        begin = self.on_train_batch_start
        self.fail = fail
        if hook == "on_train_batch_start":
            self.on_train_batch_start = lambda *a: (begin(*a), fail())
        else:
            setattr(self, hook, fail)

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.now = batch.rollout + 1


def fault(hook: str, **more: object) -> str:
    values = ", ".join(
        f"{key}: {value}" for key, value in {"_target_": "test_ending.Fault", "hook": hook, **more}.items()
    )
    return f"+callbacks.fault={{{values}}}"


@pytest.fixture(scope="module")
def straight(toy, tmp_path_factory):
    """The folder of a run that nothing ends."""
    Engine.calls = Engine.at = 0
    folder = tmp_path_factory.mktemp("straight")
    learned(own(toy, folder))
    return folder


def own(toy, folder, *more: str) -> list[str]:
    base = f"""task=gsm8k task.path={EXAMPLES} model=path model.path={toy} debug=smoke forecast=false preflight=off max_tokens=8
        optim.optimizer.lr=1e-3 output_dir={folder}""".split()
    return [*base, *SETTINGS, *more]


@pytest.mark.parametrize(
    ("at", "more", "after", "names"),
    [
        pytest.param(5, "", 2, "RuntimeError", marks=SLOW),  # in rollout 3
        (4, "", 2, "RuntimeError"),  # in the evaluation after rollout 2, which the resumed run makes
        pytest.param(7, "", 4, "RuntimeError", marks=SLOW),  # in the last one
        pytest.param(0, fault("on_train_batch_start"), 2, "RuntimeError", marks=SLOW),
        (0, fault("on_before_backward", kind="MemoryError"), 2, "MemoryError"),
        pytest.param(0, fault("on_train_batch_end", rollout=2), 2, "RuntimeError", marks=SLOW),
        pytest.param(0, fault("on_train_batch_end", kind="StopIteration"), 3, "RuntimeError", marks=SLOW),
        pytest.param(0, fault("on_train_batch_start", kind="StopIteration"), 2, "UserError", marks=SLOW),
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


def same(folder, straight, *tables: str) -> None:
    weights = [state(each)["state_dict"] for each in (folder, straight)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert rows(folder) == rows(straight)
    for table in tables or ("samples", "evaluations"):
        assert getattr(Run(folder), table)().equals(getattr(Run(straight), table)())


def test_a_stop_iteration_is_an_error():
    """Lightning's loop would take it for its own end."""
    last = L.Callback()

    def stops(*_: object) -> None:
        raise StopIteration("boom")

    with pytest.raises(RuntimeError, match=r"a callback raised StopIteration\(boom\)"):
        Ending(SimpleNamespace(learned=1)).turn(last, stops, SimpleNamespace(callbacks=[last]))


class Stops(L.Callback):
    """Ends the run as Lightning's own callbacks do."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        trainer.should_stop = batch.rollout == 2


def test_a_run_that_a_callback_ends_is_evaluated_and_saved(toy, tmp_path, straight):
    """After three rollouts, where neither an evaluation nor a checkpoint is due. Resumed without it, it equals another run."""
    Engine.at = 0
    learned(own(toy, tmp_path, "+callbacks.stops._target_=test_ending.Stops"))
    run, kept = Run(tmp_path), tmp_path / "checkpoints"
    assert (run.status, run.ended_by, run.manifest["rollouts"]) == ("finished", "Stops", 3)
    assert run.evaluated == [0, 2, 3] and run.curve("eval/accuracy").index.tolist() == [0, 2, 3]
    assert [*by_rollouts(kept)] == [3]
    names = [(kept / name).resolve().name for name in ("last", "best")]
    assert names == ["policy_00003", "policy_00002"]  # they score the same
    learned(own(toy, tmp_path, f"ckpt_path={tmp_path}", "resume.changes=allow"))
    weights = [state(each)["state_dict"] for each in (tmp_path, straight)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert Run(tmp_path).ended_by is None


class Held(Apart):
    """From its call `at` on nothing is sampled."""

    calls, at = 0, 0

    def sample(self, *args):
        Held.calls += 1
        while Held.at and Held.calls >= Held.at:
            time.sleep(0.01)
        return super().sample(*args)


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "versions"), [(1, [1]), (3, [1, 2, 3])])
def test_rollouts_that_wait_are_played_by_their_own_weights_after_a_stop(toy, tmp_path, monkeypatch, ahead, versions):
    """SIGTERM comes in the update after which `ahead` rollouts are issued and not played."""
    monkeypatch.setattr("grpo.extras.ahead.chain.STOPPING", 0.1)
    more = f"""eval.every=0 rollout.num_rollouts=7 rollout.ahead={ahead} algo.old_policy=rollout algo.num_minibatches=1
        engine._target_=test_ending.Held""".split()
    Held.at = 0
    learned(own(toy, tmp_path / "straight", *more))
    Held.calls, Held.at = 0, ahead + 2
    asked = f"+callbacks.asked={{_target_: helpers.slots.Asked, update: {ahead}, number: {int(signal.SIGTERM)}}}"
    with pytest.raises(StopError):
        learned(own(toy, tmp_path / "run", *more, asked))
    kept = state(tmp_path / "run")["callbacks"]["RolloutCallback"]
    assert kept["rollouts"] == ahead + 1 and [version for version, _ in kept["ahead"]["weights"]] == versions
    Held.at = 0
    learned(own(toy, tmp_path / "run", *more, f"ckpt_path={tmp_path / 'run'}", "resume.changes=allow"))
    same(tmp_path / "run", tmp_path / "straight", "samples")


def test_half_of_a_rollouts_updates_are_not_saved(toy, tmp_path, caplog):
    Engine.at = 0
    with pytest.raises(RuntimeError, match="boom"):
        learned(own(toy, tmp_path, fault("on_before_backward", call=2), "callbacks.checkpoint.every=1"))
    assert [*by_rollouts(tmp_path / "checkpoints")] == [2, 1]
    assert "rollout 3: no checkpoint in the middle of its updates" in caplog.text


def test_a_run_whose_process_is_gone_has_stopped(tmp_path):
    """It could not write how it ended. Its number may be that of another process by now."""
    process = psutil.Process()
    facts = {"status": "running", "pid": os.getpid()}
    for started, host, status in (
        (process.create_time(), socket.gethostname(), "running"),
        (process.create_time() - 60, socket.gethostname(), "stopped"),
        (process.create_time() - 60, "elsewhere", "running"),  # nobody here knows
        (None, socket.gethostname(), "running"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(facts | {"host": host, "process_started": started}))
        assert Run(tmp_path).status == status


def test_a_callback_may_serve_two_runs():
    ending, other = Ending(None), L.Callback()
    trainer = SimpleNamespace(callbacks=[ending, other])
    before = getattr(other, HOOK)
    ending.setup(trainer, None, "fit")
    assert getattr(other, HOOK) != before
    ending.teardown(trainer, None, "fit")
    assert getattr(other, HOOK) == before
