"""An evaluation or a comparison in the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grpo.evaluation.display import grid
from grpo.evaluation.resumable import Scorecard
from grpo.system.metrics import is_result, percent, written


class Bar:
    """The progress of an evaluation. Without a terminal it prints a line for each tenth."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.console, self.total, self.told = console, total, 0
        self.task = self.progress.add_task("", total=total, status="")

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begin(self, card: Scorecard) -> None:
        self.progress.reset(self.task, completed=card.done)  # what was done before is not its speed
        if card.done:
            self.console.print(f"going on after {card.done} of {self.total} problems")
            self.told = card.done * 10 // self.total

    def show(self, card: Scorecard) -> None:
        status = f"accuracy {percent(card.accuracy)}  {card.speed}"
        self.progress.update(self.task, completed=card.done, status=status)
        if not self.console.is_terminal and card.done * 10 // self.total > self.told:
            self.told = card.done * 10 // self.total
            self.console.print(f"{card.done}/{self.total}  {status}", soft_wrap=True)


def with_interval(name: str, estimate: Mapping[str, Any]) -> tuple[str, str]:
    value, low, high = (written(name, estimate[end]) for end in ("value", "low", "high"))
    return value, f"{low} to {high}"


def in_a_cell(name: str, metrics: Mapping[str, Any]) -> str:
    return "{} ({})".format(*with_interval(name, metrics[name])) if name in metrics else "-"


def show(console: Console, title: str, found: Mapping[str, Any]) -> None:
    """The metrics with their intervals; accuracy, strict and lenient, by what examples say of themselves."""
    whole = {name: e for name, e in found.items() if name != "by"}
    results = {name: e for name, e in whole.items() if is_result(name, e["value"] or 0)}
    rows = [(name.removeprefix("eval/"), *with_interval(name, e), str(e["n"])) for name, e in results.items()]
    console.print(grid([title, "value", "95 % interval", "problems"], rows))
    names = [name for name in ("eval/accuracy", "eval/accuracy_lenient") if name in whole]
    for column, values in found["by"].items():
        rows = [
            (value, *(in_a_cell(name, of) for name in names), str(of["eval/accuracy"]["n"]))
            for value, of in values.items()
        ]
        console.print(grid([column, *(name.removeprefix("eval/") for name in names), "problems"], rows))


def show_comparison(console: Console, found: Mapping[str, Any]) -> None:
    every, items = found["arms"], found["items"]
    for letter, arm in every.items():
        runs = "" if arm["runs"] == 1 else f" ({arm['runs']} runs)"
        console.print(f"{letter}  {arm['name']}{runs}: {items[letter]} problems", soft_wrap=True, highlight=False)
    metrics = [name for name in next(iter(every.values())) if name.startswith("eval/")]
    rows = [(name.removeprefix("eval/"), *(in_a_cell(name, arm) for arm in every.values())) for name in metrics]
    console.print(grid([f"{items['common']} problems", *every], rows))

    several = len(every) > 2
    rows = []
    for row in found["comparisons"]:
        what = f"{row['metric'].removeprefix('eval/')}, {row['arm']} - {row['against']}"
        counts = [str(row[name]) for name in ("better", "worse", "ties")]
        adjusted = [f"{row['p_holm']:.3g}"] if several else []
        rows.append(
            (what, *with_interval(row["metric"], row["difference"]), f"{row['p_value']:.3g}", *adjusted, *counts)
        )
    heads = ["difference", "", "95 % interval", "p", *(["p (Holm)"] if several else []), "better", "worse", "ties"]
    console.print(grid(heads, rows))
    console.print("; ".join(dict.fromkeys(row["test"] for row in found["comparisons"])), highlight=False)
