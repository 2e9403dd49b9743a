"""Time limits on a busy machine: kept for calls that hang alone, and beside others that compute on the same core."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpo.system.calls import Calls


def keep_for(monkeypatch, hangs: Callable[..., bool]) -> None:
    """Keep the limit of a call of user code for those with hangs(key, function, *args), and give the others five minutes."""
    run = Calls.run

    async def run_with(self, key, seconds: float, function: Callable[..., Any], *args: Any) -> Any:
        return await run(self, key, seconds if hangs(key, function, *args) else 300.0, function, *args)

    monkeypatch.setattr(Calls, "run", run_with)


def compute(seconds: float) -> float:
    """Compute for so many seconds in this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return seconds


@contextmanager
def crowded(process: int = 0) -> Iterator[None]:
    """Let a process (0: this thread, and what it starts) share a core with five others that compute."""
    cores, others = os.sched_getaffinity(0), []
    core = min(cores)
    busy = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    try:
        for _ in range(5):
            others.append(subprocess.Popen([sys.executable, "-S", "-c", busy], stdout=subprocess.PIPE))
        for other in others:
            other.stdout.read(1)
        os.sched_setaffinity(process, {core})
        yield
    finally:
        if not process:
            os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.communicate()
