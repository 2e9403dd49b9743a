"""Reads the folder of a run as pandas tables. Every reader of finished runs uses this module.

A file is read on first use.
"""

import json
import socket
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyarrow.parquet as pq
import yaml

from grpo.system.errors import UserError
from grpo.system.metrics import TIMES

VERDICTS = {"accuracy": "correct", "accuracy_lenient": "correct_lenient"}  # metric -> its column in tables of samples
SAME_START = 5.0  # seconds between two readings of one process's start, if the clock was set
Rollouts = Collection[int] | None  # wanted rollouts; None: all
# PyYAML's parser in C, if there is one, takes a tenth of the time
read_yaml = partial(yaml.load, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class Run:
    """The folder of a run of train.py or eval.py. The run may still be going, or have failed before it wrote anything."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.status})"

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    def saved(self, name: str, parse: Callable[[str], Any] = read_yaml) -> Any:
        """Return the parsed content of a file in the folder; {} if the file does not exist."""
        file = self.folder / name
        return parse(file.read_text(encoding="utf-8")) if file.is_file() else {}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """manifest.json; {} if the run has none."""
        return self.saved("manifest.json", json.loads)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The last configuration of the run, every value resolved; {} if it has none."""
        later = self.saved("config_changes.yaml")
        return later[-1]["config"] if later else self.saved("config.yaml")

    @property
    def evaluates(self) -> bool:
        """Whether the folder is an evaluation of eval.py, which has no rollouts and no page."""
        return bool(self.config) and "rollout" not in self.config

    @cached_property
    def overrides(self) -> dict[str, str]:
        """The overrides of the command line, by key."""
        overrides = self.manifest.get("overrides") or self.saved(".hydra/overrides.yaml")
        pairs = (override.lstrip("+~").partition("=") for override in overrides)
        return {key: value for key, _, value in pairs}

    @cached_property
    def choices(self) -> dict[str, str]:
        """The chosen option of each group, as saved by Hydra; empty if Hydra did not start the run."""
        noted = self.saved(".hydra/hydra.yaml")
        return noted["hydra"]["runtime"]["choices"] if noted else {}

    @property
    def problem(self) -> tuple[str, Any]:
        """The name of the task, and where its rows are from: a folder, a dataset of the hub, or None."""
        task = self.config["task"] or {}
        return (self.choices or self.overrides).get("task", task.get("_target_", "none")), task.get("path")

    @property
    def seed(self) -> int:
        """The seed of the run; 0 if config.yaml has none."""
        return self.config.get("seed", 0)

    @property
    def status(self) -> str:
        """finished, running, failed (also before training began), interrupted, or stopped: its process is gone and has not
        written how it ended, because it was killed or the disk was full."""
        status = self.manifest.get("status", "failed")
        here = self.manifest.get("host") == socket.gethostname()
        gone = status == "running" and here and not lives(self.manifest["pid"], self.manifest.get("process_started"))
        return "stopped" if gone else status

    @property
    def ended_by(self) -> str | None:
        """Who ended the run before its last rollout: a signal, max_time, or the class of a callback; None if nobody asked."""
        return self.manifest.get("ended_by")

    @property
    def measured(self) -> bool:
        """Whether the run has a metrics.csv with a row."""
        if not (file := self.folder / "metrics.csv").is_file():
            return False
        with file.open(encoding="utf-8") as lines:
            return len(list(islice(lines, 2))) == 2

    @property
    def learned(self) -> bool:
        """Whether metrics.csv has the row of a rollout, not only of the evaluation before training."""
        return self.measured and self.metrics.index[-1] > 0

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """metrics.csv: a row for each rollout, indexed by rollouts learned from; NaN where a metric was not logged."""
        if not self.measured:
            line = f"{self.folder} has no metrics.csv with a row"
            raise UserError(f"{line}: choose a run that has begun to learn, with logger=csv (part of the default)")
        table = pd.read_csv(self.folder / "metrics.csv").drop(columns="epoch", errors="ignore")
        return table.rename(columns={"step": "rollouts"}).set_index("rollouts")

    def curve(self, metric: str) -> pd.Series:
        """Return a metric by rollouts learned from; empty if the run has not logged it."""
        values = self.metrics.get(metric) if self.measured else None
        return pd.Series(dtype=float) if values is None else values.dropna()

    @property
    def accuracy(self) -> pd.Series:
        """The accuracy of each evaluation, by rollouts learned from; empty without evaluations."""
        return self.curve("eval/accuracy")

    @property
    def minutes(self) -> float:
        """The time of rollouts, updates and evaluations together, in minutes."""
        return sum(self.curve(name).sum() for name in TIMES) / 60

    @property
    def scored(self) -> bool:
        """Whether the run has a held-out accuracy and the samples of the evaluation."""
        return len(self.accuracy) > 0 and bool(self.evaluated)

    def samples(self, rollouts: Rollouts = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return a row for each sample of these rollouts (None: all), in the order of rollout, prompt_index, sample.

        The columns messages and tool_calls hold JSON.
        """
        return samples_in(self.folder / "rollouts", rollouts, columns)

    def evaluations(self, rollouts: Rollouts = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the samples of the evaluations after these rollouts (None: all), in the same form.

        A folder of eval.py has one evaluation, and all of its samples are returned.
        """
        if (file := self.folder / "samples.parquet").is_file():
            return read_columns(file, columns)
        return samples_in(self.folder / "evaluations", rollouts, columns)

    def verdicts(self, after: int | None = None) -> pd.DataFrame | None:
        """Return the share of right samples of each problem, strict and lenient: [items, (accuracy, accuracy_lenient)].

        after: use the evaluation after that many rollouts; None takes the last.
        A problem is NaN if the grader gave no verdict on any of its samples. Returns None if the run was not evaluated.
        """
        if not self.evaluated and not (self.folder / "samples.parquet").is_file():
            return None
        wanted = self.evaluated[-1:] if after is None else [after]
        samples = self.evaluations(wanted, ["item", "reward", "set", *VERDICTS.values()])
        if "set" in samples:  # one of eval.sets
            samples = samples[samples["set"].isna()]
        rewarded = samples["reward"].notna()
        right = {name: samples[column].astype(float) for name, column in VERDICTS.items() if column in samples}
        return pd.DataFrame(right).where(rewarded).groupby(samples["item"]).mean()

    @property
    def evaluated(self) -> list[int]:
        """The numbers of rollouts after which the run was evaluated, in order."""
        return list(numbered(self.folder / "evaluations"))

    @property
    def policy(self) -> Path | None:
        """The folder of the best saved policy, or of the last; None if the run saved none."""
        folders = (self.folder / "checkpoints" / name for name in ("best", "last"))
        return next((folder for folder in folders if folder.is_dir()), None)


def lives(pid: int, started: float | None) -> bool:
    """Return whether a process of this machine runs, which began at this time (in seconds since 1970; None: unknown)."""
    try:
        process = psutil.Process(pid)
        another = started is not None and abs(process.create_time() - started) > SAME_START
        return not another and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def numbered(folder: Path, kind: str = ".parquet") -> dict[int, Path]:
    """Return the tables, or the checkpoints (.ckpt), of a folder by rollout, in order. Tables of failed rollouts are left out."""
    return dict(sorted((int(file.stem), file) for file in folder.glob(f"*{kind}") if file.stem.isdigit()))


def samples_in(folder: Path, rollouts: Rollouts, columns: Sequence[str] | None) -> pd.DataFrame:
    """Return the tables of these rollouts in the folder (None: all) as one. Raises UserError if there are none."""
    files = numbered(folder)
    wanted = files if rollouts is None else [rollout for rollout in rollouts if rollout in files]
    if not wanted:
        numbers = ", ".join(map(str, files)) or "none"
        raise UserError(f"{folder} has no table of {rollouts or 'any rollout'}; it has rollouts: {numbers}")
    return pd.concat([read_columns(files[rollout], columns) for rollout in wanted], ignore_index=True)


def read_columns(file: Path, columns: Sequence[str] | None) -> pd.DataFrame:
    """Return a table with the given columns, ignoring columns that the file does not have; None reads all."""
    names = columns and [name for name in columns if name in pq.read_schema(file).names]
    return pd.read_parquet(file, columns=names)
