"""The logger that writes metrics.csv, the table of a run's metrics, which every reader of finished runs uses."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from grpo.system.files import replacing, surviving


# Lightning's CSVLogger deletes the file that a resumed run should continue
class MetricsTable(Logger):
    """Writes a row for each step, on disk at once. A new column is empty in earlier rows.

    An existing file is continued. The first logged step removes its rows from that step on: they belong to a run that stopped
    and was resumed from an earlier checkpoint.
    """

    name = version = ""  # the folder is the run's name

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.names: list[str] = []
        self.rows: list[dict[str, Any]] | None = None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.rows is None:
            self.rows = [row for row in self.read() if int(row["step"]) < step]
        if self.rows and self.rows[-1]["step"] == step:  # the rest of this step
            self.rows[-1] |= metrics
            self.names = []
        else:
            self.rows.append({"step": step, **metrics})
        self.write()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the rows that a full disk did not take."""
        if self.rows and not self.names:
            self.write()

    def write(self) -> None:
        """Add the last row to the file, or write all rows if there is a new column or the file lacks one of them."""
        names, self.names = self.names, []  # until it is written
        with surviving(str(self.file)):
            if self.rows[-1].keys() <= set(names):
                with self.file.open("a", newline="", encoding="utf-8") as out:
                    csv.DictWriter(out, names).writerow(self.rows[-1])
            else:
                names = ["step", *sorted({name for row in self.rows for name in row} - {"step"})]
                with replacing(self.file) as new, new.open("w", newline="", encoding="utf-8") as out:
                    writer = csv.DictWriter(out, names)
                    writer.writeheader()
                    writer.writerows(self.rows)
            self.names = names

    def read(self) -> list[dict[str, str]]:
        """Return the rows on disk; an empty list if there is no file."""
        if not self.file.exists():
            return []
        with self.file.open(newline="", encoding="utf-8") as lines:
            return list(csv.DictReader(lines))

    def log_hyperparams(self, params: Any) -> None:
        """Do nothing: config.yaml has them."""
