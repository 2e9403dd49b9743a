"""Several runs as pandas tables: the jobs of a sweep, arms, means over seeds."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

from grpo.extras.report.statistics import over_seeds
from grpo.runs.run import VERDICTS, Run, numbered, read_columns, samples_in  # noqa: F401 - its old name was grpo.runs.runs
from grpo.system.errors import UserError
from grpo.system.metrics import about
from grpo.system.ranges import flat

# keys that may differ between runs of one arm
SAME = ("seed", "data_seed", "ckpt_path", "output_dir", "optim.skipped", "trainer.default_root_dir")
SHOWN = ("callbacks", "logger", "hydra", "preflight")  # groups that may differ, too


def load(*paths: str | Path) -> list[Run]:
    """Return the runs of these folders, in order; a sweep stands for its jobs. Raises UserError for any other folder."""
    runs: list[Run] = []
    for path in map(Path, paths):
        jobs = [job for job in path.glob("*") if job.is_dir() and job.name.isdigit()]
        if (path / "config.yaml").is_file():
            runs.append(Run(path))
        elif jobs:
            runs += map(Run, sorted(jobs, key=lambda job: int(job.name)))
        else:
            raise UserError(f"{path} is neither a run (it has no config.yaml) nor a sweep (it has no folder 0)")
    return runs


def newest(folder: str | Path = "outputs") -> Iterator[Path]:
    """Yield the runs under `folder` that have learned from a rollout, by the age of their metrics.csv, the newest first."""
    files = sorted(Path(folder).rglob("metrics.csv"), key=lambda file: file.stat().st_mtime, reverse=True)
    yield from (file.parent for file in files if Run(file.parent).learned)


def latest(folder: str | Path = "outputs") -> Path:
    """Return the first of `newest`."""
    if (found := next(newest(folder), None)) is None:
        raise UserError(f"no run under {folder} has learned from a rollout: start one with python train.py")
    return found


def arms(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Group runs whose settings are equal except for the seed. The keys name the settings that differ, such as "algo=grpo"."""
    runs = list(runs)
    overridden = any(run.overrides for run in runs)
    settings = [run.overrides if overridden else flat(run.config) for run in runs]
    begun = [values for run, values in zip(runs, settings, strict=True) if run.config]  # it may have failed before
    names = dict.fromkeys(name for values in begun for name in values)
    names = [name for name in names if not name.startswith(SHOWN) and name not in SAME]
    keys = [name for name in names if len({str(values.get(name)) for values in begun}) > 1]
    groups: dict[str, list[Run]] = {}
    for run, values in zip(runs, settings, strict=True):
        label = ", ".join(f"{key}={values[key]}" for key in keys if key in values)
        groups.setdefault(label or ("default" if keys else "all runs"), []).append(run)
    return groups


def table(runs: Iterable[Run]) -> pd.DataFrame:
    """Return a table with a row for each run.

    Columns: arm, seed, status, rollouts, the first, best and last held-out accuracy, minutes, folder.
    """
    rows = []
    for label, members in arms(runs).items():
        for run in members:
            row = {"arm": label, "seed": run.seed, "status": run.status, "rollouts": run.manifest.get("rollouts")}
            if len(accuracy := run.accuracy):
                row |= {"first": accuracy.iloc[0], "best": accuracy.max(), "last": accuracy.iloc[-1]}
            rows.append({**row, "minutes": run.minutes if run.measured else None, "folder": str(run.folder)})
    return pd.DataFrame(rows)


def curves(runs: Iterable[Run], metric: str) -> pd.DataFrame:
    """Return every logged value of a metric as a table with the columns arm, seed, rollouts, value. Runs of an arm that have one
    seed have the folder in it."""
    values = []
    for label, members in arms(runs).items():
        seeds = [run.seed for run in members]
        for run in members:
            seed = run.seed if seeds.count(run.seed) == 1 else f"{run.seed}, {run.folder.name}"
            values += [(label, seed, *point) for point in run.curve(metric).items()]
    return pd.DataFrame(values, columns=["arm", "seed", "rollouts", "value"])


def band(runs: Iterable[Run], metric: str) -> pd.DataFrame:
    """Return the mean of a metric over seeds, with its 95 % interval (Student's t; NaN for a single seed).

    Columns: arm, rollouts, mean, low, high, n. The interval of a share stays within 0 and 1.
    """
    entry = about(metric)
    bounds = (0, 1) if entry and entry.unit == "share" else (-math.inf, math.inf)
    groups = curves(runs, metric).groupby(["arm", "rollouts"], sort=False)["value"]
    rows = [(*place, *over_seeds(values)) for place, values in groups]
    means = pd.DataFrame(rows, columns=["arm", "rollouts", "mean", "low", "high", "n"])
    return means.assign(low=means["low"].clip(*bounds), high=means["high"].clip(*bounds))
