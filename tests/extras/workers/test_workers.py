"""Worker processes: killed at a deadline or out of memory, shared by threads, ended with their parent."""

import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.time_limits import crowded

from grpo.extras.workers.workers import WorkerError, Workers

LIMIT = 120.0  # seconds after which a test that waits fails


def workers(function: str, warm_up: tuple, deadline: float = 5.0, memory: int = 2**28) -> Workers:
    return Workers(function, 2, deadline, memory, warm_up)


def test_a_worker_is_killed_at_its_deadline_and_replaced():
    pool = workers("time.sleep", (0,), deadline=1.0)
    assert pool.call(0.01) is None
    (killed,) = pool.workers.values()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        pool.call(3600)
    assert time.monotonic() - start >= 1.0 and killed.process.returncode == -signal.SIGKILL
    assert pool.call(0.01) is None


def test_a_worker_that_raises_lives_on_and_one_that_died_idle_is_replaced():
    pool = Workers("time.sleep", 1, 5.0, 2**28, (0,))
    with pytest.raises(WorkerError, match="ValueError: sleep length must be non-negative"):
        pool.call(-1)
    (idle,) = pool.workers.values()
    assert pool.call(0) is None and [*pool.workers.values()] == [idle]
    idle.process.kill()
    idle.process.wait()
    with pytest.raises(WorkerError, match="the worker died"):
        pool.call(0)
    assert pool.call(0) is None


def test_a_warm_up_may_take_longer_than_an_item():
    pool = Workers("time.sleep", 1, 0.5, 2**28, (1.0,))
    assert pool.call(0.01) is None


def test_a_worker_whose_warm_up_fails_gets_no_item():
    pool = Workers("math.sqrt", 1, 5.0, 2**28, (-1,))
    for _ in range(2):
        with pytest.raises(WorkerError, match="the worker did not start: ValueError: math domain error"):
            pool.call(4)


def test_a_worker_has_the_variables_of_its_parent_and_not_its_terminal(monkeypatch, capfd):
    monkeypatch.setenv("A_SETTING", "7")
    pool = Workers("os.system", 1, 5.0, 2**28, ("true",))
    assert pool.call('echo seen; echo seen >&2; test "$A_SETTING" = 7') == 0
    assert capfd.readouterr() == ("", "")


def test_two_workers_import_what_only_their_parent_finds_and_wait_for_each_other(tmp_path, monkeypatch):
    """Each gives way until the file of the other is there, for a minute at most."""
    (tmp_path / "odd_module.py").write_text(
        "import pathlib, time\n"
        "def met(mine, other):\n"
        "    pathlib.Path(mine).touch()\n"
        "    end = time.monotonic() + 60\n"
        "    while mine != other and not pathlib.Path(other).exists() and time.monotonic() < end: time.sleep(0.01)\n"
        "    return pathlib.Path(other).exists()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pool, names = workers("odd_module.met", (f"{tmp_path}/0", f"{tmp_path}/0"), 120.0), ("one", "two")
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(pool.call, *(f"{tmp_path}/{name}" for name in order)) for order in (names, names[::-1])]
        assert [call.result() for call in calls] == [True, True]


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="needs Linux's statistics of threads")
def test_waiting_for_a_core_does_not_count():
    """The worker shares a core with five others, so a quarter of a second of computing takes it a second and a half."""
    pool = Workers("helpers.time_limits.compute", 1, 0.75, 2**30, (0.0,))
    pool.call(0.0)
    (worker,) = pool.workers.values()
    with crowded(worker.process.pid):
        assert pool.call(0.25) == 0.25


def test_many_threads_share_a_pool():
    pool = workers("math.factorial", (3,))
    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(pool.call, range(100))) == [math.factorial(n) for n in range(100)]


@pytest.mark.parametrize(
    ("function", "warm_up", "bad", "message"),
    [
        ("math.sqrt", (4,), -1, "ValueError: math domain error"),
        ("operator.mul", ("x", 3), None, "TypeError"),
        ("builtins.range", (3,), 3, "did not start"),  # no JSON
        ("nothing.at_all", (), 1, "died"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_said(function, warm_up, bad, message):
    pool = workers(function, warm_up)
    with pytest.raises(WorkerError, match=message):
        pool.call(bad)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's address space")
def test_a_worker_out_of_memory_dies_alone():
    pool = workers("operator.mul", ("x", 3), memory=2**28)
    with pytest.raises(WorkerError, match="died"):
        pool.call("x", 2**30)
    assert pool.call("x", 3) == "xxx"


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


ORPHANS = """
import os, signal, threading, time
from grpo.extras.workers.workers import Workers
pool = Workers("time.sleep", 2, 3600.0, 2**30, (0,))
pool.call(0)
threading.Thread(target=pool.call, args=(600,), daemon=True).start()
threading.Thread(target=pool.call, args=(600,), daemon=True).start()
while len(pool.workers) < 2:
    time.sleep(0.1)
time.sleep(1)  # both are asleep, if the second one is warm
print(*(worker.process.pid for worker in pool.workers.values()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_do_not_outlive_a_killed_parent():
    done = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=300)
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(pids) == 2 and done.stderr == ""
    limit = time.monotonic() + LIMIT
    while any(alive(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_a_fork_starts_workers_of_its_own():
    pool = Workers("math.factorial", 1, 5.0, 2**28, (3,))
    assert pool.call(4) == 24
    if (child := os.fork()) == 0:
        try:
            signal.alarm(60)  # ends one that waits for the threads of its parent
            os._exit(pool.call(5) != 120)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.call(6) == 720
