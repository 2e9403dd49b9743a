"""Names the user's function that ran when the process ended without a word: a crash in C, or a kill.

A child process looks five times a second whether its parent lives. If the parent ended, it prints the calls that were under way,
which the parent writes to a file without a name. A normal exit kills the child. A function's os._exit is an exception here: its
exit code could be 0, and a run would seem to have finished.
"""

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

CHILD = """
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.2)
if names := os.pread(int(sys.argv[2]), 1000, 0).decode(errors="replace").strip():
    text = "error: the process ended without a traceback while %s ran: it called os._exit, crashed "
    text += "(PYTHONFAULTHANDLER=1 shows the line), or the process was killed from outside"
    print(text % names, file=sys.stderr)
"""
_running: dict[int, str] = {}  # by thread; empty if its call has ended
_file: list[int] = []  # the descriptor, in a process that has a witness


def watch() -> None:
    """Give this process a witness, once."""
    if _file:
        return
    parent = os.getpid()
    with tempfile.TemporaryFile() as opened:
        child = subprocess.Popen(
            [sys.executable, "-ISc", CHILD, str(parent), str(opened.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[opened.fileno()],
            start_new_session=True,  # Ctrl-C is not for it
        )
        _file.append(os.dup(opened.fileno()))
    atexit.register(lambda: os.getpid() == parent and (child.kill(), child.wait()))
    os._exit = partial(_ended, parent, os._exit)


def _ended(parent: int, leave: Callable[[int], None], status: int) -> None:
    """os._exit, which raises SystemExit in a user's function. A child that the function has forked ends as it wants."""
    here = threading.current_thread()
    if os.getpid() == parent and (_running.get(here.ident) or here.name == "coroutines"):
        raise SystemExit(f"it called os._exit({status})")
    of_a_call = os.getpid() == parent and any(list(_running.values()))  # a thread that such a function has started
    leave(status or int(of_a_call))


@contextmanager
def seen(name: str) -> Iterator[None]:
    """Let the witness know of a call during a `with` block. Does nothing in a process without a witness."""
    me = threading.get_ident()
    outer, _running[me] = _running.get(me, ""), name
    _write()
    try:
        yield
    finally:
        _running[me] = outer
        _write()


def forget() -> None:
    """Forget the calls that run: the process ends with a line of its own."""
    _running.clear()
    _write()


def _write() -> None:
    names = ", ".join(dict.fromkeys(filter(None, list(_running.values()))))
    for file in _file:
        os.pwrite(file, names.encode(errors="replace")[:1000].ljust(1000), 0)
