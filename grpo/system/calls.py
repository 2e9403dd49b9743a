"""Calls users' code (environments, rewards, tools): many calls at once, each with a time limit.

A call may return a coroutine, which is then awaited. All coroutines share one event loop, so that every call can use the same
client of a service.
"""

import asyncio
import inspect
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from grpo.system.clock import times
from grpo.system.exits import seen

SPENT: Counter[str] = Counter()  # seconds in which any call of a kind was open, in this process
PATIENCE = 0.5  # seconds after which a call may count as slow, see Calls.slow
LOOK = 0.05  # seconds between two checks of what threads do


class _Call:
    """A call, from its request to its outcome."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.loop = asyncio.get_running_loop()
        self.outcome = self.loop.create_future()  # the result, or the exception
        self.since = time.monotonic()
        self.thread: int | None = None  # its native id, once it has begun
        self.cpu = 0.0  # seconds that the thread had computed before
        self.late = False

    def settle(self, value: Any) -> None:
        """Set the outcome, from any thread. Only the first one counts."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.set, value)

    def set(self, value: Any) -> None:
        if not self.outcome.done():
            self.outcome.set_result(value)

    def hear(self, future: Future) -> None:
        """Take the outcome of a finished coroutine."""
        self.settle(CancelledError() if future.cancelled() else future.exception() or future.result())

    async def first(self, begin: Callable[[], None], seconds: float, timeout: TimeoutError) -> Any:
        """Return the outcome of the call that `begin` starts, or `timeout` after this many seconds."""
        timer = self.loop.call_later(seconds, self.set, timeout)
        begin()
        outcome = await self.outcome
        timer.cancel()
        if outcome is timeout:
            await asyncio.to_thread(leave_blocked_loop)
        return outcome


# not concurrent.futures: its pool waits for a call that hangs, at the end of the program too
class Calls:
    """Makes calls in up to `threads` threads. Belongs to the event loop in which it is awaited.

    A thread cannot be stopped: if it hangs, it is abandoned, and another one takes its place. If a coroutine that a call
    returned hangs, it is cancelled. what: names the calls, see exits.py.
    """

    def __init__(self, threads: int, what: str = "a user's function") -> None:
        self.what = what
        self.slots = asyncio.Semaphore(threads)
        self.waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.open: dict[Hashable, _Call] = {}
        self.threads = self.free = self.begun = 0
        self.closed = False
        self.looked: tuple[float, dict[int, float]] = (0.0, {})

    async def run(self, key: Hashable, seconds: float, function: Callable[..., Any], *args: Any) -> Any:
        """Call function(*args), and await its result if that is a coroutine. Returns the result or the exception: a TimeoutError
        if it takes longer than `seconds`, counted from its start. key: identifies the call while it is open."""
        self.begun = self.begun if self.open else time.monotonic()
        self.open[key] = call = _Call(partial(function, *args))
        timeout = TimeoutError(f"it took longer than {seconds:g} s")
        try:
            async with self.slots:
                end = time.monotonic() + seconds
                outcome = await call.first(partial(self._hand_out, call), seconds, timeout)
                call.late = outcome is timeout
                self.free += not call.late
            if inspect.isawaitable(outcome):  # a coroutine needs no thread while it waits
                call.thread, call.outcome = None, call.loop.create_future()
                future = submitted(outcome)
                listen = partial(future.add_done_callback, call.hear)
                outcome = await call.first(listen, end - time.monotonic(), timeout)
                future.cancel()
            return outcome
        finally:
            del self.open[key]
            if not self.open:
                SPENT[self.what] += time.monotonic() - self.begun

    def _hand_out(self, call: _Call) -> None:
        if self.closed:
            return call.set(TimeoutError("it was abandoned"))
        if self.free:
            self.free -= 1
        else:
            self.threads += 1
            threading.Thread(target=self._work, name="call", daemon=True).start()
        self.waiting.put(call)

    def _work(self) -> None:
        from grpo.system.global_state import put_back  # imports torch, which a mistyped command need not wait for

        process = os.getpid()
        while (call := self.waiting.get()) is not None:
            call.cpu, call.thread = time.thread_time(), threading.get_native_id()
            try:
                with seen(self.what), put_back(self.what):
                    try:
                        outcome = call.function()
                    finally:
                        if os.getpid() != process:  # a child of the function returned too: it would never end
                            os._exit(1)
            except BaseException as error:  # a user's code may raise anything, SystemExit too
                outcome = error
            call.settle(outcome)
            if call.late:
                return  # another thread has taken this one's place

    def close(self) -> None:
        """Abandon open calls and let the threads end."""
        self.closed = True
        for call in list(self.open.values()):
            call.settle(TimeoutError("it was abandoned"))
        for _ in range(self.threads):
            self.waiting.put(None)

    def slow(self, keys: Iterable[Hashable], others: Iterable[int]) -> set[Hashable]:
        """Return the calls among `keys` that wait for something outside or compute for long. Waiting for a core is not slow.

        A call is slow if it was requested more than PATIENCE seconds ago and nothing runs: since the last check no call, and
        none of the `others` (threads by native id), has run or waited for a core. A call is also slow if it has computed for
        PATIENCE seconds itself. If the system does not report what threads do (Linux does), PATIENCE alone decides.
        """
        now = time.monotonic()
        before, busy_before = self.looked
        # while this thread waits for a core, it may keep the others from running
        mine = times(threading.get_native_id())
        watched = now - (mine[1] if mine else 0.0)
        computed, busy = {}, {}  # seconds: by call, of computing; by thread, of running and of waiting for a core
        open = dict(self.open)  # another thread changes it
        for call in open.values():
            if call.thread and (seconds := times(call.thread)):
                computed[call] = seconds[0] - call.cpu
                if computed[call] <= PATIENCE:
                    busy[call.thread] = sum(seconds)
        for thread in others:
            if seconds := times(thread):
                busy[thread] = sum(seconds)
        self.looked = watched, busy
        if not LOOK / 2 < watched - before < PATIENCE:  # the last check is too old or too recent
            return set()
        worked = sum(busy[thread] - busy_before[thread] for thread in busy.keys() & busy_before.keys())
        idle = worked < (watched - before) / 10 and not any(map(_is_runnable, busy))
        old = {key: open[key] for key in keys if key in open and now - open[key].since > PATIENCE}
        return {key for key, call in old.items() if idle or computed.get(call, 0.0) > PATIENCE}


