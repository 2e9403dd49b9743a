"""Layer 0 - coroutines of a user's (rewards, tools, environments), awaited from plain code."""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any


def submitted(awaitable: Awaitable) -> Future:
    """What it will come to. All of them share one loop, so that the client of a service, made once, can be used by every call."""

    async def wait() -> Any:
        return await awaitable

    return asyncio.run_coroutine_threadsafe(wait(), _loop(os.getpid()))


def awaited(value: Any) -> Any:
    """The value itself, or what a coroutine comes to."""
    return submitted(value).result() if inspect.isawaitable(value) else value


@lru_cache(maxsize=1)
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """In a thread of its own; a fork makes a new one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coroutines", daemon=True).start()
    return loop


def leave_blocked_loop() -> None:
    """A coroutine that blocks, by a call that it should have awaited, holds up all others: later ones get another loop."""
    if _loop.cache_info().currsize:
        try:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), _loop(os.getpid())).result(1)
        except TimeoutError:
            _loop.cache_clear()
