"""A rank that dies or hangs is named by the others, which end: two real processes, and signals that nothing can catch."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import lightning as L
import psutil
import pytest
from conftest import ROOT, TEST_PATH
from helpers.slots import Varied
from lightning.fabric.plugins.environments import LightningEnvironment

from grpo.extras.devices import siblings
from grpo.extras.devices.siblings import Siblings
from grpo.extras.devices.watched import FIRST, _Launcher
from grpo.runs.run import Run
from grpo.system.errors import LostRank, StopError, UserError
from grpo.system.stopping.signals import deadline

HOST = socket.gethostname()


def hit(rank: int, number: int, file: str) -> None:
    """Send a signal to this process, once, if it is this rank."""
    if os.environ.get("LOCAL_RANK", "0") == str(rank) and not Path(file).exists():
        Path(file).write_text(f"{os.getpid()} {time.time()}")
        os.kill(os.getpid(), number)


class Hit(L.Callback):
    """Sends a signal to a rank in an update."""

    def __init__(self, *given) -> None:
        self.given = given

    def on_before_optimizer_step(self, *_) -> None:
        hit(*self.given)


class HitTask(Varied):
    """Sends a signal to a rank when it scores. The other one scores for an hour. The first score is the trial of a task."""

    def __init__(self, hit, **options) -> None:
        super().__init__(**options)
        self.given, self.tried = hit, False

    def score(self, example, trajectory):
        if self.tried:
            hit(*self.given)
            time.sleep(3600)
        self.tried = True
        return super().score(example, trajectory)


def two_ranks(smoke, tmp_path, phase: str, rank: int, number: int, *more: str) -> tuple[int, str, str, float]:
    """Return exit code, the lines of both ranks, the process id of the rank that got the signal, and the seconds since then."""
    given = f"[{rank}, {int(number)}, {tmp_path / 'hit'}]"
    task = [f"+callbacks.hit={{_target_: test_siblings.Hit, _args_: {given}}}", "task._target_=helpers.slots.Varied"]
    if phase != "update":
        task = ["task._target_=test_siblings.HitTask", f"+task.hit={given}"]
    common = smoke("trainer=cpu", "trainer.devices=2", f"eval.every={int(phase == 'evaluation')}", *task, *more)
    common = [override for override in common if not override.startswith("output_dir")]
    command = [sys.executable, "train.py", *common, f"hydra.run.dir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": TEST_PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    pid, at = (tmp_path / "hit").read_text().split()
    return done.returncode, done.stderr, pid, time.time() - float(at)


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "rank"), [("evaluation", 0), ("rollout", 1), ("update", 1)])
def test_a_dead_rank_is_named(smoke, tmp_path, phase, rank):
    code, said, pid, seconds = two_ranks(smoke, tmp_path, phase, rank, signal.SIGKILL)
    how = " with signal 9" if rank else ""
    last = said.strip().splitlines()[-1]
    line = (
        rf"error: rank {rank} \(pid {pid}, host \S+\) ended{how}; this rank ends; the same command with resume=auto .*"
    )
    print(f"{phase}: rank {rank} was named after {seconds:.1f} s")
    assert re.fullmatch(line, last) and "Traceback" not in said, said
    assert code == (LostRank.exit_code if rank else -signal.SIGKILL)
    if rank:
        assert f"rank 1 (pid {pid}" in Run(tmp_path).manifest["error"]


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_killed(smoke, tmp_path):
    code, said, pid, seconds = two_ranks(smoke, tmp_path, "update", 1, signal.SIGSTOP, "trainer.timeout=30")
    line = f"error: a collective waited trainer.timeout=30 s for rank 1 (pid {pid}, host {HOST}), which is stopped;"
    print(f"the stopped rank was named after {seconds:.1f} s")
    assert said.strip().splitlines()[-1].startswith(line) and "Traceback" not in said, said
    assert code == LostRank.exit_code and not psutil.pid_exists(int(pid))


# -- one process, with a sleeping child in place of another rank


@pytest.fixture
def other(monkeypatch):
    """The process of another rank, which this one has started."""
    monkeypatch.setattr(siblings, "LOOK", 0.02)
    monkeypatch.setattr(siblings, "CONFIRM", 0.2)
    monkeypatch.setattr(siblings, "GRACE", 10**6)  # the tests go on after the error
    process, before = subprocess.Popen(["sleep", "3600"]), signal.getsignal(siblings.WAKE)
    yield process
    signal.signal(siblings.WAKE, before)
    process.kill()
    process.wait()


def ranks_with(process: subprocess.Popen) -> Siblings:
    ranks = Siblings(limit=7)
    ranks.add(1, process.pid, HOST)
    ranks.add(2, 1, "elsewhere")  # not watched
    return ranks


def test_a_wait_for_a_lock_ends_when_a_rank_dies(other):
    with pytest.raises(LostRank) as lost, ranks_with(other).watched(lambda: None):
        other.kill()
        threading.Event().wait(60)
    assert str(lost.value).startswith(f"rank 1 (pid {other.pid}, host {HOST}) ended with signal 9; this rank ends; ")


def test_a_rank_that_this_one_has_started_has_its_number(other, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")  # it runs already
    monkeypatch.delenv(FIRST, raising=False)
    launcher = _Launcher(Siblings(limit=7), LightningEnvironment(), 2, 1)
    launcher.procs = [other]
    with pytest.raises(LostRank, match=rf"^rank 1 \(pid {other.pid}, host \S+\) ended with signal 9"):
        launcher.launch(lambda: other.kill() or threading.Event().wait(60))


def test_a_rank_that_ends_as_all_were_asked_to_is_not_lost(other):
    """This one stops too, without a checkpoint, which the other one would not write."""
    ranks = ranks_with(other)
    ranks.asked = lambda: "SIGTERM"
    with pytest.raises(StopError, match=r"^stopped by SIGTERM; ") as stop, ranks.watched(lambda: None):
        other.kill()
        threading.Event().wait(60)
    assert not stop.value.saves


def test_an_error_of_a_collective_becomes_the_line(other):
    with pytest.raises(LostRank, match=r"rank 1 .* ended with signal 9"), ranks_with(other).watched(lambda: None):
        other.kill()
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:33")


def test_a_rank_whose_main_thread_is_blocked_ends(other, monkeypatch):
    ended, ranks = threading.Event(), ranks_with(other)
    monkeypatch.setattr(siblings, "GRACE", 0.02)
    monkeypatch.setattr(siblings, "leave", lambda line, code: ended.set() or print(line, code))
    ranks.raised.set()  # the signal does nothing, as in a call of C
    with pytest.raises(LostRank), ranks.watched(lambda: None):
        other.kill()
        assert ended.wait(60)
        raise RuntimeError


def test_a_stopped_rank_is_named_by_a_collective_that_waited_too_long(other):
    other.send_signal(signal.SIGSTOP)
    while psutil.Process(other.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    line = rf"waited trainer.timeout=7 s for rank 1 \(pid {other.pid}, host \S+\), which is stopped; this rank ends"
    with pytest.raises(LostRank, match=line), ranks_with(other).watched(lambda: None):
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 7000ms for recv operation")
    assert other.wait(60) == -signal.SIGKILL


def test_ranks_may_end_together_and_other_errors_stay(other, monkeypatch):
    monkeypatch.setattr(siblings, "CONFIRM", 60.0)
    ranks = ranks_with(other)
    with ranks.watched(lambda: other.kill() or time.sleep(0.3)):  # the thread looks meanwhile
        pass
    monkeypatch.setattr(siblings, "CONFIRM", 0.3)
    with pytest.raises(UserError, match=r"^a mistake$"), ranks_with(other).watched(lambda: None):
        raise UserError("a mistake")
    gone = Siblings(limit=7)
    gone.add(0, 2**22 + 1, HOST)  # larger than every process id
    assert gone.ranks[0].state() == "ended" and gone.ranks[0].ending().endswith("ended")
    with pytest.raises(KeyError), Siblings(limit=7).watched(lambda: None):
        raise KeyError("a bug")


def test_a_call_that_hangs_ends_the_process_with_its_name(monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set() or print(code))
    with deadline(0.01, "a start", "give it a limit"):
        ended.wait(60)
    said = capsys.readouterr()
    assert (said.err, said.out) == ("error: a start did not end within 0.01 s: give it a limit\n", "1\n")
