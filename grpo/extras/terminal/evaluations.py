"""Evaluations on the terminal: one line each, and a table of all of them."""

import math
from collections.abc import Mapping, Sequence

from rich.table import Table

from grpo.evaluation.display import grid, share_with_interval
from grpo.evaluation.intervals import Estimate
from grpo.system.errors import plural
from grpo.system.metrics import is_result, written


def result_lines(after: int, estimates: Mapping[str, Estimate]) -> list[str]:
    """Return accuracy and length after so many rollouts in one line, and in a line of its own for each of eval.sets."""
    lines = []
    for name in (name for name in estimates if name == "accuracy" or name.endswith("/accuracy")):
        place = name.removesuffix("accuracy")
        length = estimates.get(f"{place}length")
        tokens = f", {plural(round(length.value), 'token')}" if length and not math.isnan(length.value) else ""
        title = f"  {place.rstrip('/')}" if place else f"after {after}"
        lines.append(f"{title}: {share_with_interval(estimates[name])}{tokens}")
    return lines


def sparkline(shares: Sequence[float]) -> str:
    """Return a bar of eight heights for each share, 0 to 1."""
    return "".join(" " if math.isnan(share) else "▁▂▃▄▅▆▇█"[min(7, int(8 * share))] for share in shares)


def history(evaluations: Sequence[tuple[int, Mapping[str, float]]]) -> Table:
    """Return a table with one row per (rollouts, metrics) and one column per metric, transposed if there are more metrics.

    A metric that an evaluation lacks, such as a part of the reward that applied to no sample, is shown as -.
    """
    logged = dict.fromkeys(name for _, metrics in evaluations for name in metrics)
    names = [name for name in logged if any(is_result(name, metrics.get(name, 0)) for _, metrics in evaluations)]
    rows = [["rollouts", *(name.removeprefix("eval/") for name in names)]]
    for rollouts, metrics in evaluations:
        rows.append([str(rollouts), *(written(name, metrics.get(name)) for name in names)])
    head, *rest = rows if len(names) <= len(evaluations) else zip(*rows, strict=True)
    return grid(head, rest, words=0, title="held-out examples")
