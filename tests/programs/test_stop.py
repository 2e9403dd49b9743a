"""Runs that are asked to end: they save a checkpoint, exit with 75, and resume=auto continues them to the bit."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import ROOT, TEST_PATH, compose_config
from helpers.programs import command
from helpers.runs import VARIED, rows, state
from helpers.slots import Varied

from grpo.apps import cli
from grpo.apps.cli import one_line_errors
from grpo.config.resuming import has_checkpoint, is_over
from grpo.runs.run import Run
from grpo.system import exits
from grpo.system.errors import StopError, UserError
from grpo.system.stopping.stop import SIGNALS, Stop, seconds_of
from train import train

SETTINGS = """callbacks=[samples,checkpoint] callbacks.checkpoint.every=3 rollout.num_rollouts=4 algo.num_epochs=2
    algo.kl.coef=0.05 eval.every=2 resume=auto resume.changes=allow""".split()


class Asks(Varied):
    """Sends SIGTERM in the middle of rollout 2, once: in a test the policy has then learned from two rollouts."""

    def score(self, example, trajectory):
        Asks.scored += 1
        if Asks.scored == Asks.at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        torch.rand(1)  # a user's code may draw random numbers
        return super().score(example, trajectory)


def run(smoke, folder, *more: str, task=VARIED) -> None:
    config = compose_config(*smoke(*SETTINGS, *more, f"output_dir={folder}"))
    config.task = task
    config.ckpt_path = str(folder) if has_checkpoint(folder) else None
    train(config)


def same(one, other) -> None:
    """Compare weights, moments, metrics and samples of two runs."""
    states = [state(folder) for folder in (one, other)]
    assert all(torch.equal(tensor, states[1]["state_dict"][name]) for name, tensor in states[0]["state_dict"].items())
    moments = [list(found["optimizer_states"][0]["state"].values()) for found in states]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(*moments, strict=True) for name in a)
    assert rows(one) == rows(other) and len(rows(one)) == 5
    runs = [Run(folder) for folder in (one, other)]
    assert runs[0].samples([1, 2, 3, 4]).equals(runs[1].samples([1, 2, 3, 4]))
    assert runs[0].evaluations([0, 2, 4]).equals(runs[1].evaluations([0, 2, 4]))


@pytest.mark.slow
def test_a_signal_saves_a_checkpoint_and_the_run_continues_to_the_bit(smoke, tmp_path, monkeypatch, capsys):
    """SIGUSR1 comes in the update of rollout 1, SIGTERM in the middle of the rollout after the next."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    before = signal.getsignal(signal.SIGTERM)
    Asks.scored, Asks.at = 0, -1
    task = VARIED | {"_target_": "test_stop.Asks"}
    run(smoke, tmp_path / "straight", task=task)
    played, stopped = Asks.scored, tmp_path / "stopped"

    asked = f"+callbacks.asked={{_target_: helpers.slots.Asked, update: 0, number: {int(signal.SIGUSR1)}}}"
    with pytest.raises(SystemExit) as ended, one_line_errors("train"):
        run(smoke, stopped, asked, task=task)
    assert ended.value.code == StopError.exit_code == 75
    assert capsys.readouterr().err == "stopped by SIGUSR1; the same command with resume=auto continues the run\n"
    manifest = Run(stopped).manifest
    assert (manifest["status"], manifest["rollouts"], manifest["error"]) == ("interrupted", 1, None)

    Asks.scored, Asks.at = 0, played // 2
    with pytest.raises(StopError, match="SIGTERM"):
        run(smoke, stopped, task=task)
    assert 1 < Run(stopped).manifest["rollouts"] < 4
    run(smoke, stopped, task=task)
    same(tmp_path / "straight", stopped)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_finished_run_needs_nothing_and_an_unfinished_one_without_a_checkpoint_begins_anew(smoke, tmp_path):
    config = compose_config(*smoke("resume=auto", "rollout.num_rollouts=4"))
    (tmp_path / "config.yaml").touch()
    assert not is_over(config) and not has_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "00002.ckpt").mkdir(parents=True)
    assert has_checkpoint(tmp_path)
    # there is a checkpoint of rollout 2: the last one could not be written
    for status, rollouts, over in (("interrupted", 2, False), ("finished", 4, False), ("finished", 3, False)):
        (tmp_path / "manifest.json").write_text(json.dumps({"status": status, "rollouts": rollouts}))
        assert is_over(config) == over
    (tmp_path / "checkpoints" / "00004.ckpt").mkdir()
    (tmp_path / "manifest.json").write_text(json.dumps({"status": "interrupted", "rollouts": 4, "owed": True}))
    assert not is_over(config)  # its last evaluation is left
    (tmp_path / "manifest.json").write_text(json.dumps({"status": "running", "rollouts": 0}))
    assert is_over(config) and Run(tmp_path).manifest == {"status": "finished", "rollouts": 4, "error": None}