def _is_runnable(thread: int) -> bool:
    """Return whether a thread runs or waits for a core now: on a very busy machine one may wait longer than LOOK."""
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:  # it has ended
        return False


# -- coroutines

_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a fork starts without one
_threads: dict[asyncio.AbstractEventLoop, int] = {}  # native id of the thread in which each runs


def submitted(awaitable: Awaitable) -> Future:
    """Schedule a coroutine on the shared loop, and return its Future."""

    async def wait() -> Any:
        try:
            return await awaitable
        except (SystemExit, KeyboardInterrupt) as error:  # it would end the loop, and every other coroutine would hang
            raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None

    return asyncio.run_coroutine_threadsafe(wait(), _loop())


def loop_threads() -> list[int]:
    """Return the native id of the shared loop's thread, if there is one."""
    loop = _loops.get(os.getpid())
    return [_threads[loop]] if loop in _threads else []


def awaited(value: Any) -> Any:
    """Return the value, or its result if it is a coroutine."""
    return submitted(value).result() if inspect.isawaitable(value) else value


def _loop() -> asyncio.AbstractEventLoop:
    """Return the shared loop, which runs in a thread of its own."""
    if loop := _loops.get(os.getpid()):
        return loop
    fresh = asyncio.new_event_loop()
    loop = _loops.setdefault(os.getpid(), fresh)
    if loop is fresh:
        thread = threading.Thread(target=loop.run_forever, name="coroutines", daemon=True)
        thread.start()
        _threads[loop] = thread.native_id
    else:  # another thread was quicker
        fresh.close()
    return loop


def leave_blocked_loop() -> None:
    """Give later coroutines another loop if a coroutine blocks this one by a call that it should have awaited."""
    if loop := _loops.get(os.getpid()):
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(1)
        except TimeoutError:
            _loops.pop(os.getpid(), None)
