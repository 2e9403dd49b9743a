"""The console of every program."""

import os
from typing import Any

from rich.console import Console

UNBROKEN = 10_000  # columns of output that is no terminal


def console(**options: Any) -> Console:
    """Return rich's console for standard output, with these options of rich. Its lines are as wide as the terminal. In a file
    or a pipe, where rich assumes 80 columns, they are not wrapped, unless the environment has COLUMNS."""
    ours = Console(**options)
    narrow = ours.is_terminal or ours.is_jupyter or "COLUMNS" in os.environ
    return ours if narrow else Console(**options, width=UNBROKEN)
