"""What a run took and what it gave, as a table."""

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from rich.table import Table

from grpo.evaluation.statistics import mean_interval
from grpo.system.metrics import TIMES


class Evaluated(NamedTuple):
    """After so many rollouts. shares: of each held-out example the share of its samples that is right, NaN where nobody knows."""

    rollouts: int
    metrics: Mapping[str, float]
    shares: Sequence[float]


def clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def accuracy(told: Evaluated) -> str:
    _, low, high, _ = mean_interval(told.shares, bounds=(0, 1))
    interval = "" if math.isnan(low) else f" ({100 * low:.1f} to {100 * high:.1f})"
    return f"{told.metrics['eval/accuracy']:.1%}{interval} after {told.rollouts}"


def summary(
    learned: Sequence[Mapping[str, float]], evaluations: Sequence[Evaluated], seconds: float, warned: Sequence[str]
) -> Table:
    """learned: the metrics of each rollout. seconds: of the whole run. warned: metrics that were found unwell.

    Accuracies are over the held-out examples, with the 95 % interval of another draw of such examples.
    """
    spent = {
        name.removeprefix("time/"): sum(
            metrics.get(name, 0.0) for metrics in (*learned, *(e.metrics for e in evaluations if e.rollouts == 0))
        )
        for name in TIMES
    }
    spent["rest"] = max(0.0, seconds - sum(spent.values()))
    tokens = sum(metrics["rollout/tokens"] for metrics in learned)
    busy = sum(spent[name] for name in ("rollout", "update", "sync"))
    memory = max(max(metrics["memory/rollout"], metrics["memory/update"]) for metrics in learned)

    table = Table("rollouts", str(len(learned)), title="the run")
    table.add_row("time", f"{clock(seconds)}, {seconds / len(learned):.3g} s a rollout")
    for name, part in spent.items():
        table.add_row(f"  {name}", f"{clock(part)}, {part / seconds:.0%}")
    table.add_row("tokens/s", f"{tokens / busy:,.0f}")
    table.add_row("memory, at most", f"{memory / 2**30:.2f} GiB")
    if known := [told for told in evaluations if not math.isnan(told.metrics["eval/accuracy"])]:
        best = max(known[1:] or known, key=lambda told: told.metrics["eval/accuracy"])
        for name, told in (("first", known[0]), ("best", best), ("last", known[-1])):
            table.add_row(f"held out, {name}", accuracy(told))
    table.add_row("warnings", ", ".join(warned) or "none")
    return table
