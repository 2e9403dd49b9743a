"""Several runs as pandas tables: the jobs of a sweep, arms, means over seeds."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from grpo.extras.report.statistics import over_seeds
from grpo.runs.run import VERDICTS, Run, numbered, read_columns, samples_in  # noqa: F401 - its old name was grpo.runs.runs
from grpo.system.errors import UserError
from grpo.system.metrics import about
from grpo.system.ranges import flat

# keys that may differ between runs of one arm: of each command, not of what is learned
SAME = ("seed", "data_seed", "ckpt_path", "output_dir", "replay", "trust", "max_time", "report", "forecast")
SAME += ("device", "optim.skipped", "trainer.default_root_dir")
SHOWN = ("callbacks", "logger", "hydra", "preflight", "resume", "export")  # groups that may differ, too


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


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of all runs, evaluations and sweeps in a folder, at any depth, each sweep before its jobs."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "config.yaml" in files:
            folders.clear()  # what a run keeps is no run
            yield Path(place)
        elif is_sweep(Path(place)):
            folders.clear()  # of jobs that had to start again
            yield Path(place)
            yield from (run.folder for run in load(place))


def is_sweep(folder: Path) -> bool:
    """Return whether a folder has jobs, of which one at least has begun."""
    jobs = (file.parent.name for file in folder.glob("[0-9]*/config.yaml"))  # or runs named after their date
    return not (folder / "config.yaml").is_file() and any(name.isdigit() for name in jobs)


def waiting_jobs(folder: Path) -> int:
    """Return how many jobs of a sweep have not begun; 0 for any other folder."""
    file = folder / "jobs.json"
    jobs = json.loads(file.read_text(encoding="utf-8")) if file.is_file() and is_sweep(folder) else []
    return sum(not (folder / str(number)).is_dir() for number in range(len(jobs)))


class Difference(NamedTuple):
    """A setting in which runs differ. name: its key, or the group that chooses it. also: keys that differ with it.
    values: its value in each run, None if the run does not have it."""

    name: str
    also: list[str]
    values: dict[Run, Any]


def counts(key: str) -> bool:
    """Return whether a key matters for what a run learns: it is no seed of the run (that of a task counts), no
    folder of the run, and no way to show or check it."""
    group = key.partition(".")[0]
    return key not in SAME and group not in SHOWN and "/" not in group


def settings(run: Run) -> dict[str, Any]:
    """Return the composed settings that count, by key. The run's own folder is written as RUN."""
    own = str(run.config.get("output_dir") or "\0")
    values = {key: value for key, value in flat(run.config).items() if counts(key)}
    return {key: value.replace(own, "RUN") if isinstance(value, str) else value for key, value in values.items()}


def classes(values: Iterable[Any]) -> tuple[int, ...]:
    """Return a number for each value, the same for equal ones: a, b, a become 0, 1, 0."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(str(value), len(numbers)) for value in values)


def differences(runs: Sequence[Run]) -> list[Difference]:
    """Return the settings that differ between the composed configurations of runs.

    A group that was chosen (algo) or a key that was typed stands for what it explains: for keys that nobody typed and that have
    one value wherever it has one. A key below it (algo.level) is its own first. Others that differ alike are one. A group whose
    options are composed to the same settings is no difference.
    """
    begun = [run for run in runs if run.config]  # it may have failed before
    composed = [settings(run) for run in begun]
    said = [run.choices | run.overrides for run in begun]
    typed = {key for run in begun for key in run.overrides}
    differ = {key: classes(values.get(key) for values in composed) for key in dict.fromkeys(chain(*composed))}
    differ = {key: numbers for key, numbers in differ.items() if max(numbers) > 0}
    names = {name: classes(values.get(name) for values in said) for name in dict.fromkeys(chain(*said)) if counts(name)}
    names = {name: numbers for name, numbers in names.items() if max(numbers) > 0}
    columns: dict[str, list[str]] = {}
    for key, numbers in differ.items():
        explain = [name for name, of in names.items() if len({*zip(of, numbers, strict=True)}) == len({*of})]
        explain.sort(key=lambda name: not key.startswith(f"{name}."))
        alike = (name for name in columns if differ.get(name) == numbers)
        name = key if key in typed else next(chain(explain, alike), key)
        columns.setdefault(name, []).append(key)
    found = []
    for name, keys in columns.items():
        known: dict[Any, Any] = {}  # the value that stands for runs with the same settings
        alike = classes(zip(*(differ[key] for key in keys), strict=True))
        values = {run: run.overrides.get(name) for run in runs}
        for run, number, own, noted in zip(begun, alike, composed, said, strict=True):
            values[run] = known.setdefault(number, own.get(name) if name in differ else noted.get(name))
        found.append(Difference(name, [key for key in keys if key != name], values))
    return found


def in_digits(value: Any, digits: int = 12) -> str:
    """Return a setting as people type it: a number in so many digits at most, below 0.001 as 5e-5."""
    if not isinstance(value, float):
        return str(value)
    if not 0 < abs(value) < 1e-3:
        return f"{value:.{digits}g}"
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"


def digits_apart(values: Iterable[Any]) -> dict[Any, str]:
    """Return how each of these settings is spelled: numbers in four digits if these tell them apart."""
    values = set(values)
    short = {value: in_digits(value, 4) for value in values}
    return short if len({*short.values()}) == len(values) else {value: in_digits(value) for value in values}


def arms(runs: Iterable[Run], found: Sequence[Difference] | None = None) -> dict[str, list[Run]]:
    """Group runs whose settings are equal except for the seed. The keys name the settings that differ, such as "algo=grpo".
    found: their `differences`, if they are known."""
    runs = list(runs)
    found = differences(runs) if found is None else found
    texts = {
        one.name: digits_apart(value for value in one.values.values() if isinstance(value, float)) for one in found
    }
    groups: dict[str, list[Run]] = {}
    for run in runs:
        values = {one.name: one.values[run] for one in found if one.values[run] is not None}
        numbers = {name: texts[name][value] for name, value in values.items() if isinstance(value, float)}
        label = ", ".join(f"{name}={value}" for name, value in (values | numbers).items())
        groups.setdefault(label or ("default" if found else "all runs"), []).append(run)
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
