"""Ends a run early and well: on a signal, as Slurm and Kubernetes send it before they kill, or when its time is used up.

A signal is heard at once, in a thread of its own (signals.py), which says where the run will end. The main thread ends it by
StopError: in the middle of a preflight, a rollout or an evaluation (`Stop.allowed`), else after the update. Several ranks end
together: they hear of each other's signals through torch's store, and agree where they wait for each other anyway (`together`).
"""

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeVar

import psutil

from grpo.system.errors import StopError, UserError
from grpo.system.stopping.signals import EAR, Listener, leave

log = logging.getLogger(__name__)

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
AGAIN = signal.SIGURG  # calls `note` in the main thread, and ends its waits; who does not expect it ignores it
AGAIN_PLAYED = "the same command with resume=auto plays the rollout again"
RESUME = "this rank ends; the same command with resume=auto continues the run"
KEY = "grpo/stop"  # in torch's store: why the run ends
SWALLOWED = 2.0  # seconds after which StopError is raised again, since a library may have caught it
FORCED = 4.0  # seconds after which a process ends from the ear's thread if it has nothing to save
TOGETHER = 25.0  # seconds after which a rank no longer waits for the others


@dataclass(frozen=True)
class Place:
    """Where a signal may end the run, as `Stop.allowed` gives it. entered: the time."""

    later: str
    saves: bool
    entered: float


class Ranks(Protocol):
    """Who watches the other ranks of a run. asked: returns the signal that ends the run, if one has come."""

    asked: Callable[[], str | None]

    def suspects(self) -> str:
        """Return which ranks may hang, in words."""


