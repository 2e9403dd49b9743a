"""Advice from the times of a run, worked by hand: each row is one rollout."""

import pytest

from grpo.extras.health.waiting import about_waits, shares


def row(rollout: float, update: float, idle: float = 0.0, weights: float = 0.0, **more: float) -> dict[str, float]:
    times = {"time/rollout": rollout, "time/update": update, "time/sync": 0.0}
    return times | {"time/engine_idle": idle, "time/weights": weights, **more}


def test_shares_leave_out_the_first_rollout_and_those_after_an_evaluation():
    """The second, third and fifth of five rollouts count: waits of 1 + 2 + 3 s in 4 + 4 + 8 s, idle for 0 + 2 + 0 s."""
    evaluated = {"time/eval": 9.0}
    rows = [row(99, 1, 99), row(1, 3), row(2, 2, 2, 1, **evaluated), row(0, 50, 50), row(3, 5, 0, 1)]
    assert shares(rows) == {"rollout": 6 / 16, "idle": 2 / 16, "weights": 2 / 16}
    assert shares([*rows, row(0, 9, 9)], ahead=1) == shares(rows)  # the last one leaves nothing to play
    assert shares(rows[:3]) == {} == shares([], ahead=2)  # two rollouts say nothing


@pytest.mark.parametrize(
    ("times", "given", "line"),
    [
        # 6.1 of 10 s; the engine had samples to make all the time
        ((6.1, 3.9, 0.5), {"ahead": 1}, "waited for samples 61 % of the time: one more server, or rollout.order=ready"),
        ((6.1, 3.9, 0.5), {"ahead": 2, "order": "ready"}, "one more server, or rollout.ahead=3, if the engine can"),
        # each waits for the other
        ((2.0, 8.0, 4.8), {"ahead": 1}, "waited for samples 20 % of the time, and the engine was idle 48 %: rollout.ahead=2"),
        # the update is the slower one
        ((0.2, 9.8, 4.8), {"ahead": 1}, "the engine was idle 48 % of the time, and the policy hardly waited: fewer servers"),
        # 1.6 s of loads, while completions were under way
        ((0.5, 9.5, 0.0, 1.6), {"ahead": 2, "order": "ready"}, "waited for new weights 16 % of the time: a faster engine"),
        ((4.0, 6.0), {"ahead": 0}, "took turns: rollout.ahead=1 does both at once, and saves up to 40 % of the time"),
        ((7.0, 3.0), {"ahead": 0}, "saves up to 30 % of the time"),
    ],
)  # fmt: skip
def test_advice(times, given, line):
    (said,) = about_waits([row(*times)] * 6, **given)
    assert line in said


@pytest.mark.parametrize(
    ("times", "given"),
    [
        ((1.4, 8.6, 1.4), {"ahead": 1}),
        ((4.0, 6.0), {"ahead": 0, "apart": False}),  # the engine samples from the weights that the update changes
        ((1.0, 9.0), {"ahead": 0}),  # 10 % is not worth the older samples
        ((0.0, 0.0), {"ahead": 1}),
    ],
)
def test_no_advice_where_there_is_nothing_to_gain(times, given):
    assert about_waits([row(*times)] * 6, **given) == []


def test_two_lines():
    said = about_waits([row(6.0, 4.0, 0.0, 2.0)] * 6, ahead=2, order="ready")
    assert [line.split(" of the time")[0] for line in said] == [
        "the policy waited for samples 60 %",
        "samples waited for new weights 20 %",
    ]
