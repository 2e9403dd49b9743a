"""Ends a process that waits for too long in a call that nothing can interrupt, with one line that names the call."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from grpo.system.errors import UserError


@contextmanager
def deadline(seconds: float, what: str, advice: str) -> Iterator[None]:
    """End the process if a `with` block takes longer. For calls that hang and have no time limit of their own."""
    timer = threading.Timer(seconds, leave, [f"{what} did not end within {seconds:g} s: {advice}", UserError.exit_code])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave(line: str, code: int, kind: str = UserError.kind) -> None:
    """Print an error and end the process at once, even if its main thread is blocked in C."""
    print(f"{kind}{line}", file=sys.stderr, flush=True)
    os._exit(code)
