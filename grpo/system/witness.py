"""Names the user's function that ran when the process ended without a word: os._exit, a crash in C, or a kill.

A child process looks five times a second whether its parent lives. If the parent ended, it prints the calls that were under way,
which the parent writes to a file without a name. A normal exit kills the child.
"""

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CHILD = """
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.2)
if names := os.pread(int(sys.argv[2]), 1000, 0).decode(errors="replace").strip():
    text = "error: the process ended without a traceback while %s ran: it called os._exit, crashed "
    text += "(PYTHONFAULTHANDLER=1 shows the line), or the process was killed from outside"
    print(text % names, file=sys.stderr)
"""
_running: dict[int, str] = {}  # by thread
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


@contextmanager
def seen(name: str) -> Iterator[None]:
    """Let the witness know of a call during a `with` block. Does nothing in a process without a witness."""
    me = threading.get_ident()
    _running[me] = name
    _write()
    try:
        yield
    finally:
        del _running[me]
        _write()


def _write() -> None:
    names = ", ".join(dict.fromkeys(list(_running.values())))
    for file in _file:
        os.pwrite(file, names.encode(errors="replace")[:1000].ljust(1000), 0)
