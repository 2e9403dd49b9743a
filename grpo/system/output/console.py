"""The console of every program; a run's log has what it prints."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from io import StringIO
from typing import Any

from rich.console import Console
from rich.control import Control

UNBROKEN = 10_000  # columns of output that is no terminal
LOG = 120  # columns of tables in a log
SCREENS: list[Any] = []  # that of grpo/extras/terminal, while a program has one


class Logged(Console):
    """Rich's console, whose texts and tables go to the log files of the root logger, too."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        self.keep(*objects, **options)

    def keep(self, *objects: Any, **options: Any) -> None:
        """Print to the log files alone."""
        if objects and log_files() and not isinstance(objects[0], Control):  # which moves the cursor
            Console(file=(plain := StringIO()), width=LOG).print(*objects, **options)
            if text := plain.getvalue().rstrip():
                to_logs(f"\n{text}" if "\n" in text else text)  # a table begins below its time


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
    if SCREENS and not options:
        return SCREENS[-1].console
    ours = Logged(**options)
    narrow = ours.is_terminal or ours.is_jupyter or "COLUMNS" in os.environ
    return ours if narrow else Logged(**options, width=UNBROKEN)


@contextmanager
def busy(words: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal if a `with` block takes long. Yields what counts a step of `total`."""
    with SCREENS[-1].busy(words, total) if SCREENS else nullcontext(lambda: None) as step:
        yield step
