"""Predictions of runs: which compute stands beside which accuracy, who wins there, what is refused, and the command."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo.extras.curves.reading import binned, halves, points_of, samples_behind, shared_metric
from grpo.extras.curves.sigmoid import Points, Sigmoid
from grpo.extras.report.predict import main
from grpo.extras.report.predictions import amount, check, on_page, predictions, printable
from grpo.extras.report.runs import load
from grpo.runs.run import Run
from grpo.system.errors import UserError

FAST, HIGH = Sigmoid(0.2, 0.6, 2.0, 500.0), Sigmoid(0.2, 0.85, 2.0, 3000.0)


def learned(folder: Path, curve: Sigmoid, seed: int = 0, rollouts: int = 80, **config: object) -> Run:
    """Return a finished run of 100 tokens a rollout, evaluated after every eighth."""
    (folder / "evaluations").mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps({"seed": seed, "rollout": {}, "task": None} | config))
    (folder / "manifest.json").write_text('{"status": "finished"}')
    rng, rows = np.random.default_rng(seed), []
    for rollout in range(rollouts + 1):
        row = {
            "step": rollout,
            "data/tokens": 100 * rollout or None,
            "time/rollout": 2.0,
            "time/update": 1.0,
            "time/eval": 9.0,
        }
        row["rollout/solve_rate"] = float(curve.at(100 * (rollout - 1))) if rollout else None
        if rollout % 8 == 0:
            right = rng.random(500) < curve.at(100 * rollout)
            row["eval/accuracy"] = right.mean()
            table = pd.DataFrame({"rollout": rollout, "reward": right.astype(float)})
            table.to_parquet(folder / "evaluations" / f"{rollout:06d}.parquet")
        rows.append(row)
    pd.DataFrame(rows).to_csv(folder / "metrics.csv", index=False)
    return Run(folder)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """Two arms with three seeds each."""
    folder = tmp_path_factory.mktemp("sweep")
    for job in range(6):
        learned(folder / str(job), (FAST, HIGH)[job % 2], job // 2, lr=(1, 2)[job % 2])
    return folder


def test_an_accuracy_stands_beside_the_compute_before_it(sweep):
    """An evaluation after eight rollouts has the tokens of eight; the solve rate of the fourth rollout has those of three."""
    run = Run(sweep / "0")
    held_out, solved = points_of(run), points_of(run, "rollout/solve_rate")
    assert [*held_out.compute[:3]] == [0, 800, 1600] and [*held_out.samples[:3]] == [500] * 3
    assert [*solved.compute[:4]] == [0, 100, 200, 300] and solved.samples is None
    assert [*points_of(run, compute="seconds").compute[:2]] == [3, 27]  # without evaluations
    assert [*points_of(run, compute="rollouts").compute[:2]] == [0, 8]


def test_samples_without_a_verdict_or_of_another_set_do_not_count(tmp_path):
    (tmp_path / "evaluations").mkdir()
    table = pd.DataFrame({"rollout": 3, "set": [None, None, None, "other"], "reward": [1.0, 0.0, None, 1.0]})
    table.to_parquet(tmp_path / "evaluations" / "000003.parquet")
    assert samples_behind(Run(tmp_path), held_out=True).to_dict() == {3: 2}


def test_a_long_curve_has_means_of_neighbours():
    """250 points become 84 of three; the mean of samples 1, 1, 2 with accuracies 0, 0, 1 is a half."""
    x, y, n = np.arange(250.0), np.tile([0.0, 0.0, 1.0], 84)[:250], np.tile([1.0, 1.0, 2.0], 84)[:250]
    found = binned(Points(x, y, n))
    assert len(found.compute) == 84 and found.accuracy[0] == 0.5 and found.compute[0] == 5 / 4 and found.samples[0] == 4
    assert halves([Points(x, y)])[0][0].compute[-1] == 124


def test_the_arm_that_will_be_better_is_named(sweep):
    """At the end, after 8,000 tokens, HIGH has 0.77 and FAST 0.6; after 32,000 they have 0.844 and 0.6."""
    arms = {"A": load(sweep)[::2], "B": load(sweep)[1::2]}
    found = predictions(arms)
    assert (found["metric"], found["compute"], found["at"]) == ("eval/accuracy", "tokens", 32_000)
    assert found["arms"]["B"]["runs"] == 3 and found["arms"]["B"]["spent"] == 8000
    then = found["arms"]["B"]["then"]
    assert then["low"] < HIGH.at(32_000) < then["high"] and abs(found["arms"]["A"]["A"]["value"] - 0.6) < 0.02
    (row,) = found["comparisons"]
    assert row["difference"]["low"] > 0.1 and row["p_value"] == row["p_holm"] < 0.05
    table, beats, meaning = printable(found)
    assert [column.header for column in table.columns][:2] == ["arm", "accuracy at 4 x tokens (95 %)"]
    assert len(table.rows) == 2 and beats.startswith("after 32k tokens: B beats A by 2") and "other seeds" in meaning
    swapped = [*printable(predictions({"B": arms["B"], "A": arms["A"]}))][1]
    assert swapped == beats
    json.dumps(found)


def test_arms_without_a_curve_share_a_line(sweep, tmp_path):
    short = learned(tmp_path / "short", FAST, rollouts=4)
    early = learned(tmp_path / "early", FAST, rollouts=3)
    assert shared_metric([short, early, Run(sweep / "0")]) == "eval/accuracy"
    assert shared_metric([learned(tmp_path / "later", FAST, rollouts=8)]) == "rollout/solve_rate"
    found = predictions({"A": [short], "B": [early], "C": [Run(sweep / "0")]})
    assert found["comparisons"] == [] and found["at"] == 32_000
    _, few, one = printable(found)
    assert few.startswith(
        "no prediction of A; B: a run has 1 value of eval/accuracy, and a sigmoid needs 5: evaluate more"
    )
    assert "says nothing of other seeds" in one and on_page({"run": [short]}) is None


def test_the_first_half_predicts_the_second(sweep, capsys):
    first, second = halves([Points(np.array([0.0, 4.0, 5.0, 6.0, 10.0]), np.arange(5) / 10)])
    assert [[*part.compute] for part in (*first, *second)] == [[0, 4, 5], [6, 10]]
    main([str(sweep / "0"), "--halves"])
    main([str(sweep / "0"), "--compute", "rollouts", "--times", "2"])
    out = capsys.readouterr().out
    assert "first half" in out and "rms" in out and "2 x rollouts" in out
    table, *_ = check({"run": [Run(sweep / "0")]})
    error = float(next(iter(table.columns[3].cells)))
    assert abs(error) < 5
    with pytest.raises(UserError, match=r"--times 0 must be above 0"):
        main([str(sweep / "0"), "--times", "0"])
    (sweep.parent / "empty").mkdir(exist_ok=True)
    (sweep.parent / "empty" / "config.yaml").write_text("seed: 0")
    with pytest.raises(UserError, match="has learned from a rollout"):
        main([str(sweep.parent / "empty")])


def test_amounts_are_short():
    assert [amount(x, "tokens") for x in (0, 12, 4130, 2.5e6)] == [
        "0 tokens",
        "12 tokens",
        "4.13k tokens",
        "2.5M tokens",
    ]
    assert amount(75, "seconds") == "75 s"


def test_the_page_of_a_run_draws_the_fit_up_to_four_times_its_compute(sweep):
    measured, fit = on_page({"run": [Run(sweep / "0")]}, drawn=True)["series"]
    assert len(measured["y"]) == 11 and fit["x"][-1] == 4 * 8000
    assert all(low <= y <= high for y, low, high in zip(fit["y"], fit["low"], fit["high"], strict=True))
