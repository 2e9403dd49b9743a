"""An evaluation that can be resumed: saves each batch once it is scored, and joins them at the end."""

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from operator import eq
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from grpo.data.rows import fingerprint
from grpo.env.types import Example
from grpo.evaluation.estimates import Equal, as_json, estimates, solved
from grpo.evaluation.intervals import Estimate
from grpo.rollout.samples_table import records, write
from grpo.rollout.types import Group
from grpo.system.errors import UserError
from grpo.system.files import write_json

MOST_VALUES = 50  # a column with more values gets no table
# columns that no metric uses
TEXTS = ["item", "example", "gold", "prompt", "messages", "completion", "tool_calls", "env_error"]


class Scorecard:
    """The state of an evaluation, on disk.

    folder: gets parts/000000.parquet ..., one file per batch, named by the index of its first example, once the batch is scored;
    at the end samples.parquet with all samples, and metrics.json. policy: identifies the policy; parts of another policy are
    refused.
    """

    def __init__(self, folder: Path, examples: Sequence[Example], policy: str) -> None:
        self.folder, self.examples, self.parts = folder, examples, folder / "parts"
        note = self.parts / "policy.txt"
        if note.is_file() and note.read_text(encoding="utf-8") != policy:
            raise UserError(f"{folder} was begun with another policy of that name: set hydra.run.dir to a new folder")
        self.parts.mkdir(parents=True, exist_ok=True)
        note.write_text(policy, encoding="utf-8")
        self.right: list[float] = []  # for each finished problem: the share of right samples, NaN if none is known
        self.since, self.played, self.tokens = time.perf_counter(), 0, 0  # since this start of the program

    def file(self, places: range) -> Path:
        """Return the file of a batch. places: the indices of its examples."""
        return self.parts / f"{places.start:06d}.parquet"

    def recovered(self, places: range) -> bool:
        """Count a batch that an earlier start of the program has finished; return whether it has.

        Raises UserError if its file is of other examples.
        """
        if not self.file(places).is_file():
            return False
        part = pq.read_table(self.file(places), columns=["prompt_index", "item", "correct", "reward"]).to_pandas()
        before = dict(zip(part["prompt_index"], part["item"], strict=True))
        if before != {i: fingerprint(self.examples[i]) for i in places}:
            raise UserError(f"{self.folder} was begun with other examples: set hydra.run.dir to a new folder")
        self.right += solved(part).tolist()
        return True

    def add(self, places: range, groups: Sequence[Group], columns: Mapping[str, Any]) -> None:
        """Save a scored batch. columns: more columns for `records`."""
        rows = [{**row, "prompt_index": row["prompt_index"] + places.start} for row in records(groups, **columns)]
        write(self.file(places), rows)
        self.right += solved(pd.DataFrame(rows)).tolist()
        self.played += len(places)
        self.tokens += sum(row["tokens"] for row in rows)

    @property
    def done(self) -> int:
        """The number of finished problems."""
        return len(self.right)

    @property
    def accuracy(self) -> float:
        """The accuracy so far."""
        return float(pd.Series(self.right, dtype=float).mean())

    def progress(self) -> dict[str, Any]:
        """Return the finished problems, all problems, and the accuracy so far."""
        return {"problems": self.done, "num_problems": len(self.examples), "accuracy": self.accuracy}

    @property
    def speed(self) -> str:
        """Problems and tokens per second, as text."""
        seconds = max(time.perf_counter() - self.since, 1e-9)
        return f"{self.played / seconds:.1f} problems/s  {self.tokens / seconds:,.0f} tokens/s"

    def finish(self, equal: Equal) -> dict[str, Any]:
        """Join the parts, and write samples.parquet and metrics.json. Returns the content of metrics.json.

        equal: see `Evaluator`.
        """
        parts = [pq.read_table(file) for file in sorted(self.parts.glob("*.parquet"))]
        joined = pa.concat_tables(parts, promote_options="permissive")
        pq.write_table(joined, self.folder / "samples.parquet")
        samples = joined.drop_columns(TEXTS).to_pandas()
        metrics = as_json(estimates(samples, equal))
        metrics["by"] = {}
        for column, by_value in estimates_by_value(samples, equal).items():
            metrics["by"][column] = {value: as_json(part) for value, part in by_value.items()}
        write_json(self.folder / "metrics.json", metrics)
        shutil.rmtree(self.parts)
        return metrics


def finished(folder: Path) -> dict[str, Any] | None:
    """Return the metrics of a finished evaluation in this folder; None if there is none."""
    file = folder / "metrics.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def policy_in(path: str) -> str:
    """Return a text that identifies a policy: its path and, for a folder, its files with their sizes and modification times."""
    files = sorted(file for file in Path(path).glob("*") if file.is_file()) if Path(path).is_dir() else []
    return "\n".join([path, *(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)])


def estimates_by_value(samples: pd.DataFrame, equal: Equal = eq) -> dict[str, dict[str, dict[str, Estimate]]]:
    """Return `estimates` for each value of each by/ column: column -> value -> name -> estimate."""

    def natural(value: str) -> list:
        return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", value)]

    tables = {}
    for name in (name for name in samples if name.startswith("by/")):
        parts = dict(list(samples.groupby(name)))
        if len(parts) <= MOST_VALUES:
            tables[name.removeprefix("by/")] = {v: estimates(parts[v], equal) for v in sorted(parts, key=natural)}
    return tables
