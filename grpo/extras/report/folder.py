"""Collects the data for the page of several runs, of a sweep or of any folder: what differs between them, their curves, the
comparisons of their arms, and their answers to the same problems."""

import json
import math
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from grpo.evaluation.intervals import quantile
from grpo.extras.report.changes import SIDES, VERDICT, first_samples
from grpo.extras.report.comparison import every_pair, finished_arms
from grpo.extras.report.pictures import names_in_prompt, urls
from grpo.extras.report.predictions import on_page
from grpo.extras.report.run import minute, shorter
from grpo.extras.report.runs import arms, differences, is_sweep, load, run_folders
from grpo.extras.report.statistics import arm_interval
from grpo.runs.run import Run

ARMS = 10  # whose comparisons, of each with each, are on a page
POINTS = 5000  # of each metric, for all runs together
POINTS_OF_A_RUN = 20, 200  # at least, at most


def folder_data(folder: Path, samples: int, out: Path | None) -> dict[str, Any]:
    """Return the data for the page of a folder. Raises UserError if it has no run, unless it is a server's.

    samples: the largest number of samples. out: path of the page, from which links to the runs start; None: the server of the
    folder makes the pages.
    """
    places = [*run_folders(folder)]
    if not places and out is not None:
        places = [run.folder for run in load(folder)]
    found = [Run(place) for place in places if not is_sweep(place)]
    runs = [run for run in found if not run.evaluates]
    if not is_sweep(folder):  # the newest first; a sweep has the order of its jobs
        runs.sort(key=lambda run: run.manifest.get("started") or "", reverse=True)
    by_arm = arms(runs, differ := differences(runs))
    names = list(by_arm)
    arm_of = {run: names.index(arm) for arm, members in by_arm.items() for run in members}
    done = {arm: one_of_each_seed(members) for arm, members in finished_arms(by_arm).items()}
    measured = {arm: [run.verdicts() for run in members] for arm, members in done.items()}
    logged = {run: run.metrics.dropna(axis="columns", how="all") for run in runs if run.measured}
    least, most = POINTS_OF_A_RUN
    each = max(least, min(most, POINTS // max(len(logged), 1)))
    # the same for all seeds
    every = max((math.ceil(table.index[-1] / each) for table in logged.values()), default=0) or 1
    started = sorted(minute(run.manifest["started"]) for run in runs if run.manifest.get("started"))
    ended = sum(run.status == "finished" for run in runs)
    sweeps = [place for place in places if is_sweep(place) and place != folder]
    return {
        "kind": "folder",
        "name": f"Sweep {folder.resolve().name}" if is_sweep(folder) else f"All runs in {folder.resolve()}",
        "facts": [("folder", str(folder.resolve())), *(("started", first) for first in started[:1])],
        "numbers": [
            {"label": "arms", "value": str(len(by_arm)), "note": "that differ in more than the seed"},
            {"label": "runs", "value": f"{ended} / {len(runs)}", "note": "finished"},
        ],
        "differ": [{"name": one.name, "also": one.also} for one in differ],
        "arms": [
            {"label": arm, "after": sorted({run.evaluated[-1] for run in done.get(arm, [])})}
            | accuracy_of(measured.get(arm, []))
            for arm in names
        ],
        "pairs": {
            f"{names.index(a)} {names.index(b)}": row for (a, b), row in every_pair(measured, ARMS).items()
        },
        "compared": min(len(done), ARMS),
        "prediction": on_page(dict(islice(done.items(), ARMS))) if done else None,
        "t": [quantile(0.95, n) for n in range(1, max(map(len, by_arm.values()), default=1))],
        "every": every,
        "runs": [
            line(run, folder, out)
            | {"arm": arm_of[run], "values": [one.values[run] for one in differ]}
            | {"curves": curves_of(logged[run], every) if run in logged else {}}
            for run in runs
        ],
        "metrics": dict.fromkeys(sorted({name for table in logged.values() for name in table})),
        **answers(runs, samples),
        "sweeps": [name_and_link(Run(place), folder, out) for place in sweeps],
        "evaluations": [evaluation(run, folder) for run in found if run.evaluates],
    }  # fmt: skip


def one_of_each_seed(runs: Sequence[Run]) -> list[Run]:
    """Return the first run of each seed; another one is no further sample of what seeds do."""
    return [*{run.seed: run for run in reversed(runs)}.values()][::-1]


def name_and_link(run: Run, folder: Path, out: Path | None) -> dict[str, Any]:
    """Return the path of a run in the folder, and its link, which is relative, so that the whole folder can be moved."""
    path, page = run.folder.relative_to(folder).as_posix(), run.folder / "report.html"
    name = path if path != "." else run.name
    if out is None:
        return {"name": name, "link": quote(f"/{path}/report.html")}
    return {
        "name": name,
        "link": quote(os.path.relpath(page.resolve(), out.resolve().parent)) if page.is_file() else None,
    }


def line(run: Run, folder: Path, out: Path | None) -> dict[str, Any]:
    """Return what the table says of a run, apart from its settings."""
    accuracy, reward = run.accuracy, run.curve("rollout/reward")
    return name_and_link(run, folder, out) | {
        "seed": run.seed if run.config else None,
        "status": run.status,
        "error": run.manifest.get("error"),
        "started": minute(run.manifest.get("started")),
        "rollouts": run.manifest.get("rollouts"),
        "minutes": run.minutes if run.measured else None,
        "reward": reward.iloc[-1] if len(reward) else None,
        "accuracy": accuracy.iloc[-1] if len(accuracy) else None,
        "best": accuracy.max() if len(accuracy) else None,
    }


def evaluation(run: Run, folder: Path) -> dict[str, Any]:
    """Return what the table says of an evaluation by eval.py."""
    accuracy = run.saved("metrics.json", json.loads).get("eval/accuracy", {})
    policy = run.config.get("model", {}).get("path")
    return {
        "name": run.folder.relative_to(folder).as_posix(),
        "started": minute(run.manifest.get("started")),
        "of": policy["_target_"] if isinstance(policy, dict) else policy,  # what makes it
        "problems": accuracy.get("n"),
        "accuracy": accuracy.get("value"),
    }


def accuracy_of(tables: Sequence[pd.DataFrame]) -> dict[str, Any]:
    """Return the seeds of an arm, the largest number of problems that one of them was asked (asked), and the accuracy on those
    that all were asked (n) with its interval. tables: `Run.verdicts` of each seed."""
    shares = [table["accuracy"].dropna() for table in tables]
    items = sorted(set.intersection(*(set(share.index) for share in shares))) if shares else []
    found = arm_interval([share[items] for share in shares])._asdict() if items else {}
    return {"seeds": len(tables), "asked": max(map(len, shares), default=0), **found}


def curves_of(metrics: pd.DataFrame, every: int) -> dict[str, Any]:
    """Return the curves of a run: every so many rollouts and the last, and between them the last evaluation."""
    held_out = np.array([name.startswith("eval/") for name in metrics])
    kept = (metrics.index % every == 0) | (metrics.index == metrics.index[-1])
    evaluated = metrics.index[metrics.loc[:, held_out].notna().any(axis=1)]
    evaluated = evaluated[~(evaluated // every).duplicated(keep="last")]
    table = metrics.mask(np.outer(~kept, ~held_out))[kept | metrics.index.isin(evaluated)]
    return {"x": list(table.index), "y": {name: table[name].to_numpy() for name in table}}


def answers(runs: Sequence[Run], samples: int) -> dict[str, Any]:
    """Return the first answers of the runs to the same problems, in their last evaluations, at most `samples` in all.

    problems: [{item, prompt, pictures, gold, said}], said: SIDES by the number of the run; those first that most runs have, and
    on which the verdicts differ. asked: the number of all problems. pictures: small copies by name.
    """
    last = {place: run.evaluated[-1] for place, run in enumerate(runs) if run.evaluated}
    if not last:
        return {"problems": [], "asked": 0, "pictures": {}}
    judged = pd.concat([first_samples(runs[place], after, VERDICT) for place, after in last.items()])
    of = judged.groupby("item", sort=False)
    order = pd.DataFrame({"runs": of.size(), "verdicts": of["correct"].nunique()})
    order = order.sort_values(["runs", "verdicts"], ascending=False, kind="stable")
    items = order.index[: max(1, samples // len(last))]
    # texts of one run at a time
    tables = {
        place: first_samples(runs[place], at).loc[lambda table: table.index.isin(items)] for place, at in last.items()
    }
    of = pd.concat(tables, names=["run"]).reset_index().groupby("item", sort=False)
    problems, pictures = [], {}
    for item in items:
        rows = of.get_group(item).astype(object)
        first = rows.iloc[0]
        said = {row["run"]: {name: row[name] for name in SIDES} for row in rows.to_dict("records")}
        shown = names_in_prompt(first)
        pictures |= urls(runs[first["run"]].folder, shown)
        asked = {"item": str(item), "prompt": first["prompt"], "pictures": shown, "gold": first.get("gold")}
        problems.append(asked | {"said": said})
    return {"problems": shorter(problems), "asked": len(order), "pictures": pictures}
