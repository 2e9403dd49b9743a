"""An evaluation on disk and in the terminal: batches as they get done, the tables at the end, and a comparison."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from grpo.data.dataset import fingerprint
from grpo.env.types import Example
from grpo.evaluation.metrics import as_json, estimates, estimates_by_value, solved
from grpo.rollout.samples_table import records, write
from grpo.rollout.types import Group
from grpo.system.errors import UserError
from grpo.system.files import write_json

TEXTS = ["item", "prompt", "messages", "completion", "tool_calls", "env_error"]  # no metric is made of them


class Scorecard:
    """folder: gets parts/000000.parquet ..., a file for each batch by the place of its first example, as soon as it is scored;
    at the end samples.parquet, which has them all, and metrics.json. policy: names what the samples are of: parts of another one
    are refused."""

    def __init__(self, folder: Path, examples: Sequence[Example], policy: str) -> None:
        self.folder, self.examples, self.parts = folder, examples, folder / "parts"
        note = self.parts / "policy.txt"
        if note.is_file() and note.read_text(encoding="utf-8") != policy:
            raise UserError(f"{folder} was begun with another policy of that name: set hydra.run.dir to a new folder")
        self.parts.mkdir(parents=True, exist_ok=True)
        note.write_text(policy, encoding="utf-8")
        self.right: list[float] = []  # for each problem that is done the share of right samples, NaN if none is known
        self.since, self.played, self.tokens = time.perf_counter(), 0, 0  # of this call

    def file(self, places: range) -> Path:
        return self.parts / f"{places.start:06d}.parquet"

    def has(self, places: range) -> bool:
        """Whether that batch is done. Raises UserError where it was of other examples."""
        if not self.file(places).is_file():
            return False
        part = pq.read_table(self.file(places), columns=["prompt_index", "item", "correct", "reward"]).to_pandas()
        before = dict(zip(part["prompt_index"], part["item"], strict=True))
        if before != {i: fingerprint(self.examples[i]) for i in places}:
            raise UserError(f"{self.folder} was begun on other examples: set hydra.run.dir to a new folder")
        self.right += solved(part).tolist()
        return True

    def add(self, places: range, groups: Sequence[Group], columns: Mapping[str, Any]) -> None:
        rows = [{**row, "prompt_index": row["prompt_index"] + places.start} for row in records(groups, **columns)]
        write(self.file(places), rows)
        self.right += solved(pd.DataFrame(rows)).tolist()
        self.played += len(places)
        self.tokens += sum(row["tokens"] for row in rows)

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
        """Joins the parts. Returns the content of metrics.json."""
        parts = [pq.read_table(file) for file in sorted(self.parts.glob("*.parquet"))]
        joined = pa.concat_tables(parts, promote_options="permissive")
        pq.write_table(joined, self.folder / "samples.parquet")
        samples = joined.drop_columns(TEXTS).to_pandas()
        by = estimates_by_value(samples)
        found = as_json(estimates(samples))
        found["by"] = {column: {value: as_json(e) for value, e in values.items()} for column, values in by.items()}
        write_json(self.folder / "metrics.json", found)
        shutil.rmtree(self.parts)
        return found


def finished(folder: Path) -> dict[str, Any] | None:
    """The metrics of an evaluation that has ended there."""
    file = folder / "metrics.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def policy_in(path: str) -> str:
    """A model's path, and where it is a folder the files of it: names, sizes, times of change."""
    files = sorted(file for file in Path(path).glob("*") if file.is_file()) if Path(path).is_dir() else []
    return "\n".join([path, *(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)])
