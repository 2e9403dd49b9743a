"""Layer 3 - an evaluation on disk and in the terminal: batches as they get done, the tables at the end, and a comparison."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from grpo.callbacks.terminal import SHARES, worth_telling
from grpo.comparison import named
from grpo.errors import UserError
from grpo.evaluation import estimates, tables
from grpo.records import records, write
from grpo.rl import Example
from grpo.rollout import Group
from grpo.rows import fingerprint

NUMERIC = ("prompt_index", "sample", "reward", "correct", "outcome", "end", "tokens", "turns", "truncated")
NUMERIC += ("answer", "correct_lenient")  # of the columns those that numbers are made of, and reward/, eval/, by/


class Scorecard:
    """folder: gets parts/000000.parquet ..., a file for each batch by the place of its first example, as soon as it is scored;
    at the end samples.parquet, which has them all, and metrics.json. policy: what the samples are of, in words: parts of another
    one are refused."""

    def __init__(self, folder: Path, examples: Sequence[Example], policy: str) -> None:
        self.folder, self.examples, self.parts = folder, examples, folder / "parts"
        note = self.parts / "policy.txt"
        if note.is_file() and note.read_text(encoding="utf-8") != policy:
            raise UserError(
                f"{folder} was begun with another policy in the same place: set hydra.run.dir to a new folder"
            )
        self.parts.mkdir(parents=True, exist_ok=True)
        note.write_text(policy, encoding="utf-8")
        # of each problem that is done the share of right samples, NaN where nobody could tell
        self.right: list[float] = []
        self.since, self.played, self.tokens = time.perf_counter(), 0, 0  # of this call

    def file(self, places: range) -> Path:
        return self.parts / f"{places.start:06d}.parquet"

    def has(self, places: range) -> bool:
        """Whether that batch is done. Raises UserError where it was of other examples."""
        if not self.file(places).is_file():
            return False
        part = pq.read_table(self.file(places), columns=["prompt_index", "item", "correct", "reward"]).to_pandas()
        before = part.drop_duplicates("prompt_index").set_index("prompt_index")["item"].to_dict()
        if before != {i: fingerprint(self.examples[i]) for i in places}:
            raise UserError(f"{self.folder} was begun on other examples: set hydra.run.dir to a new folder")
        self._note(part)
        return True

    def add(self, places: range, groups: Sequence[Group], columns: Mapping[str, Any]) -> None:
        rows = [{**row, "prompt_index": row["prompt_index"] + places.start} for row in records(groups, **columns)]
        write(self.file(places), rows)
        self._note(pd.DataFrame(rows))
        self.played += len(places)
        self.tokens += sum(row["tokens"] for row in rows)

    def _note(self, part: pd.DataFrame) -> None:
        known = part["correct"].astype(float).where(part["reward"].notna())
        self.right += known.groupby(part["prompt_index"]).mean().tolist()

    @property
    def done(self) -> int:
        return len(self.right)

    @property
    def accuracy(self) -> float:
        """So far."""
        return float(pd.Series(self.right, dtype=float).mean())

    def progress(self) -> dict[str, Any]:
        return {"problems": self.done, "num_problems": len(self.examples), "accuracy": self.accuracy}

    @property
    def speed(self) -> str:
        seconds = max(time.perf_counter() - self.since, 1e-9)
        return f"{self.played / seconds:.1f} problems/s  {self.tokens / seconds:,.0f} tokens/s"

    def finish(self) -> dict[str, Any]:
        """Joins the parts. Returns what is in metrics.json."""
        parts = [pq.read_table(file) for file in sorted(self.parts.glob("*.parquet"))]
        joined = pa.concat_tables(parts, promote_options="permissive")
        pq.write_table(joined, self.folder / "samples.parquet")
        names = [n for n in joined.column_names if n in NUMERIC or n.startswith(("reward/", "eval/", "by/"))]
        samples = joined.select(names).to_pandas()
        found = named(estimates(samples))
        found["by"] = {column: {v: named(e) for v, e in values.items()} for column, values in tables(samples).items()}
        save(self.folder, found)
        for file in self.parts.iterdir():
            file.unlink()
        self.parts.rmdir()
        return found


def save(folder: Path, found: Mapping[str, Any]) -> None:
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    (folder / "metrics.json.new").write_text(text, encoding="utf-8")
    os.replace(folder / "metrics.json.new", folder / "metrics.json")


def finished(folder: Path) -> dict[str, Any] | None:
    """The metrics of an evaluation that has ended there."""
    file = folder / "metrics.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def policy_in(path: str) -> str:
    """A model's path, and where it is a folder the files of it: names, sizes, times of change."""
    files = sorted(file for file in Path(path).glob("*") if file.is_file()) if Path(path).is_dir() else []
    return "\n".join([path, *(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)])


