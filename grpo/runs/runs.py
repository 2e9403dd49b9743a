"""What runs left on disk, as tables: of one run, of a sweep, over seeds. Everything that looks back reads it here.

Tables are pandas'. A file is read when it is asked for.
"""

import json
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyarrow.parquet as pq
import yaml

from grpo.evaluation.statistics import over_seeds
from grpo.system.errors import UserError
from grpo.system.metrics import TIMES
from grpo.system.settings import flat

VERDICTS = {"accuracy": "correct", "accuracy_lenient": "correct_lenient"}  # and the columns of samples that they are of
SAME = ("seed", "ckpt_path", "output_dir")  # what may differ between runs of one arm,
SHOWN = ("callbacks", "logger")  # and groups that may
Rollouts = Collection[int] | None  # those wanted; None: all


class Run:
    """One run's folder, that of train.py or of eval.py; it may be going on, or have failed before there was anything to read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.status})"

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def saved(self, name: str, parse: Callable[[str], Any] = yaml.safe_load) -> Any:
        """What a file of the folder holds; {} where there is none."""
        file = self.folder / name
        return parse(file.read_text(encoding="utf-8")) if file.is_file() else {}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return self.saved("manifest.json", json.loads)

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.saved("config.yaml")

    @cached_property
    def overrides(self) -> dict[str, str]:
        """The command line's, by key."""
        given = self.manifest.get("overrides") or self.saved(".hydra/overrides.yaml")
        pairs = (override.lstrip("+~").partition("=") for override in given)
        return {key: value for key, _, value in pairs}

    @cached_property
    def choices(self) -> dict[str, str]:
        """The option of each group, as Hydra noted it; empty where Hydra did not start the run."""
        noted = self.saved(".hydra/hydra.yaml")
        return noted["hydra"]["runtime"]["choices"] if noted else {}

    @property
    def seed(self) -> int:
        return self.config.get("seed", 0)

    @property
    def status(self) -> str:
        """finished, running, failed (before it began, too), interrupted, or stopped: by something that left no time to say so."""
        status = self.manifest.get("status", "failed")
        here = self.manifest.get("host") == socket.gethostname()
        return "stopped" if status == "running" and here and not psutil.pid_exists(self.manifest["pid"]) else status

    @property
    def measured(self) -> bool:
        return (self.folder / "metrics.csv").is_file()

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row for each rollout, indexed by rollouts learned from; columns as they were logged, NaN where a row has none."""
        if not self.measured:
            raise UserError(f"{self.folder} has no metrics.csv: give a run that had logger=csv (the default has it)")
        table = pd.read_csv(self.folder / "metrics.csv").drop(columns="epoch", errors="ignore")
        return table.rename(columns={"step": "rollouts"}).set_index("rollouts")

    def curve(self, metric: str) -> pd.Series:
        """A metric by rollouts; empty where the run has not logged it."""
        values = self.metrics.get(metric) if self.measured else None
        return pd.Series(dtype=float) if values is None else values.dropna()

    @property
    def accuracy(self) -> pd.Series:
        """Of the evaluations, by rollouts; empty where there were none."""
        return self.curve("eval/accuracy")

    @property
    def minutes(self) -> float:
        """Of rollouts, updates and evaluations."""
        return sum(self.curve(name).sum() for name in TIMES) / 60

    @property
    def scored(self) -> bool:
        """Whether there is an accuracy to compare, and the samples behind it."""
        return len(self.accuracy) > 0 and bool(self.evaluated)

    def samples(self, rollouts: Rollouts = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A row for each sample of these rollouts (all), by rollout, prompt_index, sample; messages and tool_calls are JSON."""
        return samples_in(self.folder / "rollouts", rollouts, columns)

    def evaluations(self, rollouts: Rollouts = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The same of the held-out examples, after so many rollouts; of a folder of eval.py's all that it has."""
        if (file := self.folder / "samples.parquet").is_file():
            return read_columns(file, columns)
        return samples_in(self.folder / "evaluations", rollouts, columns)

    def verdicts(self, after: int | None = None) -> pd.DataFrame | None:
        """[items, (accuracy, accuracy_lenient)] of the last evaluation, or of that after so many rollouts: of each problem the
        share of its samples that were right, NaN where nobody could tell. None where there was none."""
        if not self.evaluated and not (self.folder / "samples.parquet").is_file():
            return None
        wanted = self.evaluated[-1:] if after is None else [after]
        samples = self.evaluations(wanted, ["item", "reward", *VERDICTS.values()])
        known = samples["reward"].notna()
        right = {name: samples[column].astype(float) for name, column in VERDICTS.items() if column in samples}
        return pd.DataFrame(right).where(known).groupby(samples["item"]).mean()

    @property
    def evaluated(self) -> list[int]:
        """After how many rollouts there was an evaluation."""
        return list(numbered(self.folder / "evaluations"))

    @property
    def policy(self) -> Path | None:
        """The best policy that was saved, else the last."""
        folders = (self.folder / "checkpoints" / name for name in ("best", "last"))
        return next((folder for folder in folders if folder.is_dir()), None)


def numbered(folder: Path) -> dict[int, Path]:
    """Its tables in the order of the rollouts they are of; not those of rollouts that failed."""
    return {int(file.stem): file for file in sorted(folder.glob("*.parquet")) if file.stem.isdigit()}


def samples_in(folder: Path, rollouts: Rollouts, columns: Sequence[str] | None) -> pd.DataFrame:
    files = numbered(folder)
    wanted = files if rollouts is None else [rollout for rollout in rollouts if rollout in files]
    if not wanted:
        there = ", ".join(map(str, files)) or "none"
        raise UserError(f"{folder} has no table of {rollouts or 'any rollout'}; there are: {there}")
    return pd.concat([read_columns(files[rollout], columns) for rollout in wanted], ignore_index=True)


def read_columns(file: Path, columns: Sequence[str] | None) -> pd.DataFrame:
    """A table with those of the columns that it has, all for None."""
    names = columns and [name for name in columns if name in pq.read_schema(file).names]
    return pd.read_parquet(file, columns=names)


# -- several runs


def load(*paths: str | Path) -> list[Run]:
    """Runs, and the jobs of sweeps, in order. Raises UserError for a folder that is neither."""
    found: list[Run] = []
    for path in map(Path, paths):
        jobs = [job for job in path.glob("*") if job.is_dir() and job.name.isdigit()]
        if (path / "config.yaml").is_file():
            found.append(Run(path))
        elif jobs:
            found += map(Run, sorted(jobs, key=lambda job: int(job.name)))
        else:
            raise UserError(f"{path} is neither a run (it has no config.yaml) nor a sweep (it has no folder 0)")
    return found


def latest(folder: str | Path = "outputs") -> Path:
    """The run under `folder` that last measured something."""
    file = max(Path(folder).rglob("metrics.csv"), key=lambda file: file.stat().st_mtime, default=None)
    if file is None:
        raise UserError(f"there is no run under {folder}: python train.py makes one")
    return file.parent


def arms(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs with the same settings but for the seed, by what sets them apart from the others, as "algo=grpo"."""
    runs = list(runs)
    overridden = any(run.overrides for run in runs)
    settings = [run.overrides if overridden else flat(run.config) for run in runs]
    known = [one for one in settings if one]  # not those that left nothing
    keys = [
        name
        for name in dict.fromkeys(name for one in known for name in one)
        if not name.startswith(SHOWN) and name not in SAME and len({str(one.get(name)) for one in known}) > 1
    ]
    found: dict[str, list[Run]] = {}
    for run, one in zip(runs, settings, strict=True):
        label = ", ".join(f"{key}={one[key]}" for key in keys if key in one)
        found.setdefault(label or ("default" if keys else "all runs"), []).append(run)
    return found


def table(runs: Iterable[Run]) -> pd.DataFrame:
    """A row a run: its arm, how it stands, held-out accuracy at first, at best and at last, minutes of rollouts and updates."""
    rows = []
    for label, members in arms(runs).items():
        for run in members:
            row = {"arm": label, "seed": run.seed, "status": run.status, "rollouts": run.manifest.get("rollouts")}
            if len(accuracy := run.accuracy):
                row |= {"first": accuracy.iloc[0], "best": accuracy.max(), "last": accuracy.iloc[-1]}
            rows.append({**row, "minutes": run.minutes if run.measured else None, "folder": str(run.folder)})
    return pd.DataFrame(rows)


def curves(runs: Iterable[Run], metric: str) -> pd.DataFrame:
    """arm, seed, rollouts, value: a row for each measured value of each run."""
    values = [
        (label, run.seed, rollouts, value)
        for label, members in arms(runs).items()
        for run in members
        for rollouts, value in run.curve(metric).items()
    ]
    return pd.DataFrame(values, columns=["arm", "seed", "rollouts", "value"])


def band(runs: Iterable[Run], metric: str) -> pd.DataFrame:
    """arm, rollouts, mean, low, high, n: the mean over seeds with its 95 % interval (Student's t; NaN for a single seed)."""
    groups = curves(runs, metric).groupby(["arm", "rollouts"], sort=False)["value"]
    rows = [(*place, *over_seeds(values)) for place, values in groups]
    return pd.DataFrame(rows, columns=["arm", "rollouts", "mean", "low", "high", "n"])
