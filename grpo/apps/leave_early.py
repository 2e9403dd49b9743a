"""Ends a process on a signal before its work has begun, and before `Stop` listens."""

import os
import signal
import sys
import threading
import time
from types import FrameType

from grpo.system.errors import StopError
from grpo.system.stopping.stop import FORCED, SIGNALS, on_signals


class Early:
    """Ends a process before its work has begun. No StopError: libraries catch exceptions where they import others."""

    def __init__(self, work: str) -> None:
        self.line = f"before the {work}: the same command begins again"
        self.lock, self.why, self.since = threading.RLock(), "", 0.0

    def leave(self, number: int, frame: FrameType | None) -> None:
        """End the process, in the main thread."""
        signal.signal(number, signal.SIG_DFL)
        self.hear(number)
        sys.exit(StopError.exit_code)

    def hear(self, number: int) -> None:
        """Say it, once."""
        with self.lock:
            if number in SIGNALS and not self.why:
                self.why, self.since = signal.Signals(number).name, time.monotonic()
                print(f"stopped by {self.why} {self.line}", file=sys.stderr, flush=True)

    def tick(self) -> None:
        """End the process if its main thread is blocked in C."""
        if self.why and time.monotonic() - self.since > FORCED:
            os._exit(StopError.exit_code)


def leave_early(work: str) -> None:
    """Let signals end the process, until `Stop` listens. work: what has not begun yet, as training."""
    early = Early(work)
    on_signals(early.leave, early)
