"""Compares two or more policies on the same problems: which is better, by how much, and could the difference be chance?

Reads the saved samples of evaluations and loads no model.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
import pandas as pd

from grpo.evaluation.estimates import as_json, number_and_interval
from grpo.extras.report.runs import arms, load
from grpo.extras.report.statistics import arm_interval, compare_arms, holm, over_seeds, paired
from grpo.runs.run import VERDICTS, Run
from grpo.system.errors import UserError

log = logging.getLogger(__name__)
LETTERS = (*ascii_uppercase, *(a + b for a in ascii_uppercase for b in ascii_uppercase))  # A to ZZ: names of arms


def arms_of(operands: Sequence[str | Sequence[str]]) -> dict[str, list[Run]]:
    """Return the runs of each arm that `compare=` names.

    An operand is a run, an evaluation, a list of them (the seeds of one arm), or a sweep. The runs of a sweep are divided into
    arms by the settings that differ between them.
    """
    named: dict[str, list[Run]] = {}
    for operand in operands:
        if not isinstance(operand, str):
            named[", ".join(operand)] = load(*(Path(path).expanduser() for path in operand))
            continue
        folder = Path(operand).expanduser()
        runs = load(folder)
        if unfinished := [run for run in runs if run.folder != folder and run.status != "finished"]:
            folders = ", ".join(f"{run.folder} ({run.status})" for run in unfinished)
            log.warning("left out because they have not finished: %s", folders)
        parts = arms(run for run in runs if run not in unfinished)
        for label, members in parts.items():
            named[operand if len(parts) == 1 else f"{operand}: {label}"] = members
    if not 2 <= len(named) <= len(LETTERS):
        how = "compare=RUN_A,RUN_B; the folder of a sweep; or seeds in brackets, compare=[[A0,A1],[B0,B1]]"
        raise UserError(f"compare has {len(named)} arm(s) ({', '.join(named)}), but needs two or more: {how}")
    return named


def compare(named_arms: Mapping[str, Sequence[Run]], after: int | None = None) -> dict[str, Any]:
    """Compare every arm with the first, on the problems that all runs share, and return the content of metrics.json.

    after: compare the evaluations after that many rollouts; None takes each run's last.
    """
    return compare_verdicts(verdicts_of(named_arms, after))


def compare_verdicts(measured: Mapping[str, Sequence[pd.DataFrame]]) -> dict[str, Any]:
    """Return the content of metrics.json from `Run.verdicts` of the runs of each arm."""
    every = [table for tables in measured.values() for table in tables]
    items = sorted(set.intersection(*(set(table["accuracy"].dropna().index) for table in every)))
    if not items:
        raise UserError("the runs have no problem in common: compare evaluations of the same task, split and rows")

    letters = dict(zip(LETTERS, measured, strict=False))
    counts = {}  # by letter: how many problems any of its runs has
    for letter, name in letters.items():
        problems = [problem for table in measured[name] for problem in table.index]
        counts[letter] = len(set(problems))
    described = {letter: {"name": name, "runs": len(measured[name])} for letter, name in letters.items()}
    comparisons: list[dict[str, Any]] = []
    for metric in VERDICTS:
        if not all(metric in table and table.loc[items, metric].notna().all() for table in every):
            continue
        scores: dict[str, np.ndarray] = {}  # by letter: [runs, items]
        for letter, name in letters.items():
            scores[letter] = np.array([table.loc[items, metric] for table in measured[name]])
            described[letter] |= as_json({metric: arm_interval(scores[letter])})
        (first, a), *others = scores.items()
        tests = []
        for _, b in others:
            several = max(len(a), len(b)) > 1  # runs
            tests.append(compare_arms(a, b) if several else paired(a[0], b[0]))
        adjusted = holm([test.p_value for test in tests])
        for (other, _), test, p_holm in zip(others, tests, adjusted, strict=True):
            row = {"metric": f"eval/{metric}", "arm": other, "against": first, **test._asdict()}
            comparisons.append({**row, "difference": number_and_interval(test.difference), "p_holm": p_holm})
    return {"arms": described, "items": {"common": len(items), **counts}, "comparisons": comparisons}


def verdicts_of(named_arms: Mapping[str, Sequence[Run]], after: int | None) -> dict[str, list[pd.DataFrame]]:
    """Return `Run.verdicts` of the evaluated runs of each arm. Raises UserError for an arm without such a run."""
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
    return measured


# -- the arms of a sweep, as tables


def comparable(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return `arms` with only the runs that have finished and were evaluated, and without arms that have no such run."""
    return finished_arms(arms(runs))


def finished_arms(by_arm: Mapping[str, Sequence[Run]]) -> dict[str, list[Run]]:
    """Return the arms with only the runs that have finished and were evaluated, and without arms that have no such run."""
    done: dict[str, list[Run]] = {}
    for arm, members in by_arm.items():
        if scored := [run for run in members if run.status == "finished" and run.scored]:
            done[arm] = scored
    return done


def compared(done: Mapping[str, Sequence[Run]]) -> pd.DataFrame:
    """Return a table with a row for each arm, best first.

    Columns: seeds; value, low and high of the last accuracy, with an interval for other seeds and other problems; the difference
    from the first arm given, its low and high, p, Holm's p, and the number of problems that are better, worse and tied.
    Arms without a common problem (runs of several tasks) have the mean over their seeds and no difference.
    """
    rows: dict[str, dict[str, Any]] = {}
    for arm, runs in done.items():
        last = over_seeds([run.accuracy.iloc[-1] for run in runs])
        rows[arm] = {"seeds": len(runs), **last._asdict()}
    with suppress(UserError):  # no problem in common
        result = compare(done)
        for arm in result["arms"].values():
            rows[arm["name"]] |= arm["eval/accuracy"]
        for name, row in differences_of(result).items():
            rows[name] |= row
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("arm").drop(columns="n")
    return table.sort_values("value", ascending=False)


def differences_of(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by name of an arm how its accuracy differs from the first arm's, from the content of metrics.json."""
    found = {}
    for row in result["comparisons"]:
        if row["metric"] == "eval/accuracy":
            value, low, high, _ = row["difference"].values()
            found[result["arms"][row["arm"]]["name"]] = {
                **{"difference": value, "difference_low": low, "difference_high": high},
                **{"p": row["p_value"], "p (Holm)": row["p_holm"]},
                **{name: row[name] for name in ("better", "worse", "ties")},
            }
    return found


def every_pair(measured: Mapping[str, Sequence[pd.DataFrame]], most: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Return how the second arm of a pair differs from the first, as in `compared`, for all pairs of the first `most` arms that
    have a problem in common. measured: `Run.verdicts` of the runs of each arm."""
    found = {}
    for first, other in combinations(list(measured)[:most], 2):
        with suppress(UserError):  # no problem in common
            row = differences_of(compare_verdicts({first: measured[first], other: measured[other]}))
            found |= {(first, arm): values for arm, values in row.items()}
    return found
