"""Shows evaluations in the terminal: one line per evaluation, and a table of all of them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich.table import Column, Table

from grpo.system.metrics import is_result, written


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, title: str | None = None) -> Table:
    """Return a table. words: the number of columns on the left that hold text; the others hold numbers, aligned to the right."""
    columns = [Column(name, justify="left" if i < words else "right") for i, name in enumerate(head)]
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def results_line(metrics: Mapping[str, float]) -> str:
    """Return the results among the metrics in one line, and in a line of its own for each of eval.sets."""
    starts = [name.removesuffix("accuracy") for name in metrics if re.fullmatch("eval/.+/accuracy", name)]
    shown = [(name, f"{name} {value:.3g}") for name, value in metrics.items() if is_result(name, value)]
    lines = groupby(shown, key=lambda pair: next(filter(pair[0].startswith, starts), ""))
    return "\n  ".join("  ".join(text for _, text in line) for _, line in lines)


def history(evaluations: Sequence[tuple[int, Mapping[str, float]]]) -> Table:
    """Return a table with one row per (rollouts, metrics) and one column per metric, transposed if there are more metrics.

    A metric that an evaluation lacks, such as a part of the reward that applied to no sample, is shown as -.
    """
    known = dict.fromkeys(name for _, metrics in evaluations for name in metrics)
    names = [name for name in known if any(is_result(name, metrics.get(name, 0)) for _, metrics in evaluations)]
    rows = [["rollouts", *(name.removeprefix("eval/") for name in names)]]
    for rollouts, metrics in evaluations:
        rows.append([str(rollouts), *(written(name, metrics.get(name)) for name in names)])
    head, *rest = rows if len(names) <= len(evaluations) else zip(*rows, strict=True)
    return grid(head, rest, words=0, title="held-out examples")
