"""Tables and shares as the terminal shows them."""

import math
from collections.abc import Iterable, Sequence

from rich.table import Column, Table

from grpo.evaluation.intervals import Estimate
from grpo.system.metrics import percent


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, title: str | None = None) -> Table:
    """Return a table. words: the number of columns on the left that hold text; the others hold numbers, aligned to the right."""
    columns = [Column(name, justify="left" if i < words else "right") for i, name in enumerate(head)]
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def share_with_interval(estimate: Estimate) -> str:
    """Return a share with its interval: 76.5 % (70.2 to 81.8)."""
    interval = "" if math.isnan(estimate.low) else f" ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"
    return percent(estimate.value) + interval
