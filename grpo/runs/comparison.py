"""Compares two or more policies on the same problems: which is better, by how much, and could the difference be chance?

Reads the saved samples of evaluations and loads no model.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
import pandas as pd

from grpo.evaluation.metrics import as_json, number_and_interval
from grpo.evaluation.statistics import arm_interval, compare_arms, holm, over_seeds, paired
from grpo.runs.runs import VERDICTS, Run, arms, load
from grpo.system.errors import UserError

log = logging.getLogger(__name__)
LETTERS = (*ascii_uppercase, *(a + b for a in ascii_uppercase for b in ascii_uppercase))  # A to ZZ: names of arms


def arms_of(operands: Sequence[str | Sequence[str]]) -> dict[str, list[Run]]:
    """Return the runs of each arm that `compare=` names.

    An operand is a run, an evaluation, a list of them (the seeds of one arm), or a sweep. The runs of a sweep are divided into
    arms by the overrides of their command lines.
    """
    found: dict[str, list[Run]] = {}
    for operand in operands:
        if not isinstance(operand, str):
            found[", ".join(operand)] = load(*(Path(path).expanduser() for path in operand))
            continue
        folder = Path(operand).expanduser()
        runs = load(folder)
        if unfinished := [run for run in runs if run.folder != folder and run.status != "finished"]:
            named = ", ".join(f"{run.folder} ({run.status})" for run in unfinished)
            log.warning("left out because they have not finished: %s", named)
        parts = arms(run for run in runs if run not in unfinished)
        for label, members in parts.items():
            found[operand if len(parts) == 1 else f"{operand}: {label}"] = members
    if not 2 <= len(found) <= len(LETTERS):
        how = "compare=RUN_A,RUN_B; the folder of a sweep; or seeds in brackets, compare=[[A0,A1],[B0,B1]]"
        raise UserError(f"compare has {len(found)} arm(s) ({', '.join(found)}), but needs two or more: {how}")
    return found


def compare(named_arms: Mapping[str, Sequence[Run]], after: int | None = None) -> dict[str, Any]:
    """Compare every arm with the first, on the problems that all runs share, and return the content of metrics.json.

    after: compare the evaluations after that many rollouts; None takes each run's last.
    """
    measured: dict[str, list[pd.DataFrame]] = {}
    for name, runs in named_arms.items():
        tables = {run: run.verdicts(after) for run in runs}
        if missing := [str(run.folder) for run, table in tables.items() if table is None]:
            log.warning("left out because they have no finished evaluation: %s", ", ".join(missing))
        measured[name] = [table for table in tables.values() if table is not None]
        if not measured[name]:
            raise UserError(f"{name} has no finished evaluation: wait until it ends, or run eval.py on it")
    last = {run.evaluated[-1] for runs in named_arms.values() for run in runs if run.evaluated}
    if after is None and len(last) > 1:
        log.warning("the last evaluations are after %s rollouts; after=N compares at the same one", sorted(last))
    every = [table for tables in measured.values() for table in tables]
    items = sorted(set.intersection(*(set(table["accuracy"].dropna().index) for table in every)))
    if not items:
        raise UserError("the runs have no problem in common: compare evaluations of the same task, split and rows")

    letters = dict(zip(LETTERS, measured, strict=False))
    asked = {}  # by letter: how many problems any of its runs has
    for letter, name in letters.items():
        problems = [problem for table in measured[name] for problem in table.index]
        asked[letter] = len(set(problems))
    described = {letter: {"name": name, "runs": len(measured[name])} for letter, name in letters.items()}
    comparisons: list[dict[str, Any]] = []
    for metric in VERDICTS:
        if not all(metric in table and table.loc[items, metric].notna().all() for table in every):
            continue
        tables = {letter: [table.loc[items, metric] for table in measured[name]] for letter, name in letters.items()}
        scores = {letter: np.array(rows) for letter, rows in tables.items()}  # [runs, items]
        for letter, arm in scores.items():
            described[letter] |= as_json({metric: arm_interval(arm)})
        (first, a), *others = scores.items()
        found = []
        for _, b in others:
            several = max(len(a), len(b)) > 1  # runs
            found.append(compare_arms(a, b) if several else paired(a[0], b[0]))
        adjusted = holm([one.p_value for one in found])
        for (other, _), one, p_holm in zip(others, found, adjusted, strict=True):
            row = {"metric": f"eval/{metric}", "arm": other, "against": first, **one._asdict()}
            comparisons.append({**row, "difference": number_and_interval(one.difference), "p_holm": p_holm})
    return {"arms": described, "items": {"common": len(items), **asked}, "comparisons": comparisons}


# -- the arms of a sweep, as tables


def comparable(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return `arms` with only the runs that have finished and were evaluated; arms without such a run are left out."""
    found = {arm: [run for run in of if run.status == "finished" and run.scored] for arm, of in arms(runs).items()}
    return {arm: of for arm, of in found.items() if of}


def compared(done: Mapping[str, Sequence[Run]]) -> pd.DataFrame:
    """Return a table with a row for each arm, best first.

    Columns: seeds; value, low and high of the last accuracy, with an interval for other seeds and other problems; the difference
    from the first arm given, its low and high, p, Holm's p, and the number of problems that are better, worse and tied.
    Arms without a common problem (runs of several tasks) have the mean over their seeds and no difference.
    """
    last = {arm: over_seeds([run.accuracy.iloc[-1] for run in of]) for arm, of in done.items()}
    rows: dict[str, dict[str, Any]] = {arm: {"seeds": len(of), **last[arm]._asdict()} for arm, of in done.items()}
    with suppress(UserError):  # no problem in common
        found = compare(done)
        for arm in found["arms"].values():
            rows[arm["name"]] |= arm["eval/accuracy"]
        for row in found["comparisons"]:
            if row["metric"] == "eval/accuracy":
                value, low, high, _ = row["difference"].values()
                arm = rows[found["arms"][row["arm"]]["name"]]
                arm |= {"difference": value, "difference_low": low, "difference_high": high}
                arm |= {"p": row["p_value"], "p (Holm)": row["p_holm"]}
                arm |= {name: row[name] for name in ("better", "worse", "ties")}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("arm").drop(columns="n")
    return table.sort_values("value", ascending=False)
