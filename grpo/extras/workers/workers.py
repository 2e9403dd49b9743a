"""Worker processes that may be killed: each runs one function on one item at a time, with a deadline and a memory limit.

    pool = Workers("grpo.extras.grading.algebra.by_algebra", size=2, deadline=5.0, memory=2**30, warm_up=("1", "1"))
    pool.call("x+1", "1+x")  # from any thread; raises TimeoutError or WorkerError

Knows nothing of what is computed: arguments and results are JSON. A worker is a plain subprocess, not a fork (the parent may
hold a GPU and threads), and not a spawn of multiprocessing (which imports the parent's main module again). It ends with the
parent.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from grpo.system.clock import Clock
from grpo.system.root import PACKAGE

START_LIMIT = 120.0  # seconds for imports and the warm-up, on a machine that may be busy
LOOK = 0.05  # seconds between two looks at a clock that stands
PR_SET_PDEATHSIG = 1


class WorkerError(Exception):
    """The function raised, or its process died (a crash, or out of memory)."""


class Workers:
    """A pool of `size` processes that call `function`, a dotted path; each is started when it is first needed.

    deadline: seconds for one call, counted once a warm worker has the item, without those in which it waits for a core; then the
    worker is killed and a new one started.
    memory: bytes of address space of a worker (not enforced on macOS).
    warm_up: arguments of a first call, whose result is discarded; late imports happen there.
    """

    def __init__(self, function: str, size: int, deadline: float, memory: int, warm_up: tuple = ()) -> None:
        self.size, self.deadline = size, deadline
        self.arguments = json.dumps([function, deadline, memory, warm_up])
        self.lock = threading.Lock()
        self.pid = 0  # of the process that started the workers

    def call(self, *args: Any) -> Any:
        """Return function(*args). Blocks until it is done; any number of threads may wait."""
        reply: Future[dict[str, Any]] = Future()
        try:
            self._open().submit(self._serve, args, reply)
        except RuntimeError as error:  # the process is ending, or can start no thread
            raise WorkerError(f"no worker can be started: {error}") from error
        answer = reply.result()
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def _open(self) -> ThreadPoolExecutor:
        """Return a pool with a thread for each worker. The thread starts its worker and lives as long as the process, because
        Linux sends a child its death signal when the thread that started it ends. A fork has no threads, and makes a new pool."""
        with self.lock:
            if self.pid != os.getpid():
                self.workers: dict[int, _Worker] = {}  # by thread
                self.threads = ThreadPoolExecutor(self.size, "workers")
                self.pid = os.getpid()
            return self.threads

    def _serve(self, args: tuple, reply: Future) -> None:
        try:
            reply.set_result(self._own().ask(args, self.deadline))
        except Exception as error:
            self._end()
            reply.set_exception(error)
            with contextlib.suppress(WorkerError):
                self._own()  # warm up before the next item, which a warm worker may take meanwhile

    def _own(self) -> "_Worker":
        """Return the worker of this thread, warm."""
        me = threading.get_ident()
        if me not in self.workers:
            try:
                self.workers[me] = _Worker(self.arguments)
                first = self.workers[me].answer(START_LIMIT)
                if "error" in first:
                    raise WorkerError(first["error"])
            except (OSError, WorkerError) as error:
                self._end()
                raise WorkerError(f"the worker did not start: {error}") from error
        return self.workers[me]

    def _end(self) -> None:
        if worker := self.workers.pop(threading.get_ident(), None):
            worker.end()


class _Worker:
    """The parent's end of one process."""

    def __init__(self, arguments: str) -> None:
        paths = [str(PACKAGE.parent), *(path or os.getcwd() for path in sys.path)]
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )

    def ask(self, args: tuple, deadline: float) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # it died idle, which the answer reports
            self.connection.send_bytes(json.dumps(args).encode())
        return self.answer(deadline)

    def answer(self, seconds: float) -> dict[str, Any]:
        clock = Clock(self.process.pid)
        while not self.connection.poll(max(seconds - clock.spent(), LOOK)):
            if clock.spent() >= seconds:
                raise TimeoutError(f"no result after {seconds} s")
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise WorkerError("the worker died") from error

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


def main() -> None:
    """Run the worker's side. The function's output is discarded; when memory runs out, the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection, (path, deadline, memory, args) = Connection(int(sys.argv[1])), json.loads(sys.argv[2])
    with contextlib.suppress(ValueError, OSError):  # macOS has the limit, but refuses to set it
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    module, _, name = path.rpartition(".")
    function, limit = getattr(importlib.import_module(module), name), START_LIMIT
    while True:
        signal.setitimer(signal.ITIMER_PROF, limit)  # ends a busy worker without a parent to kill it
        try:
            reply = json.dumps({"result": function(*args)})
        except MemoryError:
            os._exit(1)
        except Exception as error:
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
        connection.send_bytes(reply.encode())
        args, limit = json.loads(connection.recv_bytes()), 2 * deadline  # EOFError: the parent has ended


if __name__ == "__main__":
    main()
