"""Event loops of their own: for the coroutines of a rollout, and for those of clients of servers."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
CLOSING = 5  # seconds in which environments may close after an error


def beside(work: Callable[[], Coroutine[Any, Any, T]], serve: Callable[[threading.Thread], None]) -> T:
    """Run the coroutine in a new thread and `serve` in this one, since autocast and CUDA streams belong to a thread.

    Returns the coroutine's result.
    """
    loop, result = asyncio.new_event_loop(), Future[T]()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                result.set_result(runner.run(work()))
        except BaseException as error:
            result.set_exception(error)

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    thread = threading.Thread(target=run, name="episodes", daemon=True)
    thread.start()
    try:
        serve(thread)
    except BaseException:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(cancel)
        thread.join(CLOSING)
        raise
    return result.result()


def outcome_of(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, also where an event loop runs in this thread already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return beside(lambda: work, threading.Thread.join)
