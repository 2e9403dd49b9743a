"""Layer 3 - the data behind a sweep's page: its arms with intervals and tests, curves with bands, and each of its runs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from grpo.report.run import minute
from grpo.runs import Run, arms, band, curves, outcomes
from grpo.statistics import compare_arms, holm, over_seeds

WORDS = (
    "Accuracy after the last evaluation of the runs that finished: mean and 95 % interval over seeds (Student's t; none for one "
    "seed). The difference is in percentage points on the same problems, with an interval and a p-value that hold for other "
    "seeds and other problems where arms have several seeds; Holm's p-value allows for the number of comparisons."
)


def sweep_data(runs: Sequence[Run], folder: Path, out: Path) -> dict[str, Any]:
    found = arms(runs)
    done = {label: [run for run in members if run.status == "finished"] for label, members in found.items()}
    finished = sum(map(len, done.values()))
    started = sorted(run.manifest["started"] for run in runs if run.manifest.get("started"))
    return {
        "kind": "sweep",
        "name": f"Sweep {folder.resolve().name}",
        "facts": [("folder", str(folder.resolve())), *([("started", minute(started[0]))] if started else [])],
        "numbers": [
            {"label": "arms", "value": str(len(found)), "note": ""},
            {"label": "runs", "value": f"{finished} / {len(runs)}", "note": "finished"},
        ],
        "words": WORDS,
        "arms": list(found),
        "table": table(done),
        "metrics": metrics(runs, list(found)),
        "span": span(runs),
        "runs": [line(run, label, out) for label, members in found.items() for run in members],
    }


def line(run: Run, label: str, out: Path) -> dict[str, Any]:
    """link: from the page to the run's own, relative, so that the whole folder can be moved."""
    page = run.folder / "report.html"
    link = quote(Path(os.path.relpath(page.resolve(), out.resolve().parent)).as_posix()) if page.is_file() else None
    accuracy = run.accuracy.iloc[-1] if run.measured and len(run.accuracy) else None
    said = {"name": run.name, "arm": label, "seed": str(run.seed), "status": run.status, "accuracy": accuracy}
    return {**said, "error": run.manifest.get("error"), "link": link}


def span(runs: Sequence[Run]) -> tuple[int, int]:
    """The first and the last rollout that any run logged."""
    logged = [at for run in runs if run.measured for at in run.metrics.index]
    return (min(logged), max(logged)) if logged else (0, 1)


def metrics(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """By name of the metric: for each arm its mean over seeds with an interval, and every seed's curve."""
    names = dict.fromkeys(name for run in runs if run.measured for name in run.metrics.columns)
    found = {}
    for name in sorted(set(names) - {"epoch"}):
        means, values = band(runs, name), curves(runs, name)
        if not len(values):
            continue
        lines = []
        for label in labels:
            mean, every = means[means["arm"] == label], values[values["arm"] == label]
            seeds = [{"label": f"seed {seed}", "x": list(one["rollouts"]), "y": list(one["value"])}
                     for seed, one in every.groupby("seed")]  # fmt: skip
            lines.append({"x": list(mean["rollouts"]), "y": list(mean["mean"]), "low": list(mean["low"]),
                          "high": list(mean["high"]), "seeds": seeds})  # fmt: skip
        found[name] = lines
    return found


def table(done: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """A row for each arm: its accuracy, and against the first arm on the problems that both were asked."""
    rows: list[dict[str, Any]] = []
    answers = {label: outcomes(runs) for label, runs in done.items() if runs and all(run.evaluated for run in runs)}
    for label, runs in done.items():
        last = [run.accuracy.iloc[-1] for run in runs if run.measured and len(run.accuracy)]
        mean, low, high, n = over_seeds(np.array(last, dtype=float)) if last else (None, None, None, 0)
        rows.append({"arm": label, "seeds": n, "mean": mean, "low": low, "high": high})
    first = next(iter(done))
    compared = [row for row in rows[1:] if first in answers and row["arm"] in answers]
    for row in compared:
        a, b = answers[first], answers[row["arm"]]
        same = a.columns.intersection(b.columns)
        if len(same):
            found = compare_arms(a[same].to_numpy(float), b[same].to_numpy(float))
            row |= {"difference": found.difference._asdict(), "p": found.p_value}
            row |= {"better": found.better, "worse": found.worse, "ties": found.ties}
    tested = [row for row in compared if "p" in row]
    for row, adjusted in zip(tested, holm([row["p"] for row in tested]) if tested else (), strict=True):
        row["adjusted"] = adjusted
    return rows