@pytest.mark.parametrize(("text", "seconds"), [("0:00:05", 5), ("3:50:00", 13800), ("2-00:01:00", 172860)])
def test_a_time_is_written_as_slurm_writes_it(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["90", "1:30", "3h", "-1:00:00", "1:2:3"])
def test_another_form_of_time_is_refused(text):
    with pytest.raises(UserError, match=f"max_time={text} must be a time as"):
        seconds_of(text)


def test_the_time_of_a_run_ends_between_two_updates():
    while time.time() - psutil.Process().create_time() <= 1:
        time.sleep(0.1)
    with pytest.raises(StopError, match="max_time"):
        Stop("0:00:01").check()
    Stop("100-00:00:00").check()


def test_a_rollout_that_would_end_after_max_time_does_not_begin():
    """The process gets 1000 s more. Its longest rollout took 100 s, then 2000 s."""
    stop, age = Stop(), time.time() - psutil.Process().create_time()
    stop.limit, stop.last = age + 1000, age - 100
    stop.check()
    stop.last = age - 2000
    with pytest.raises(StopError, match="max_time"):
        stop.check()


def test_a_signal_after_a_place_waits_for_the_next():
    """Between two places is an update, half of which nobody could save."""
    stop = Stop()
    with stop.allowed():
        pass
    stop.note(signal.SIGTERM, None)
    with pytest.raises(StopError, match="SIGTERM"), stop.allowed():
        pytest.fail("it began")


