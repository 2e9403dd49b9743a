"""Evaluations in the terminal: a line for each as it ends, a table of all of them."""

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Column, Table

from grpo.system.metrics import is_result, written


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, title: str | None = None) -> Table:
    """A table with numbers on the right; words: how many columns on the left hold text."""
    columns = [Column(name, justify="left" if i < words else "right") for i, name in enumerate(head)]
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def results_line(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.3g}" for name, value in metrics.items() if is_result(name, value))


def history(evaluations: Sequence[tuple[int, Mapping[str, float]]]) -> Table:
    """A row for each (rollouts, metrics) and a column for each metric, or the other way round where there are more metrics.

    A metric that an evaluation does not have, as a part of the reward that applied to no sample, is - there.
    """
    known = dict.fromkeys(name for _, metrics in evaluations for name in metrics)
    names = [name for name in known if any(is_result(name, metrics.get(name, 0)) for _, metrics in evaluations)]
    rows = [["rollouts", *(name.removeprefix("eval/") for name in names)]]
    for rollouts, metrics in evaluations:
        rows.append([str(rollouts), *(written(name, metrics.get(name)) for name in names)])
    head, *rest = rows if len(names) <= len(evaluations) else zip(*rows, strict=True)
    return grid(head, rest, words=0, title="held-out examples")
