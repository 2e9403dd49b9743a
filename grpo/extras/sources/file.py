"""Recorded groups: the rollouts of a run that has kept its tokens, or a JSONL file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from grpo.env.rendering import Renderer
from grpo.extras.sources.conversion import Conversion
from grpo.models.pretrained import Pretrained
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.types import Group
from grpo.system.errors import UserError
from grpo.system.ranges import Count


class Recorded:
    """Rollout r is that of a run, or the next groups of a file, which begins again at its end.

    path: the folder of a run with callbacks.samples.token_logprobs=true, or a file with one sample (see conversion.py) in a line.
    first: the rollout to begin with, as its table is numbered.
    """

    def __init__(self, pretrained: Pretrained, renderer: Renderer, path: str, first: Count = 1) -> None:
        self.path, self.convert, self.lines, self.first = path, Conversion(pretrained, renderer), [], first
        self.tables = sorted(file for file in Path(path, "rollouts").glob("*.parquet") if file.stem.isdigit())
        if not self.tables and Path(path).is_file():
            lines = enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1)
            samples = ((f"{path}, line {number}", line) for number, line in lines if line.strip())
            self.lines = self.convert.groups(samples)
        if not self.tables and not self.lines:
            raise UserError(f"source.path={path} has no samples: give a run with rollouts/*.parquet, or a .jsonl file")

    def groups(self, r: int, count: int, first: int, rollouts: Rollouts) -> list[Group]:
        """Return the groups of rollout r, all in its first round. Raises UserError if a run has not recorded them."""
        if first:
            return []
        place = r + self.first - 1
        if not self.tables:
            return [self.lines[i % len(self.lines)] for i in range(place * count, (place + 1) * count)]
        if (wanted := rollouts.plan.num_rollouts + self.first - 1) > (recorded := len(self.tables)):
            fix = "lower rollout.num_rollouts" if self.first == 1 else "lower source.first or rollout.num_rollouts"
            raise UserError(f"source.path={self.path} has {recorded} recorded rollouts, not {wanted}: {fix}")
        table, file = pq.read_table(self.tables[place]), self.tables[place]
        if "rows" not in table.column_names or not len(table):
            fix = "record a run with callbacks.samples.token_logprobs=true"
            raise UserError(f"source.path={self.path} has no tokens in {file.name}: {fix}")
        rows, later = enumerate(table.to_pylist()), r + 1 - int(file.stem)
        return self.convert.groups((f"{file}, row {i}", row_of_a_run(row, later)) for i, row in rows)

    def progress(self, rollouts: int) -> dict[str, float]:
        """Return no metrics."""
        return {}


def row_of_a_run(row: Mapping[str, Any], later: int) -> dict[str, Any]:
    """Return a sample of a run's table in the form of conversion.py. later: rollouts by which it is replayed later than it was
    learned from; its tokens are as stale as they were then."""
    rows = [
        one | {"versions": [v + later for v in one["versions"]]} if one.get("versions") else one for one in row["rows"]
    ]
    parts = {name: x for name, x in row.items() if name.startswith("reward/") and x is not None}
    sample = {"group": row["prompt_index"], "advantage": row["given_advantage"]}
    sample |= {"parts": {name.removeprefix("reward/"): x for name, x in parts.items()}}
    sample |= {"finish": "length" if row["truncated"] else "stop"}
    return sample | {"rows": rows, "reward": row["reward"], "correct": row["correct"]}
