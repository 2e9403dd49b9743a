"""The console of every program. A run's log has what it prints."""

import logging
import os
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
