"""The console of every program; a run's log has what it prints. After `| head` a program ends in silence."""

import logging
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

from rich.console import Console
from rich.control import Control

UNBROKEN = 10_000  # columns of output that is no terminal
LOG = 120  # columns of tables in a log


class Logged(Console):
    """Rich's console, whose texts and tables go to the log files of the root logger, too."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        if objects and log_files() and not isinstance(objects[0], Control):  # which moves the cursor
            Console(file=(plain := StringIO()), width=LOG).print(*objects, **options)
            if text := plain.getvalue().rstrip():
                to_logs(text)


def to_logs(text: str) -> None:
    """Write a text to the log files of the root logger, and not to the terminal."""
    record = logging.LogRecord("grpo", logging.INFO, "", 0, text, (), None)
    for handler in log_files():
        handler.handle(record)


def log_files() -> list[logging.FileHandler]:
    """Return the log files of the root logger."""
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]


def console(**options: Any) -> Console:
    """Return rich's console for standard output, with these options of rich. Its lines are as wide as the terminal. In a file
    or a pipe, where rich assumes 80 columns, they are not wrapped, unless the environment has COLUMNS."""
    ours = Logged(**options)
    narrow = ours.is_terminal or ours.is_jupyter or "COLUMNS" in os.environ
    return ours if narrow else Logged(**options, width=UNBROKEN)


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
