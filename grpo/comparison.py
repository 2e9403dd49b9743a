"""Layer 3 - the arms of a sweep against each other, and what each swept key did: held-out accuracy at last, as tables.

Only runs that finished and were evaluated count. Accuracy is a share, differences are of shares.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from grpo.errors import UserError
from grpo.runs import SAME, Run, arms, outcomes
from grpo.statistics import compare_arms, holm, over_seeds


def complete(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """`arms`, with only the runs that can be compared; an arm without any is not there. UserError where none is."""
    found = {arm: [run for run in of if run.status == "finished" and run.evaluated] for arm, of in arms(runs).items()}
    if not any(found.values()):
        raise UserError("none of the runs has finished with an evaluation, so there is nothing to compare yet")
    return {arm: of for arm, of in found.items() if of}


def compared(done: Mapping[str, list[Run]]) -> pd.DataFrame:
    """A row for each arm, best first: value, low, high, n over its seeds (Student's t); and against the first arm given, on the
    problems that both were asked, difference, difference_low, difference_high, p and Holm's p. done: see `complete`."""
    rows = {arm: over_seeds([run.accuracy.iloc[-1] for run in of])._asdict() for arm, of in done.items()}
    first, *others = done
    base, tests = outcomes(done[first]), {}
    for arm in others:
        asked = outcomes(done[arm])
        same = base.columns.intersection(asked.columns)
        found = tests[arm] = compare_arms(base[same].to_numpy(float), asked[same].to_numpy(float))
        names = ("difference", "difference_low", "difference_high")
        rows[arm] |= dict(zip(names, found.difference[:3], strict=True)) | {"p": found.p_value}
    for arm, p in zip(others, holm([test.p_value for test in tests.values()]) if others else (), strict=True):
        rows[arm]["p (Holm)"] = p
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("arm").sort_values("value", ascending=False)


def effects(done: Mapping[str, list[Run]]) -> dict[str, pd.DataFrame]:
    """For each swept key but the seed: value, low, high, n for each of its values, over all runs that had it."""
    runs = [run for of in done.values() for run in of]
    keys = dict.fromkeys(key for run in runs for key in run.overrides if key not in SAME)
    found = {}
    for key in keys:
        by: dict[str, list[float]] = {}
        for run in runs:
            by.setdefault(run.overrides.get(key, "default"), []).append(run.accuracy.iloc[-1])
        if len(by) > 1:
            table = pd.DataFrame({value: over_seeds(np.array(of))._asdict() for value, of in by.items()}).T
            found[key] = in_order(table.rename_axis(key))
    return found


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Sorted by the index, by size where it holds numbers."""
    return table.sort_index(key=lambda index: pd.to_numeric(index, errors="coerce"), kind="stable")
