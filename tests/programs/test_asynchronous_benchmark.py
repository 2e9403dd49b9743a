"""benchmarks/asynchronous.py: its arithmetic, on times worked by hand."""

import asynchronous
import numpy as np
import pandas as pd
import pytest

NONE = np.nan


def run(rollout: list[float], accuracy: list[float], **more: list[float]) -> pd.DataFrame:
    """A run whose updates take 2 s and sample 100 tokens; the first value of accuracy is that before training."""
    n = len(rollout)
    columns = {"time/rollout": rollout, "time/update": [2.0] * n, "time/sync": [0.0] * n, "rollout/tokens": [100.0] * n}
    columns |= {"data/tokens": [100.0 * (i + 1) for i in range(n)], **more}
    rows = {name: [NONE, *values] for name, values in columns.items()}
    times = {"time/eval": [0.5 if a == a else NONE for a in accuracy], "time/started": [NONE, *range(1, 10 * n, 10)]}
    return pd.DataFrame(rows | {"eval/accuracy": accuracy} | times)


def test_times_of_a_run_in_turn_and_of_one_ahead():
    """An evaluation comes before rollouts 1 and 3. So 2, 4 and 5 count in turn, and 2 and 4 with one ahead."""
    accuracy = [0.2, NONE, 0.6, NONE, NONE, 0.8]
    found = asynchronous.times(run([9, 3, 9, 3, 3], accuracy), 0)
    assert (found["seconds"], found["generation"], found["update"]) == (5, 3, 2)
    assert (found["waits"], found["idle"], found["staleness"], found["oldest"]) == (3 / 5, 2 / 5, 0, 0)
    assert found["whole"] == (40 - 0.5) / 4  # the evaluation in the middle is taken off, and the last is not in it
    old = {"rollout/staleness": [0, 1, 1, 1, 1], "rollout/staleness_max": [0, 1, 1, 2, 1]}
    ahead = asynchronous.times(run([9, 1, 9, 2, 0], accuracy, **old, **{"time/engine_idle": [9, 0.5, 9, 0.2, 2]}), 1)
    assert (ahead["seconds"], ahead["oldest"], ahead["staleness"]) == (3.5, 2, 0.8)
    assert (ahead["waits"], ahead["idle"]) == (3 / 7, pytest.approx(0.7 / 7))
    # 3 + 2 s in turn; the longer of both in order; with ready, 100 tokens are 100 / 64 steps of 0.025 s
    assert [asynchronous.allowed("demo", arm, found, ahead) for arm in ("ahead=0", "exact 1 tis")] == [1, 5 / 3]
    assert asynchronous.allowed("demo", "ready 2 tis", found, ahead) == 5 / 2


def test_tokens_to_a_level_need_two_evaluations_above_it():
    made = [0.2, 0.7, 0.5, 0.7, 0.8]
    assert asynchronous.tokens_to(0.7, run([1] * 4, made)) == 300
    assert np.isnan(asynchronous.tokens_to(0.75, run([1] * 4, made)))


def test_the_table_has_a_row_for_each_arm():
    metrics = {"ahead=0": {0: run([3] * 4, [0.2, NONE, NONE, 0.7, 0.8])}}
    metrics["exact 1 tis"] = {0: run([1] * 4, [0.2, NONE, NONE, 0.7, 0.8], **{"time/engine_idle": [0.3] * 4})}
    found = pd.DataFrame({"value": 0.8, "low": 0.7, "high": 0.9}, index=[*metrics])
    *_, plain, ahead = asynchronous.table("demo", metrics, found).splitlines()
    assert plain == "| ahead=0 | 1 | 5.00 | 9.83 | 1.00 | 1.00 | 60 | 40 | 0.00, 0 | 80.0 (70.0 to 90.0) | 300 |"
    assert ahead == "| exact 1 tis | 1 | 3.00 | 9.83 | 1.67 | 1.67 | 33 | 10 | 0.00, 0 | 80.0 (70.0 to 90.0) | 300 |"
