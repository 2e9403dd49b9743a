"""A job of a sweep: its folder, and its state, read from the files in that folder while the job runs and afterwards."""

import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.config.composing import literal
from grpo.config.resuming import has_checkpoint

EARLY = "stopped early"  # the status of a job that fell behind the others of a search


@dataclass(eq=False)
class Job:
    """A job of a sweep. Mutable: its status changes from waiting to running to finished, failed or EARLY.

    overrides: KEY=VALUE each, the arguments of the job.
    label: the overrides that differ between jobs, as text.
    rollouts: the number of rollouts that the job will learn from; None for an evaluation.
    """

    number: int
    folder: Path
    overrides: Sequence[str]
    label: str
    rollouts: int | None = None
    status: str = "waiting"

    @property
    def output(self) -> Path:
        """The file with everything that the job's process printed."""
        return self.folder / "output.txt"

    @property
    def manifest(self) -> Mapping[str, Any]:
        """manifest.json of the run; {} if there is none yet."""
        try:
            return json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    @property
    def accuracy(self) -> float | None:
        """The last held-out accuracy of a job that has finished or was stopped early, else None."""
        if self.status == EARLY:
            return [None, *self.curve.values()][-1]
        return self.manifest.get("accuracy") if self.status == "finished" else None

    @property
    def curve(self) -> dict[int, float]:
        """The held-out accuracies in metrics.csv, by rollouts learned from; {} if there are none yet."""
        try:
            with (self.folder / "metrics.csv").open(encoding="utf-8") as lines:
                rows = [row for row in csv.DictReader(lines) if row.get("eval/accuracy")]
            return {int(row["step"]): float(row["eval/accuracy"]) for row in rows}
        except (OSError, ValueError):  # half a line
            return {}

    @property
    def mark(self) -> Path:
        """The file that says that the job was stopped early, so that a resumed sweep leaves it as it is."""
        return self.folder / "stopped_early"

    @property
    def minutes(self) -> float | None:
        """The running time in minutes, including the time before the sweep was resumed."""
        seconds = self.manifest.get("seconds")
        return None if seconds is None else seconds / 60

    def arguments(self) -> list[str]:
        """Return the arguments for the job's process. It resumes from its checkpoint if it has one, or ends at once if that is
        the last one and no evaluation is left.

        A run without a checkpoint starts anew: its folder is moved to the sweep's folder `stopped`.
        """
        if has_checkpoint(self.folder):
            others = [word for word in self.overrides if not word.startswith(("ckpt_path=", "resume.auto="))]
            return [*others, f"ckpt_path={literal(self.folder)}", "resume.auto=true"]
        if self.folder.exists() and self.rollouts is not None:  # an evaluation resumes from the files in its folder
            stopped = self.folder.parent / "stopped" / self.folder.name
            shutil.rmtree(stopped, ignore_errors=True)
            stopped.parent.mkdir(exist_ok=True)
            self.folder.rename(stopped)
        return list(self.overrides)

    def last_words(self) -> str:
        """Return the last line that the job printed."""
        text = self.output.read_text(errors="replace").strip() if self.output.exists() else ""
        return (text or "no output").splitlines()[-1].strip()[:300]
