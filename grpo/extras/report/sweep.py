"""Collects the data for the page of a sweep: arms with intervals and tests, curves with bands, and the runs."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from grpo.extras.report.comparison import comparable, compared
from grpo.extras.report.run import minute
from grpo.extras.report.runs import arms, band, curves
from grpo.runs.run import Run

FEWEST = 4  # seeds for a band: the interval of fewer is so wide that it hides the curves


def sweep_data(runs: Sequence[Run], folder: Path, out: Path) -> dict[str, Any]:
    """Return the data for the page of a sweep. out: path of the page, from which links to the runs start."""
    by_arm = arms(runs)
    finished = sum(run.status == "finished" for run in runs)
    started = [minute(run.manifest["started"]) for run in runs if run.manifest.get("started")]
    logged = [at for run in runs if run.measured for at in run.metrics.index] or [0, 1]
    return {
        "kind": "sweep",
        "name": f"Sweep {folder.resolve().name}",
        "facts": [("folder", str(folder.resolve())), *(("started", first) for first in sorted(started)[:1])],
        "numbers": [
            {"label": "arms", "value": str(len(by_arm)), "note": ""},
            {"label": "runs", "value": f"{finished} / {len(runs)}", "note": "finished"},
        ],
        "arms": list(by_arm),
        "table": arm_rows(runs, list(by_arm)),
        "metrics": bands(runs, list(by_arm)),
        "span": (min(logged), max(logged)),
        "runs": [line(run, label, out) for label, members in by_arm.items() for run in members],
    }


def line(run: Run, label: str, out: Path) -> dict[str, Any]:
    """Return a run's line of the table. Its link to the page of the run is relative, so that the whole folder can be moved."""
    page = run.folder / "report.html"
    return {
        "name": run.name,
        "arm": label,
        "seed": str(run.seed),
        "status": run.status,
        "accuracy": run.accuracy.iloc[-1] if len(run.accuracy) else None,
        "error": run.manifest.get("error"),
        "link": quote(os.path.relpath(page.resolve(), out.resolve().parent)) if page.is_file() else None,
    }


def bands(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return by metric, for each arm, the mean over seeds, the curve of every seed, and the interval from FEWEST seeds on."""
    logged = (run.metrics.dropna(axis="columns", how="all") for run in runs if run.measured)
    arms_of: dict[str, list[dict[str, Any]]] = {}
    for name in sorted({name for metrics in logged for name in metrics}):
        means = band(runs, name).rename(columns={"rollouts": "x", "mean": "y"})
        values = curves(runs, name).rename(columns={"rollouts": "x", "value": "y"})
        arms_of[name] = []
        for label in labels:
            mean, every = means[means["arm"] == label], values[values["arm"] == label].groupby("seed")
            if len(every) < FEWEST:
                mean = mean.assign(low=None, high=None)
            seeds = [{"label": f"seed {seed}", **curve[["x", "y"]].to_dict("list")} for seed, curve in every]
            arms_of[name].append({**mean[["x", "y", "low", "high"]].to_dict("list"), "seeds": seeds})
    return arms_of


def arm_rows(runs: Sequence[Run], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each arm, as in `compared`; without values if no run of the arm has finished and was evaluated."""
    done = comparable(runs)
    rows = compared(done).to_dict("index") if done else {}
    return [{"arm": label, **rows.get(label, {"seeds": 0})} for label in labels]
