"""A call in a thread of its own, beside the main thread."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

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