# -- in the terminal


class Bar:
    """How far it is. Without a terminal a line for each tenth."""

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
        status = f"accuracy {card.accuracy:.1%}  {card.speed}"
        self.progress.update(self.task, completed=card.done, status=status)
        if not self.console.is_terminal and card.done * 10 // self.total > self.told:
            self.told = card.done * 10 // self.total
            self.console.print(f"{card.done}/{self.total}  {status}", soft_wrap=True)


def shown(name: str, estimate: Mapping[str, Any]) -> tuple[str, str]:
    """Value and interval, as a table has them."""

    def text(end: str) -> str:
        value = estimate[end]
        return "-" if value is None else f"{value:.1%}" if SHARES.search(name) else f"{value:.4g}"

    return text("value"), f"{text('low')} to {text('high')}"


def show(console: Console, title: str, found: Mapping[str, Any]) -> None:
    """The metrics with their intervals; accuracy, strict and lenient, by what examples say of themselves."""
    whole = {name: e for name, e in found.items() if name != "by"}
    told = [Table(title, "value", "95 % interval", "problems")]
    for name, e in whole.items():
        if worth_telling(name, e["value"] or 0):
            told[0].add_row(name.removeprefix("eval/"), *shown(name, e), str(e["n"]))
    names = [name for name in ("eval/accuracy", "eval/accuracy_lenient") if name in whole]
    for column, values in found["by"].items():
        told.append(Table(column, *(name.removeprefix("eval/") for name in names), "problems"))
        for value, of in values.items():
            cells = ["{} ({})".format(*shown(name, of[name])) if name in of else "-" for name in names]
            told[-1].add_row(value, *cells, str(of["eval/accuracy"]["n"]))
    for table in told:
        for column in table.columns[1:]:
            column.justify = "right"
        console.print(table)


def show_comparison(console: Console, found: Mapping[str, Any]) -> None:
    every, items = found["arms"], found["items"]
    for letter, arm in every.items():
        runs = "" if arm["runs"] == 1 else f" ({arm['runs']} runs)"
        console.print(f"{letter}  {arm['name']}{runs}: {items[letter]} problems", soft_wrap=True, highlight=False)
    metrics = [name for name in next(iter(every.values())) if name.startswith("eval/")]
    table = Table(f"{items['common']} problems", *every)
    for name in metrics:
        cells = ["{} ({})".format(*shown(name, arm[name])) if name in arm else "-" for arm in every.values()]
        table.add_row(name.removeprefix("eval/"), *cells)
    console.print(table)

    several = len(every) > 2
    heads = ["difference", "", "95 % interval", "p", *(["p (Holm)"] if several else []), "better", "worse", "ties"]
    table = Table(*heads)
    for row in found["comparisons"]:
        what = f"{row['metric'].removeprefix('eval/')}, {row['arm']} - {row['against']}"
        counts = [str(row[name]) for name in ("better", "worse", "ties")]
        adjusted = [f"{row['p_holm']:.3g}"] if several else []
        table.add_row(what, *shown(row["metric"], row["difference"]), f"{row['p_value']:.3g}", *adjusted, *counts)
    console.print(table)
    console.print("; ".join(dict.fromkeys(row["test"] for row in found["comparisons"])), highlight=False)
