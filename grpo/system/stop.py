"""Ends a run early and well: on a signal, as Slurm and Kubernetes send it before they kill, or when its time is used up."""

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil

from grpo.system.errors import StopError, UserError

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Stop:
    """Whether a run should end, and the places where it may. Mutable: it notes the first signal.

    max_time: the time since the process started, as [DAYS-]HOURS:MINUTES:SECONDS; None: no limit.
    """

    def __init__(self, max_time: str | None = None) -> None:
        self.limit = None if max_time is None else seconds_of(max_time)
        self.why: str | None = None  # the first signal
        self.at_once = False  # whether a signal may raise StopError where the program is
        self.last = 0.0  # the age of the process at the last `check`
        self.longest = 0.0  # the longest time between two

    def listen(self) -> None:
        """Take the signals."""
        on_signals(self.note)

    @contextmanager
    def during(self) -> Iterator[None]:
        """After a `with` block, give the signals back to whoever had them before it."""
        before = handlers()
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal. The second one ends the process."""
        if self.why:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.why = signal.Signals(number).name
        if self.at_once:
            raise StopError(self.why)
        log.warning("%s: the run ends after this update and its evaluation, or at once on a second signal", self.why)

    def check(self) -> None:
        """Raise StopError on all devices if one of them should end. Called between two updates."""
        from grpo.system import distributed  # imports torch

        age = time.time() - psutil.Process().create_time()
        self.longest = max(self.longest, age - self.last) if self.last else 0.0
        self.last = age
        late = self.limit is not None and age + self.longest > self.limit
        reasons = distributed.all_gather([self.why or ("max_time" if late else None)])
        if reason := next(filter(None, reasons), None):
            raise StopError(reason)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let a signal raise StopError within a `with` block. With several devices it waits: the others could not follow."""
        from grpo.system import distributed  # imports torch

        self.at_once = distributed.world_size() == 1
        try:
            yield
        finally:
            self.at_once = False


def leave_early(number: int, frame: FrameType | None) -> None:
    """End the process before a run has something to save. No StopError: libraries catch exceptions where they import others."""
    signal.signal(number, signal.SIG_DFL)
    line = f"stopped by {signal.Signals(number).name} before the training: the same command begins again"
    print(line, file=sys.stderr, flush=True)
    sys.exit(StopError.exit_code)


def on_signals(action: Callable[[int, FrameType | None], None]) -> None:
    """Let the signals call a function. Ignored ones stay ignored, as SIGHUP with nohup. A fork of this process ends by them."""
    process = os.getpid()

    def act(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            return action(number, frame)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for kind, handler in handlers().items():
        if handler != signal.SIG_IGN:
            signal.signal(kind, act)


def handlers() -> dict[signal.Signals, Any]:
    """Return the handlers of SIGNALS; none in a thread other than the first, which cannot set them."""
    main = threading.current_thread() is threading.main_thread()
    return {kind: signal.getsignal(kind) for kind in SIGNALS} if main else {}


def seconds_of(text: str) -> int:
    """Return the seconds of a time as [DAYS-]HOURS:MINUTES:SECONDS. Raises UserError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if match is None:
        raise UserError(f"max_time={text} must be a time as [DAYS-]HOURS:MINUTES:SECONDS, such as 3:50:00")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
