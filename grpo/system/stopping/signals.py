"""Hears signals at once, whatever the main thread is doing, and ends a process that is blocked in a call.

Python's own handlers run in the main thread, between two of its instructions: during a long call in C they wait. So the
interpreter also writes the number of each signal to a socket (signal.set_wakeup_fd), which a thread reads.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from grpo.system.errors import UserError

LOOK = 0.5  # seconds between two calls of `Listener.tick`


class Listener(Protocol):
    """Who hears. Both methods are called in the ear's thread, by turns."""

    def hear(self, number: int) -> None:
        """A signal has come."""

    def tick(self) -> None:
        """Some time has passed."""


class Ear:
    """The one thread that hears. Mutable: listener, None if nobody listens."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.ends: tuple[socket.socket, socket.socket] | None = None
        self.mask = threading.local()  # `before`: the signals that a thread did not take before it forked

    def listen(self, listener: Listener | None) -> Listener | None:
        """Let another one listen, and return the one before. Only the main thread may call this."""
        if self.ends:
            with suppress(BlockingIOError, TimeoutError):  # what came so far was for the one before
                self.ends[0].recv(4096, socket.MSG_DONTWAIT)
        before, self.listener = self.listener, listener
        if listener and self.ends is None:
            self.ends = socket.socketpair()
            for end in self.ends:
                end.setblocking(False)
            threading.Thread(target=self._hear, args=(self.ends[0],), name="ear", daemon=True).start()
        if listener and self.ends:  # another library may have taken it
            signal.set_wakeup_fd(self.ends[1].fileno(), warn_on_full_buffer=False)
        return before

    def _hear(self, end: socket.socket) -> None:
        end.settimeout(LOOK)
        while True:
            numbers = b""
            with suppress(TimeoutError):
                numbers = end.recv(4096)
            for number in numbers:
                if self.listener:
                    self.listener.hear(number)
            if self.listener:
                self.listener.tick()

    # A fork of this process has no such thread, and must not write to the socket of its parent.

    def before_fork(self) -> None:
        """Let signals wait."""
        self.mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()) if self.ends else None

    def after_fork(self) -> None:
        """Take signals again."""
        if (before := getattr(self.mask, "before", None)) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def in_child(self) -> None:
        """Hear nothing more."""
        if self.ends:
            signal.set_wakeup_fd(-1)
        self.listener = self.ends = None
        self.after_fork()


EAR = Ear()
os.register_at_fork(before=EAR.before_fork, after_in_parent=EAR.after_fork, after_in_child=EAR.in_child)


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
    # not sys.exit: that ends a thread, and the main thread may never come back from C
    os._exit(code)
