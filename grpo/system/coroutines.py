"""Coroutines of a user's (rewards, tools, environments), awaited from plain code."""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a fork has none


def submitted(awaitable: Awaitable) -> Future:
    """What it will come to. All of them share one loop, so that the client of a service, made once, can be used by every call."""

    async def wait() -> Any:
        try:
            return await awaitable
        except (SystemExit, KeyboardInterrupt) as error:  # with it the loop would end, and every other coroutine hang
            raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None

    return asyncio.run_coroutine_threadsafe(wait(), _loop())


def awaited(value: Any) -> Any:
    """The value itself, or what a coroutine comes to."""
    return submitted(value).result() if inspect.isawaitable(value) else value


def _loop() -> asyncio.AbstractEventLoop:
    """In a thread of its own."""
    if loop := _loops.get(os.getpid()):
        return loop
    made = asyncio.new_event_loop()
    if (loop := _loops.setdefault(os.getpid(), made)) is made:
        threading.Thread(target=loop.run_forever, name="coroutines", daemon=True).start()
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
