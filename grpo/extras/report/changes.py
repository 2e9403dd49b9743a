"""Finds the held-out problems whose verdicts training has changed, for the opening of a page."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from grpo.extras.report.pictures import names_in_prompt
from grpo.runs.run import Run

SIDES = ["completion", "correct", "reward", "tokens"]  # what differs before and after
COLUMNS = ["item", "set", "prompt", "messages", "turns", "gold", *SIDES]
VERDICT = ["item", "set", "correct", "reward"]  # short ones


def first_samples(run: Run, after: int, columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """Return the first sample of each problem in an evaluation, by item, without those of eval.sets and unknown rewards.

    columns: those to read, of COLUMNS; VERDICT at least."""
    table = run.evaluations([after], columns)
    table = table[table["set"].isna()] if "set" in table else table
    table = table[table["reward"].notna()]
    table = table.assign(correct=table["correct"].astype(bool))
    return table.drop_duplicates("item").set_index("item")


def changed_problems(run: Run, count: int = 3) -> dict[str, Any] | None:
    """Return what changed between the first evaluation and the last; None if there are less than two.

    before, after: rollouts learned from. of: problems in both. better, worse: how many became right, and wrong; by reward if the
    task calls no answer right. problems: up to `count`, first those that became better, then at least one that became worse if
    there is any: {prompt, pictures, gold, before, after}, with SIDES of both.
    """
    if len(run.evaluated) < 2:
        return None
    before, after = run.evaluated[0], run.evaluated[-1]
    both = first_samples(run, before).join(first_samples(run, after)[SIDES], rsuffix=" after", how="inner")
    some_right = both["correct"].any() or both["correct after"].any()
    by = "correct" if some_right else "reward"
    gain = np.sign(both[f"{by} after"].astype(float) - both[by].astype(float))
    better, worse = both[gain > 0], both[gain < 0]
    last = min(len(worse), max(1, count - len(better)))
    problems = pd.concat([better.head(count - last), worse.head(last)])
    return {
        "before": before,
        "after": after,
        "of": len(both),
        "by": by,
        "better": len(better),
        "worse": len(worse),
        "problems": [
            {
                "prompt": row["prompt"],
                "pictures": names_in_prompt(row),
                "gold": row.get("gold"),
                "before": {name: row[name] for name in SIDES},
                "after": {name: row[f"{name} after"] for name in SIDES},
            }
            for row in problems.to_dict("records")
        ],
    }
