"""Calls in threads of their own: `Background` beside the main thread, and event loops for coroutines."""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")
GRACE = 5.0  # seconds to wait for threads that are asked to end


class Background(Generic[T]):
    """A call in a daemon thread, which does not keep the program from ending. The thread uses this thread's GPU."""

    def __init__(self, make: Callable[[], T], name: str = "rollout") -> None:
        import torch  # eval.py compare= imports this module, and must not wait for torch

        self.future: Future[T] = Future()
        self.device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.thread = threading.Thread(target=self._run, args=(make,), name=name, daemon=True)
        self.thread.start()

    def _run(self, make: Callable[[], T]) -> None:
        import torch

        try:
            if self.device is not None:
                torch.cuda.set_device(self.device)  # a new thread has GPU 0
            self.future.set_result(make())
        except BaseException as error:  # raised again for the caller who waits
            self.future.set_exception(error)

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the call; None if it runs, or has returned."""
        return self.future.exception() if self.future.done() else None

    def stop(self) -> None:
        """End the thread, as `stop_all` does."""
        stop_all([self])


def stop_all(calls: Iterable[Background]) -> None:
    """End threads, because one that runs torch's code when Python ends would abort the program. Threads that do not react,
    because they wait for a server, are abandoned after GRACE seconds."""
    # in Python 3.11 a thread that this one is just starting may get the exception instead; then this one is abandoned too
    living = [call.thread for call in calls if call.thread.is_alive()]
    for thread in living:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    end = time.monotonic() + GRACE
    for thread in living:
        thread.join(max(0.0, end - time.monotonic()))


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
