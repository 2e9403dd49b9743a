"""An evaluation on disk and in the terminal: batches as they get done, the tables at the end, and a comparison."""

import json
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
        self.right += solved(part).tolist()

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
        found = as_json(estimates(samples))
        by = estimates_by_value(samples)
        found["by"] = {column: {value: as_json(e) for value, e in values.items()} for column, values in by.items()}
        save_metrics(self.folder, found)
        for file in self.parts.iterdir():
            file.unlink()
        self.parts.rmdir()
        return found


def save_metrics(folder: Path, found: Mapping[str, Any]) -> None:
    write_json(folder / "metrics.json", found)


def finished(folder: Path) -> dict[str, Any] | None:
    """The metrics of an evaluation that has ended there."""
    file = folder / "metrics.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def policy_in(path: str) -> str:
    """A model's path, and where it is a folder the files of it: names, sizes, times of change."""
    files = sorted(file for file in Path(path).glob("*") if file.is_file()) if Path(path).is_dir() else []
    return "\n".join([path, *(f"{f.name} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files)])
