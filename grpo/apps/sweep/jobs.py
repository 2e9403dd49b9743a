"""A job of a sweep: a folder, and what can be read in it while a run or an evaluation is at work there, or was."""

import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(eq=False)
class Job:
    """Mutable: its status goes from waiting to running to finished or failed. overrides: what was said of it, KEY=VALUE each.
    label: those of them that tell it from the other jobs. rollouts: that it will learn from, where it learns."""

    number: int
    folder: Path
    overrides: Sequence[str]
    label: str
    rollouts: int | None = None
    status: str = "waiting"
    before: float = 0.0  # the share that was done when this sweep began

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    @property
    def manifest(self) -> Mapping[str, Any]:
        try:
            return json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    @property
    def accuracy(self) -> float | None:
        return self.manifest.get("accuracy") if self.status == "finished" else None

    @property
    def minutes(self) -> float | None:
        """At work, before the sweep was stopped and after."""
        seconds = self.manifest.get("seconds")
        return None if seconds is None else seconds / 60

    def metrics(self) -> Mapping[str, str]:
        """The latest value of every column of metrics.csv, as text."""
        try:
            with (self.folder / "metrics.csv").open(newline="", encoding="utf-8") as lines:
                return {name: value for row in csv.DictReader(lines) for name, value in row.items() if name and value}
        except OSError:
            return {}

    def share(self) -> float:
        """Of its rollouts, learned from: 0 to 1."""
        if self.status in ("finished", "failed"):
            return 1.0
        return min(1.0, float(self.metrics().get("step", 0)) / self.rollouts) if self.rollouts else 0.0

    def arguments(self) -> list[str]:
        """What its process is told: to go on where it stopped, if there is a checkpoint. Else a run's folder is made clean."""
        checkpoint = self.folder / "checkpoints" / "last.ckpt"
        if checkpoint.exists() and self.share() < 1:  # else it died at its very end, and train.py would refuse
            others = [override for override in self.overrides if not override.startswith("ckpt_path=")]
            return [*others, f"ckpt_path={quoted(checkpoint)}"]
        if self.folder.exists() and self.rollouts is not None:  # an evaluation goes on with what it finds
            stopped = self.folder.parent / "stopped" / self.folder.name
            shutil.rmtree(stopped, ignore_errors=True)
            stopped.parent.mkdir(exist_ok=True)
            self.folder.rename(stopped)
        return list(self.overrides)

    def last_words(self) -> str:
        text = self.output.read_text(errors="replace").strip() if self.output.exists() else ""
        return (text or "it said nothing").splitlines()[-1].strip()[:300]


def quoted(path: Path) -> str:
    """As the value of an override."""
    text = str(path)
    plain = all(c.isalnum() or c in "/._-" for c in text)
    return text if plain else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
