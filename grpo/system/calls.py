"""Calls of other people's code (environments, rewards, tools): many at once, and none for longer than a limit.

A call may return a coroutine, which is then awaited. All coroutines share one event loop, so that the client of a service, made
once, can be used by every call.
"""

import asyncio
import inspect
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

PATIENCE = 0.5  # seconds after which a call may count as slow, see Calls.slow
LOOK = 0.05  # seconds between two looks at what threads do


class _Call:
    """A call on its way, from when it is asked for to its outcome."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.loop = asyncio.get_running_loop()
        self.outcome = self.loop.create_future()  # the result, or the exception
        self.since = time.monotonic()
        self.thread: int | None = None  # its native id, once it has begun
        self.cpu = 0.0  # seconds that the thread had used by then
        self.late = False

    def settle(self, value: Any) -> None:
        """From any thread. Only the first value counts."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.set, value)

    def set(self, value: Any) -> None:
        if not self.outcome.done():
            self.outcome.set_result(value)

    def hear(self, future: Future) -> None:
        """When a coroutine is done."""
        self.settle(CancelledError() if future.cancelled() else future.exception() or future.result())

    async def first(self, begin: Callable[[], None], seconds: float, timeout: TimeoutError) -> Any:
        """The outcome of what `begin` begins, or `timeout` when the seconds are over."""
        timer = self.loop.call_later(seconds, self.set, timeout)
        begin()
        given = await self.outcome
        timer.cancel()
        if given is timeout:
            await asyncio.to_thread(leave_blocked_loop)
        return given


class Calls:
    """Makes calls in up to `threads` threads. Belongs to the event loop in which it is awaited.

    A thread cannot be stopped: one that hangs is left behind, and another one takes its place. A coroutine that the
    call returns and that hangs is cancelled.
    """

    def __init__(self, threads: int) -> None:
        self.slots = asyncio.Semaphore(threads)
        self.waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.open: dict[Hashable, _Call] = {}
        self.threads = self.free = 0
        self.closed = False
        self.looked: tuple[float, dict[int, float]] = (0.0, {})

    async def run(self, key: Hashable, seconds: float, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args), awaited if it is a coroutine. Returns the result or the exception that it ended with: a TimeoutError
        if it takes longer than `seconds`, which count from when it begins. key: names the call while it is open."""
        self.open[key] = call = _Call(partial(function, *args))
        timeout = TimeoutError(f"it took longer than {seconds:g} s")
        try:
            async with self.slots:
                end = time.monotonic() + seconds
                given = await call.first(partial(self._hand_out, call), seconds, timeout)
                call.late = given is timeout
                self.free += not call.late
            if inspect.isawaitable(given):  # waits without a thread
                call.thread, call.outcome = None, call.loop.create_future()
                future = submitted(given)
                given = await call.first(partial(future.add_done_callback, call.hear), end - time.monotonic(), timeout)
                future.cancel()
            return given
        finally:
            del self.open[key]

    def _hand_out(self, call: _Call) -> None:
        if self.closed:
            return call.set(TimeoutError("it was given up"))
        if self.free:
            self.free -= 1
        else:
            self.threads += 1
            threading.Thread(target=self._work, name="call", daemon=True).start()
        self.waiting.put(call)

    def _work(self) -> None:
        while (call := self.waiting.get()) is not None:
            call.cpu, call.thread = time.thread_time(), threading.get_native_id()
            try:
                given = call.function()
            except BaseException as error:  # whatever a user's code does, sys.exit() too
                given = error
            call.settle(given)
            if call.late:
                return  # another thread has taken this one's place

    def close(self) -> None:
        """Give up what is open, and let the threads end."""
        self.closed = True
        for call in list(self.open.values()):
            call.settle(TimeoutError("it was given up"))
        for _ in range(self.threads):
            self.waiting.put(None)

    def slow(self, keys: Iterable[Hashable], others: Iterable[int]) -> set[Hashable]:
        """Those of the calls `keys` that wait for something outside, or compute for long; never those that only wait for a core.

        A call is slow when PATIENCE seconds have passed since it was asked for, and since the last look no call, and none of the
        `others` (threads by native id), has run or waited for a core; or when it has computed for PATIENCE seconds itself.
        Where the system does not say what threads do (Linux does), PATIENCE alone decides.
        """
        now, (before, busy_before) = time.monotonic(), self.looked
        computed, busy = {}, {}
        open = dict(self.open)  # another thread changes it
        for call in open.values():
            if call.thread and (times := _times(call.thread)):
                computed[call] = times[0] - call.cpu
                if computed[call] <= PATIENCE:
                    busy[call.thread] = sum(times)
        busy |= {thread: sum(times) for thread in others if (times := _times(thread))}
        self.looked = now, busy
        if not LOOK / 2 < now - before < PATIENCE:  # too long ago
            return set()
        worked = sum(busy[thread] - busy_before[thread] for thread in busy.keys() & busy_before.keys())
        idle = worked < (now - before) / 10
        old = {key: open[key] for key in keys if key in open and now - open[key].since > PATIENCE}
        return {key for key, call in old.items() if idle or computed.get(call, 0.0) > PATIENCE}


def _times(thread: int) -> tuple[float, float] | None:
    """Seconds that a thread has run, and that it was ready to run and waited for a core; None where the system does not tell."""
    try:
        ran, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(ran) / 1e9, int(waited) / 1e9


# -- coroutines

_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a fork has none
_threads: dict[asyncio.AbstractEventLoop, int] = {}  # in which each runs, by native id


def submitted(awaitable: Awaitable) -> Future:
    """Schedules a coroutine on the shared loop, and returns its Future."""

    async def wait() -> Any:
        try:
            return await awaitable
        except (SystemExit, KeyboardInterrupt) as error:  # with it the loop would end, and every other coroutine hang
            raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None

    return asyncio.run_coroutine_threadsafe(wait(), _loop())


def loop_threads() -> list[int]:
    """The thread of the shared loop, by native id, where there is one."""
    return [_threads[loop] for loop in (_loops.get(os.getpid()),) if loop in _threads]


def awaited(value: Any) -> Any:
    """The value itself, or the result of a coroutine."""
    return submitted(value).result() if inspect.isawaitable(value) else value


def _loop() -> asyncio.AbstractEventLoop:
    """In a thread of its own."""
    if loop := _loops.get(os.getpid()):
        return loop
    made = asyncio.new_event_loop()
    if (loop := _loops.setdefault(os.getpid(), made)) is made:
        thread = threading.Thread(target=loop.run_forever, name="coroutines", daemon=True)
        thread.start()
        _threads[loop] = thread.native_id
    else:  # another thread was quicker
        made.close()
    return loop


def leave_blocked_loop() -> None:
    """A coroutine that blocks, by a call that it should have awaited, holds up all others: later ones get another loop."""
    if loop := _loops.get(os.getpid()):
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(1)
        except TimeoutError:
            _loops.pop(os.getpid(), None)
