"""Worker processes that may be killed: one function, one item at a time, a deadline and a limit of memory.

    pool = Workers("grpo.rewards.math.grading.by_algebra", size=2, deadline=5.0, memory=2**30, warm_up=("1", "1"))
    pool.call("x+1", "1+x")  # from any thread; raises TimeoutError or WorkerError

Knows nothing of what is computed: arguments and results are JSON. A worker is a plain subprocess, not a fork (the parent may
hold a GPU and threads) and not a spawn of multiprocessing (which imports the parent's main module again).
"""

import atexit
import contextlib
import ctypes
import importlib
import itertools
import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

START_LIMIT = 120.0  # seconds for imports and the warm-up, on a machine that may be busy
PR_SET_PDEATHSIG = 1


class WorkerError(Exception):
    """The function raised, or its process died: a crash, no more memory."""


class Workers:
    """A pool of `size` processes that call `function`, a dotted path; each is started when it is first needed.

    deadline: seconds of one call, from when a warm worker has the item; then the worker is killed, and another one started.
    memory: bytes of address space of a worker (not enforced on macOS).
    warm_up: arguments of a first call, whose result is thrown away; what is imported late is imported there.
    """

    def __init__(self, function: str, size: int, deadline: float, memory: int, warm_up: tuple = ()) -> None:
        self.function, self.size, self.deadline, self.memory, self.warm_up = function, size, deadline, memory, warm_up
        self.lock = threading.Lock()
        self.pid = 0  # of the process whose children the workers are
        atexit.register(self.close)

    def _open(self) -> None:
        """A fork has the parent's pool, but not its children: it starts with none."""
        with self.lock:
            if self.pid == os.getpid():
                return
            # a warm one (0) before one that starts (1) before one that is not there yet (2)
            self.idle: queue.PriorityQueue[tuple[int, int, Future | None]] = queue.PriorityQueue()
            for i in range(self.size):
                self.idle.put((2, i, None))
            self.turns = itertools.count(self.size)
            self.alive: set[_Worker] = set()
            # One thread starts all workers and lives as long as the process: Linux sends a child its death signal when
            # the thread that started it ends.
            self.starter = ThreadPoolExecutor(1, "workers")
            self.pid = os.getpid()

    def _start(self) -> "_Worker":
        try:
            worker = _Worker(self.function, self.deadline, self.memory, self.warm_up)
        except OSError as error:
            raise WorkerError(f"no worker can be started: {error}") from error
        self.alive.add(worker)
        return worker

    def call(self, *args: Any) -> Any:
        """function(*args). Blocks until it is done; as many threads may wait as like to."""
        self._open()
        idle, worker, done = self.idle, None, False
        _, _, slot = idle.get()
        try:
            slot = slot or self.starter.submit(self._start)
            worker = slot.result()
            worker.wait_until_warm()
            reply = worker.ask(args, self.deadline)
            done = True
        except (RuntimeError, CancelledError) as error:  # the process ends, or has no thread left
            raise WorkerError(f"no worker can be started: {error}") from error
        finally:  # also when Ctrl-C ended the wait: a worker that still counts cannot take the next item
            idle.put((0, next(self.turns), slot) if done else (1, next(self.turns), self._replace(worker)))
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["result"]

    def start(self) -> None:
        """Start all that are not there yet, and wait until they are warm: for whoever measures."""
        self._open()
        slots = [self.idle.get() for _ in range(self.size)]
        slots = [slot or self.starter.submit(self._start) for _, _, slot in slots]
        for slot in slots:
            slot.result().wait_until_warm()
            self.idle.put((0, next(self.turns), slot))

    def _replace(self, worker: "_Worker | None") -> Future | None:
        if worker is not None:
            self.alive.discard(worker)
            worker.kill()
        with contextlib.suppress(RuntimeError):
            return self.starter.submit(self._start)
        return None

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        with self.lock:
            if self.pid != os.getpid():
                return
            self.pid = 0
            self.starter.shutdown(wait=True, cancel_futures=True)
            for worker in list(self.alive):
                worker.kill()


class _Worker:
    """The parent's end of one process: a line of JSON in, a line of JSON out."""

    def __init__(self, function: str, deadline: float, memory: int, warm_up: tuple) -> None:
        paths = [str(Path(__file__).parents[2]), *(path or os.getcwd() for path in sys.path)]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "grpo.system.workers",
                function,
                str(deadline),
                str(memory),
                json.dumps(warm_up),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"},
        )
        self.poll = select.poll()  # not select.select: a training process may have more than 1,024 open files
        self.poll.register(self.process.stdout, select.POLLIN)
        self.warm = False

    def wait_until_warm(self) -> None:
        if not self.warm:
            try:
                reply = self._read(START_LIMIT)
            except TimeoutError as error:
                raise WorkerError("the worker did not start") from error
            if "error" in reply:
                raise WorkerError(f"the worker did not start: {reply['error']}")
            self.warm = True

    def ask(self, args: tuple, deadline: float) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # then it died idle, and the read says so
            self.process.stdin.write(json.dumps(args).encode() + b"\n")
            self.process.stdin.flush()
        return self._read(deadline)

    def _read(self, seconds: float) -> dict[str, Any]:
        if not self.poll.poll(seconds * 1000):
            raise TimeoutError(f"no result after {seconds} s")
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise WorkerError("the worker died")
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def _serve(function: Callable, deadline: float, warm_up: list, requests: int, replies: int) -> None:
    """The worker's end. What the function prints goes nowhere; out of memory is the end of the process."""

    with open(requests, "rb") as lines, open(replies, "wb", 0) as out:

        def answer(args: list) -> None:
            try:
                reply = json.dumps({"result": function(*args)})
            except MemoryError:
                os._exit(1)
            except Exception as error:
                reply = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
            out.write(reply.encode() + b"\n")

        answer(warm_up)
        for line in lines:  # ends with the parent
            signal.setitimer(signal.ITIMER_PROF, 2 * deadline)  # the end of a worker without a parent to kill it
            answer(json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    function, deadline, memory, warm_up = sys.argv[1:]
    with contextlib.suppress(ValueError, OSError):  # macOS knows the limit, and refuses it
        resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    requests, replies = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    module, _, name = function.rpartition(".")
    called = getattr(importlib.import_module(module), name)
    _serve(called, float(deadline), json.loads(warm_up), requests, replies)


if __name__ == "__main__":
    main()
