"""Metrics.csv: the table of a run's numbers, which everything that looks back at runs reads."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class MetricsTable(Logger):
    """A row for each step, on disk at once; a column that is new is empty in the rows before.

    A file that is there is gone on with. Its rows from the first step on that is logged are left out: they are of a run that
    stopped, and has gone back to its checkpoint.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.names: list[str] = []
        self.rows: list[dict[str, Any]] | None = None

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.rows is None:
            self.rows = [row for row in self.read() if int(row["step"]) < step]
        row = {"step": step, **metrics}
        self.rows.append(row)
        if len(self.rows) > 1 and row.keys() <= set(self.names):
            with self.file.open("a", newline="", encoding="utf-8") as out:
                csv.DictWriter(out, self.names).writerow(row)
            return
        known = {name for row in self.rows for name in row} - {"step"}
        self.names = ["step", *sorted(known)]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{self.file}.new", "w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, self.names)
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(f"{self.file}.new", self.file)

    def read(self) -> list[dict[str, str]]:
        if not self.file.exists():
            return []
        with self.file.open(newline="", encoding="utf-8") as lines:
            return list(csv.DictReader(lines))

    def log_hyperparams(self, params: Any) -> None:
        """They are in config.yaml."""