class Stop:
    """Whether a run should end, and the places where it may. Mutable: it notes the first signal.

    max_time: the time since the process started, as [DAYS-]HOURS:MINUTES:SECONDS; None: no limit.
    """

    def __init__(self, max_time: str | None = None) -> None:
        self.limit = None if max_time is None else seconds_of(max_time)
        self.why: str | None = None  # the first signal of any rank
        self.noted, self.count = False, 0  # whether this process has noted one; how many its ear has heard
        self.heard: float | None = None  # when the ear heard of it
        self.at_once = False  # whether a signal may raise StopError where the program is
        self.place: Place | None = None
        self.pressed = self.warned = False  # see `press`
        self.meets: float | None = None  # when this rank began to wait for the others in `together`
        self.left: float | None = None  # when the last place was left
        self.between = 0.0  # the longest time between two places in seconds: an update
        self.store: Any = None  # torch's, if there are several ranks
        self.ranks: Ranks | None = None
        self.last = 0.0  # the age of the process at the last `check`
        self.longest = 0.0  # the longest time between two

    def listen(self, ranks: Ranks | None = None) -> None:
        """Take the signals. ranks: who watches the other ranks, if there are several."""
        from grpo.system import distributed  # imports torch

        self.store = distributed.own_store()
        self.ranks = ranks
        if ranks:
            ranks.asked = lambda: self.why
        on_signals(self.note, self)

    @contextmanager
    def during(self) -> Iterator[None]:
        """After a `with` block, give the signals back to whoever had them before it."""
        before, listener = handlers(), EAR.listener
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
            if before:
                EAR.listen(listener)

    # -- in the main thread

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal. The second one ends the process."""
        if number != AGAIN:
            if self.noted:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
                return
            self.noted, self.why = True, self.why or signal.Signals(number).name
        self.end_here()

    def end_here(self) -> None:
        """Raise StopError if the run should end and may end here."""
        if self.at_once and self.why:
            raise StopError(self.why, self.place.later if self.place and not self.place.saves else "")

    def check(self) -> None:
        """Raise StopError on all devices if one of them should end. Called between two updates."""
        from grpo.system import distributed  # imports torch

        self.passed()
        age = time.time() - psutil.Process().create_time()
        self.longest = max(self.longest, age - self.last) if self.last else 0.0
        self.last = age
        late = self.limit is not None and age + self.longest > self.limit
        # all ranks or none: one that ends alone leaves the others waiting for it
        reasons = distributed.all_gather([self.why or ("max_time" if late else None)])
        if reason := next(filter(None, reasons), None):
            raise StopError(reason)

    def passed(self) -> None:
        """Note the time since the last place."""
        if self.left is not None:
            self.between, self.left = max(self.between, time.monotonic() - self.left), None

    @contextmanager
    def allowed(self, later: str = AGAIN_PLAYED, saves: bool = True, new: bool = True) -> Iterator[None]:
        """Let a signal raise StopError within a `with` block; with several devices and something to save, only in `together`.

        later: what a resumed run does. saves: whether there is something to save. new: whether also an earlier signal raises it.
        """
        from grpo.system import distributed  # imports torch

        self.passed()
        if self.why and not new:
            yield
            return
        self.place, whole = Place(later, saves, time.monotonic()), False
        try:
            self.at_once = distributed.world_size() == 1 or not saves
            with out_of_groups():
                self.end_here()
                yield
            whole = True
        finally:
            self.at_once = False
            if saves or whole:  # otherwise the process still has to end soon
                self.place, self.left = None, time.monotonic()

    # -- in the ear's thread

    def hear(self, number: int) -> None:
        """Say where the run will end."""
        if number not in SIGNALS:
            return
        name = signal.Signals(number).name
        self.count += 1
        if self.count > 1:
            time.sleep(1)  # `note` has ended the process, unless the main thread is blocked in C
            leave(f"ended by a second signal, {name}", 128 + number, kind="")
        self.begin(name)
        if self.store is not None:
            self.tell(name)

    def begin(self, why: str) -> None:
        """Begin to end, and say where."""
        self.heard, self.why = self.heard or time.monotonic(), self.why or why
        rest = self.between + self.left - time.monotonic() if self.left is not None else 0.0
        about = f", in about {rest:.0f} s" if rest > 0.5 else ""
        after = f"the run ends after this update{about}, or at once on a second signal"
        log.warning("%s: %s", why, f"the run ends now; {self.place.later}" if self.place else after)

    def tick(self) -> None:
        """Look for signals of other ranks, and press the main thread to end."""
        if self.store is not None and self.heard is None and (why := self.asked()):
            self.begin(why)
            wake()
        if self.heard is not None and (place := self.place):
            self.press(place, time.monotonic() - max(self.heard, place.entered))

    def press(self, place: Place, waited: float) -> None:
        """See to it that the main thread leaves a place. waited: seconds."""
        if self.at_once and waited > SWALLOWED and not self.pressed:
            self.pressed = True
            wake()
        if not place.saves and waited > FORCED:
            leave(f"stopped by {self.why}; {place.later}", StopError.exit_code, kind="")
        if waited > FORCED and not self.warned:
            self.warned = True
            log.warning("%s: the run ends after a call that cannot be interrupted, in %s", self.why, main_place())
        if self.meets is not None and time.monotonic() - self.meets > TOGETHER:
            others = self.ranks.suspects() if self.ranks else "another rank"
            line = f"stopped by {self.why}, without a checkpoint: it waited {TOGETHER:g} s for {others}"
            leave(f"{line}; {RESUME}", StopError.exit_code, kind="")

    def asked(self) -> str | None:
        """Return the signal of another rank."""
        try:
            return self.store.get(KEY).decode() if self.store.check([KEY]) else None
        except RuntimeError:  # its rank has ended, which `Ranks` notices
            self.store = None
            return None

    def tell(self, name: str) -> None:
        """Tell the other ranks."""
        from grpo.system import distributed  # imports torch

        try:
            self.store.set(KEY, f"{name} at rank {distributed.rank()}")
        except RuntimeError:  # its rank has ended
            self.store = None


def together(work: Callable[[], list[T]]) -> list[T]:
    """Return the lists of all ranks, concatenated. A signal to any rank ends the work of all: then all raise StopError."""
    from grpo.system import distributed  # imports torch

    stop, main = EAR.listener, threading.current_thread() is threading.main_thread()
    if distributed.world_size() == 1:
        return work()
    reason, mine = None, []
    if main and isinstance(stop, Stop) and stop.place and stop.place.saves:
        try:
            with out_of_groups():
                stop.at_once = True
                stop.end_here()
                mine = work()
                stop.at_once = False
        except StopError as error:
            stop.at_once, reason = False, error.reason
    else:
        mine = work()
    if reason:
        stop.meets = time.monotonic()
    gathered = distributed.all_gather([(reason, mine)])
    if reason := next((reason for reason, _ in gathered if reason), None):
        raise StopError(reason)
    return [item for _, items in gathered for item in items]


@contextmanager
def out_of_groups() -> Iterator[None]:
    """Raise a StopError that leaves a `with` block in a group of exceptions, as asynchronous libraries wrap it."""
    try:
        yield
    except BaseExceptionGroup as group:
        inner = group.subgroup(StopError)
        while isinstance(inner, BaseExceptionGroup):
            inner = inner.exceptions[0]
        if inner is not None:
            raise inner from None
        raise


def wake() -> None:
    """Call `Stop.note` in the main thread."""
    signal.pthread_kill(threading.main_thread().ident, AGAIN)


def main_place() -> str:
    """Return where the main thread is: its innermost file and line."""
    frame = sys._current_frames()[threading.main_thread().ident]
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def on_signals(action: Callable[[int, FrameType | None], None], listener: Listener) -> None:
    """Let the signals call a function in the main thread, and tell a listener at once. Ignored ones stay ignored, as SIGHUP with
    nohup. A fork of this process ends by them."""
    process = os.getpid()

    def act(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            return action(number, frame)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for kind, handler in handlers().items():
        if handler != signal.SIG_IGN:
            signal.signal(kind, act)
    if handlers():
        EAR.listen(listener)


def handlers() -> dict[signal.Signals, Any]:
    """Return the handlers of SIGNALS and AGAIN; none in a thread other than the first, which cannot set them."""
    main = threading.current_thread() is threading.main_thread()
    return {kind: signal.getsignal(kind) for kind in (*SIGNALS, AGAIN)} if main else {}


def seconds_of(text: str) -> int:
    """Return the seconds of a time as [DAYS-]HOURS:MINUTES:SECONDS. Raises UserError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if match is None:
        raise UserError(f"max_time={text} must be a time as [DAYS-]HOURS:MINUTES:SECONDS, such as 3:50:00")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
