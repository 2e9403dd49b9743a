"""Prints evaluations and comparisons in the terminal."""

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grpo.apps.scorecard import Scorecard
from grpo.evaluation.display import grid, share_with_interval
from grpo.evaluation.intervals import Estimate
from grpo.system.errors import plural
from grpo.system.metrics import is_result, percent, written


class Bar(Progress):
    """Shows the progress of an evaluation; without a terminal it prints a line for each tenth."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.total, self.tenths = total, 0  # problems in all, and tenths already printed
        self.add_task("", total=total, status="")

    def begin(self, card: Scorecard) -> None:
        """Start the bar. A resumed evaluation starts with the problems that are already done."""
        self.reset(self.task_ids[0], completed=card.done)  # earlier problems do not count for the speed
        self.tenths = card.done * 10 // self.total
        if card.done:
            self.console.print(f"resuming after {card.done} of {self.total} problems")

    def show(self, card: Scorecard) -> None:
        """Show the number of problems done, the accuracy and the speed so far."""
        status = f"accuracy {percent(card.accuracy)}  {card.speed}"
        self.update(self.task_ids[0], completed=card.done, status=status)
        if not self.console.is_terminal and card.done * 10 // self.total > self.tenths:
            self.tenths = card.done * 10 // self.total
            self.console.print(f"{card.done}/{self.total}  {status}", soft_wrap=True)


def with_interval(name: str, estimate: Mapping[str, Any]) -> tuple[str, str]:
    """Return the value of a metric and its interval as two texts."""
    value, low, high = (written(name, estimate[end]) for end in ("value", "low", "high"))
    return value, f"{low} to {high}"


def in_a_cell(name: str, metrics: Mapping[str, Any]) -> str:
    """Return a share and its interval as one text, 76.5 % (70.2 to 81.8); "-" if it was not measured."""
    if name not in metrics:
        return "-"
    known = {end: math.nan if number is None else number for end, number in metrics[name].items()}
    return share_with_interval(Estimate(**known))


def short(name: str) -> str:
    """Return the name of a metric without its prefix eval/."""
    return name.removeprefix("eval/")


def show(console: Console, title: str, metrics: Mapping[str, Any]) -> None:
    """Print the metrics with their intervals, and strict and lenient accuracy for each value of the columns in eval.by."""
    whole = {name: e for name, e in metrics.items() if name != "by"}
    results = {name: e for name, e in whole.items() if is_result(name, e["value"] or 0)}
    rows = [(short(name), *with_interval(name, e), str(e["n"])) for name, e in results.items()]
    console.print(grid([title, "value", "95 % interval", "problems"], rows))
    names = [name for name in ("eval/accuracy", "eval/accuracy_lenient") if name in whole]
    for column, values in metrics["by"].items():
        cells = {value: [in_a_cell(name, of) for name in names] for value, of in values.items()}
        rows = [(value, *cells[value], str(of["eval/accuracy"]["n"])) for value, of in values.items()]
        console.print(grid([column, *map(short, names), "problems"], rows))


def same_as_accuracy(comparison: Mapping[str, Any], metric: str) -> bool:
    """Return whether a metric has the values and the differences of eval/accuracy, and is another one."""

    def numbers(name: str) -> list[Any]:
        rows = [row for row in comparison["comparisons"] if row["metric"] == name]
        return [[arm.get(name) for arm in comparison["arms"].values()], [{**row, "metric": None} for row in rows]]

    return metric != "eval/accuracy" and numbers(metric) == numbers("eval/accuracy")


def show_comparison(console: Console, comparison: Mapping[str, Any]) -> None:
    """Print a comparison: the arms, their metrics, and the differences with intervals and p-values, in tables for a terminal of
    80 columns. A metric that is the same as accuracy in everything has a line, and no rows."""
    every, items = comparison["arms"], comparison["items"]
    for letter, arm in every.items():
        runs = "" if arm["runs"] == 1 else f" ({arm['runs']} runs)"
        line = f"{letter}  {arm['name']}{runs}: {plural(items[letter], 'problem')}"
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    measured = [name for name in next(iter(every.values())) if name.startswith("eval/")]
    metrics = [name for name in measured if not same_as_accuracy(comparison, name)]
    rows = [(letter, *(in_a_cell(name, arm) for name in metrics)) for letter, arm in every.items()]
    console.print(grid([plural(items["common"], "problem"), *(f"{short(name)} (95 %)" for name in metrics)], rows))

    several = len(every) > 2  # comparisons, which are one family
    ps = {"p": "p_value", "p (Holm)": "p_holm"} if several else {"p": "p_value"}
    for name in metrics:
        compared = [row for row in comparison["comparisons"] if row["metric"] == name]
        rows = [
            (
                f"{row['arm']} - {row['against']}",
                in_a_cell(name, {name: row["difference"]}),
                *(f"{row[key]:.3g}" for key in ps.values()),
                "/".join(str(row[count]) for count in ("better", "worse", "ties")),
            )
            for row in compared
        ]
        console.print(grid([short(name), "difference (95 %)", *ps, "better/worse/ties"], rows))
    lines = ["; ".join(dict.fromkeys(row["test"] for row in comparison["comparisons"]))]
    lines += [f"{short(name)} is the same in every number" for name in measured if name not in metrics]
    if several:
        lines.append(f"p (Holm): the {len(every) - 1} comparisons with A in one metric are one family")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
