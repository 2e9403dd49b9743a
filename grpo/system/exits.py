"""Names the user's function that is running when something calls os._exit.

A user's function that calls os._exit gets an exception instead: its exit code could be 0, and the run would seem to have
finished. After a crash in C, Python prints where each thread was.
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

_running: dict[int, str] = {}  # by thread; empty if its call has ended


def watch() -> None:
    """Watch this process, once."""
    if isinstance(os._exit, partial):
        return
    os._exit = partial(_ended, os.getpid(), os._exit)
    faulthandler.enable(sys.__stderr__)


def _ended(parent: int, leave: Callable[[int], None], status: int) -> None:
    """os._exit, which raises SystemExit in a user's function. A child that the function has forked ends as it wants."""
    here = threading.current_thread()
    if os.getpid() == parent and (_running.get(here.ident) or here.name == "coroutines"):
        raise SystemExit(f"it called os._exit({status})")
    names = ", ".join(dict.fromkeys(filter(None, list(_running.values()))))
    if os.getpid() == parent and names and not status:  # a thread that such a function has started
        print(f"error: os._exit was called while {names} ran", file=sys.stderr, flush=True)
        status = 1
    leave(status)


@contextmanager
def seen(name: str) -> Iterator[None]:
    """Note a call of a user's function during a `with` block."""
    me = threading.get_ident()
    outer, _running[me] = _running.get(me, ""), name
    try:
        yield
    finally:
        _running[me] = outer
