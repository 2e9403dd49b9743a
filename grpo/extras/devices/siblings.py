"""Notices that another rank of the run is gone, whatever this one is doing, and ends this one with a line that names it.

A collective may wait for ever for a process that has died. So a thread of each rank looks at the process table once a second. It
raises LostRank in the main thread, by a signal that also ends a wait for a lock, and ends the process if the main thread is
blocked in C. Ranks of other machines are named, not watched.
"""

import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from grpo.system.errors import LostRank, StopError, UserError
from grpo.system.stopping.signals import leave
from grpo.system.stopping.stop import RESUME

LOOK = 1.0  # seconds between two looks at the process table
CONFIRM = 2.0  # seconds after which a rank that is gone counts as lost, unless this one has finished too
GRACE = 20.0  # seconds for the main thread to end by itself
LATE = re.compile("timed out|timeout", re.IGNORECASE)  # in errors of gloo and NCCL
WAKE = signal.SIGUSR2


@dataclass(frozen=True)
class Sibling:
    """Another rank. process: None if it had ended before it was looked for, or runs on another machine."""

    rank: int
    pid: int
    host: str
    process: psutil.Process | None

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}, host {self.host})"

    def state(self) -> str:
        """Return what the process does in one word, as sleeping or stopped; "ended" if it has ended, "elsewhere" if unknown."""
        if self.host != socket.gethostname():
            return "elsewhere"
        with suppress(psutil.NoSuchProcess):
            if self.process and self.process.is_running():
                state = self.process.status()
                return "ended" if state == psutil.STATUS_ZOMBIE else state
        return "ended"

    def ending(self) -> str:
        """Return that the process has ended, and how if this one started it: the system reports that to the parent alone."""
        code = None
        with suppress(psutil.TimeoutExpired):  # a zombie of another process
            code = self.process.wait(0) if self.process else None
        if code is None:
            return f"{self} ended"
        if code < 0:
            return f"{self} ended with signal {-code:d}"
        return f"{self} ended with exit code {code}" + (", see its message above" if code > 0 else "")


class Siblings:
    """The other ranks. Mutable: they are added one after another, and may be lost. limit: seconds for one collective."""

    def __init__(self, limit: float) -> None:
        self.limit, self.line = limit, ""
        self.asked: Callable[[], str | None] = lambda: None  # the signal that ends the run, if one has come
        self.ranks: dict[int, Sibling] = {}
        self.lost, self.over, self.raised = threading.Event(), threading.Event(), threading.Event()

    def add(self, rank: int, pid: int, host: str) -> None:
        """Add a rank, unless it was added before."""
        here = host == socket.gethostname()
        process = psutil.Process(pid) if here and psutil.pid_exists(pid) else None
        self.ranks = {rank: Sibling(rank, pid, host, process)} | self.ranks  # a new dict, since a thread reads it

    @contextmanager
    def watched(self, together: Callable[[], None]) -> Iterator[None]:
        """Watch the ranks during a `with` block. Raises LostRank. together: a collective, with which all ranks leave it."""
        threading.Thread(target=self._watch, name="siblings", daemon=True).start()
        before = signal.signal(WAKE, self._wake)
        try:
            yield
            together()
        except Exception as error:
            self.raised.set()
            if isinstance(error, LostRank) or (not isinstance(error, UserError) and self.lost.wait(3 * CONFIRM)):
                raise self.loss() from error
            if isinstance(error, RuntimeError) and LATE.search(str(error)):
                raise LostRank(self.late()) from error
            raise
        finally:
            self.over.set()
            if not self.lost.is_set():  # otherwise the signal may still come
                signal.signal(WAKE, before)

    def _wake(self, *_: Any) -> None:
        if not self.raised.is_set():
            raise self.loss()

    def loss(self) -> UserError:
        """Return the error of a lost rank; where the run was asked to end, that rank has only been quicker."""
        if not (why := self.asked()):
            return LostRank(self.line)
        error = StopError(why)
        error.saves = False  # all ranks write a checkpoint, or none
        return error

    def _watch(self) -> None:
        while not self.over.wait(LOOK):
            if gone := [sibling for sibling in self.ranks.values() if sibling.state() == "ended"]:
                if self.over.wait(CONFIRM):
                    return
                self.line = f"{'; '.join(sibling.ending() for sibling in gone)}; {RESUME}"
                self.lost.set()
                signal.pthread_kill(threading.main_thread().ident, WAKE)
                time.sleep(GRACE)
                leave(str(error := self.loss()), error.exit_code)

    def late(self) -> str:
        """Return a line about a collective that waited too long, after `suspects`."""
        return f"a collective waited trainer.timeout={self.limit:g} s for {self.suspects()}; {RESUME}"

    def suspects(self) -> str:
        """Return which ranks may hang. Kills those that this one has started."""
        states = {str(sibling): sibling.state() for sibling in self.ranks.values()}
        stopped = [name for name, state in states.items() if state == psutil.STATUS_STOPPED]
        suspects = [f"{name}, which is {states[name]}" for name in stopped or states]
        for child in psutil.Process().children():
            if child in [sibling.process for sibling in self.ranks.values()]:
                child.kill()
        return " or ".join(suspects) or "another rank"