@pytest.mark.parametrize("kind", SIGNALS)
def test_a_signal_before_training_ends_with_the_same_code(kind, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setattr(exits, "watch", lambda: None)
    with Stop().during(), pytest.raises(SystemExit) as ended:
        signal.signal(kind, signal.SIG_DFL)  # a test in the background ignores SIGINT
        cli.run(lambda: os.kill(os.getpid(), kind), "train")
    line = f"stopped by {kind.name} before the training: the same command begins again\n"
    assert ended.value.code == 75 and capsys.readouterr().err == line


def test_a_second_signal_ends_the_process_and_the_first_one_a_fork():
    program = (
        "import os, signal, time\nfrom grpo.system.stopping.stop import Stop\nstop = Stop()\nstop.listen()\n"
        "if child := os.fork():\n    while not (done := os.waitpid(child, os.WNOHANG))[0]:\n"
        "        os.kill(child, signal.SIGUSR1)  # again: a fork forgets a signal that comes while it starts\n"
        "        time.sleep(0.01)\n    print(done[1], stop.why)\n"
        "while not child:\n    time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint(stop.why, flush=True)\nos.kill(os.getpid(), signal.SIGTERM)\nprint('on')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGTERM and done.stdout == f"{int(signal.SIGUSR1)} None\nSIGTERM\n"


@pytest.mark.slow
def test_two_devices_stop_together(smoke, tmp_path):
    """Only the first process gets the signal."""
    common = [o for o in smoke(*SETTINGS) if not o.startswith("output_dir")]
    common += ["task._target_=helpers.slots.Varied", "trainer=cpu", "trainer.devices=2", "rollout.num_rollouts=6"]
    environment = {"PYTHONPATH": TEST_PATH, "GLOO_SOCKET_IFNAME": "lo"}

    def run(folder, *more):
        return command("train.py", *common, *more, f"hydra.run.dir={folder}", environment=environment)

    assert run(tmp_path / "straight").returncode == 0
    asked = f"+callbacks.asked={{_target_: helpers.slots.Asked, update: 3, number: {int(signal.SIGTERM)}}}"
    first = run(tmp_path / "stopped", asked)
    assert first.returncode == 75 and "stopped by SIGTERM" in first.stderr
    assert run(tmp_path / "stopped").returncode == 0
    states = [state(tmp_path / name)["state_dict"] for name in ("straight", "stopped")]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert rows(tmp_path / "straight") == rows(tmp_path / "stopped")


class Adaptive:
    """A reward that falls with each call: its state is in the checkpoint."""

    __name__ = "adaptive"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions, **_):
        self.calls += 1
        return [len(text) % 7 - 0.01 * self.calls for text in completions]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


@pytest.mark.slow
def test_the_state_of_a_reward_is_in_the_checkpoint(smoke, tmp_path):
    def adaptive(folder, *more):
        reward = "task.rewards=[{_target_: test_stop.Adaptive}]"
        settings = (
            *"callbacks=[checkpoint] callbacks.checkpoint.every=1 rollout.num_rollouts=3 eval.every=0".split(),
            reward,
            "task.weights=null",
        )
        train(compose_config(*smoke(*settings, *more, f"output_dir={tmp_path / folder}")))
        return [row["rollout/reward"] for row in rows(tmp_path / folder)]

    straight = adaptive("straight")
    with pytest.raises(RuntimeError, match="the disk is full"):
        adaptive("crashed", "+callbacks.crash={_target_: helpers.slots.Crash, rollout: 2}")
    more = (f"ckpt_path={tmp_path / 'crashed'}", "resume.changes=allow")
    assert straight[2:] == adaptive("resumed", *more)
    kept = state(tmp_path / "straight")["callbacks"]["RolloutCallback"]["objects"]["task"]["adaptive"]
    assert kept == {"calls": 3 * 2}  # a call for each group


class Signalled(Varied):
    """Sends SIGTERM while the answer `at` is scored, and counts the answers that are scored after it."""

    def score(self, example, trajectory):
        Signalled.scored += 1
        if Signalled.scored == Signalled.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().score(example, trajectory)


@pytest.mark.slow
def test_a_signal_is_heard_in_preflight_and_evaluation_and_nothing_is_lost(smoke, tmp_path, monkeypatch):
    """Few more answers of an evaluation or of the probe are scored. The manifest has the verdicts by then."""
    task, more = (
        VARIED | {"_target_": "test_stop.Signalled"},
        ("eval.batch=1", "eval.samples=8", "eval.sampling.temperature=1"),
    )
    Signalled.scored, Signalled.at = 0, -1
    monkeypatch.setattr("grpo.rollout.rewarding.THREADS", 1)
    run(smoke, tmp_path / "straight", *more, task=task)
    evaluation = 3 * 8  # answers
    after_two = (
        evaluation + 2 * (Signalled.scored - 3 * evaluation) // 4
    )  # two of four rollouts, before their evaluation
    for at in (3, after_two + 3):
        Signalled.scored, Signalled.at = 0, at
        with pytest.raises(StopError, match="SIGTERM"):
            run(smoke, tmp_path / "stopped", *more, task=task)
        assert Signalled.scored <= at + 8
    assert Run(tmp_path / "stopped").manifest["rollouts"] == 2 and has_checkpoint(tmp_path / "stopped")
    Signalled.at = -1
    run(smoke, tmp_path / "stopped", *more, task=task)
    same(tmp_path / "straight", tmp_path / "stopped")
    Signalled.scored, Signalled.at, checked = 0, 3, tmp_path / "checked"
    with pytest.raises(StopError, match="SIGTERM"):
        run(smoke, checked, *more, "preflight=warn", task=task)
    manifest = Run(checked).manifest
    assert manifest["status"] == "interrupted" and not has_checkpoint(checked) and Signalled.scored <= 3 + 2
    assert manifest["preflight"]["the weights are whole"]["result"] == "PASS" and "plan" not in manifest
