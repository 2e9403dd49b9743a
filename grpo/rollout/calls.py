"""Calls of somebody else's code (environments) in threads: many at once, and none for longer than a limit."""

import inspect
import queue
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from grpo.system.coroutines import leave_blocked_loop, submitted

THREADS = 64
PATIENCE = 0.5  # seconds
PAUSE = 0.05


@dataclass(eq=False)
class _Call:
    place: Hashable
    function: Callable[[], Any]
    asked: float = field(default_factory=time.monotonic)
    begun: float | None = None
    future: Future | None = None  # of a coroutine


class Calls:
    """timeout: seconds for one call. A thread cannot be stopped, so one that hangs is left behind and another one takes its
    place; a coroutine that hangs is cancelled.

    met: told, under `lock` and in whatever thread, the place of a call and what it came to: the result, or the exception (a
    TimeoutError where it took too long).
    """

    def __init__(self, timeout: float, met: Callable[[Any, Any], None]) -> None:
        self.timeout, self.met = timeout, met
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.open: dict[Hashable, _Call] = {}
        self.first: float | None = None  # when the first one came since the last wait
        self.latest = 0.0
        self.waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.threads = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.open.clear()  # what still comes, comes too late
        for _ in range(self.threads):
            self.waiting.put(None)

    def start(self, place: Hashable, function: Callable[[], Any]) -> None:
        """Have a function called; where it gives a coroutine, that is awaited. A place has one call at a time."""
        with self.lock:
            self.open[place] = call = _Call(place, function)
            if self.threads < min(THREADS, len(self.open)):
                self._hire()
        self.waiting.put(call)

    def wait(self) -> None:
        """Until one has come, if any is open, and then for all that were asked for less than PATIENCE ago: what is quick comes in
        one piece, whatever the order of the threads, and what is slow holds up nobody. What comes in a row, without a PAUSE, is
        waited for no longer than PATIENCE either."""
        while self._gave_up():
            leave_blocked_loop()  # without the lock: a loop that waits for it, to tell of a call, is not blocked

    def _gave_up(self) -> bool:
        """Wait until some calls took too long (True), or for what `wait` is for (False)."""
        with self.lock:
            while self.open:
                now = time.monotonic()
                late = [call for call in self.open.values() if call.begun and now >= call.begun + self.timeout]
                for call in late:
                    self._give_up(call)
                if late:
                    return True
                ends = [call.begun + self.timeout for call in self.open.values() if call.begun]
                if self.first is not None:
                    asked = max(call.asked for call in self.open.values())
                    patience = max(asked + PATIENCE, min(self.first + PATIENCE, self.latest + PAUSE))
                    if now >= patience:
                        break
                    ends.append(patience)
                self.changed.wait(min(ends, default=now + 1) - now)
            self.first = None
            return False

    def _come(self, call: _Call, result: Any) -> None:
        with self.lock:
            if self.open.get(call.place) is call:  # else it was given up
                del self.open[call.place]
                self.latest = time.monotonic()
                self.first = self.latest if self.first is None else self.first
                self.met(call.place, result)
                self.changed.notify()

    def _give_up(self, call: _Call) -> None:
        self._come(call, TimeoutError(f"it took longer than {self.timeout:g} s"))
        if call.future is None:
            self._hire()
        else:
            call.future.cancel()

    def _hire(self) -> None:
        self.threads += 1
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _work(self) -> None:
        while (call := self.waiting.get()) is not None:
            call.begun = time.monotonic()
            try:
                result = call.function()
                if inspect.isawaitable(result):
                    call.future = submitted(result)
                    call.future.add_done_callback(partial(self._awaited, call))
                    continue
            except BaseException as error:  # whatever a user's code does, sys.exit() too
                result = error
            self._come(call, result)

    def _awaited(self, call: _Call, future: Future) -> None:
        self._come(call, CancelledError() if future.cancelled() else future.exception() or future.result())
