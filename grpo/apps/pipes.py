"""After `| head` a program ends in silence."""

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ENDED = 141  # what a shell reports of a program that SIGPIPE has ended


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """Exit with ENDED, without a traceback, if the reader of stdout has gone. A lost connection of another kind is raised."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not reader_gone(sys.__stdout__.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # Python flushes once more at its end
        sys.exit(ENDED)


def reader_gone(file: int) -> bool:
    """Return whether a file is a pipe whose reading end is closed."""
    look = select.poll()
    look.register(file, 0)
    return any(event & select.POLLERR for _, event in look.poll(0))
