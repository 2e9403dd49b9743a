"""Samplers that prefer some examples: weights worked by hand, chances counted, and a resumed one draws the same."""

import math
from functools import partial

import numpy as np
import pytest

from grpo.env.types import Reward
from grpo.extras.selection.samplers import History, Weighted, by_column, learning_signal, pools, staged
from grpo.system.errors import RolloutError, UserError
from grpo.system.progress import Progress, set_progress

ROWS = [{"n": i, "weight": float(i), "source": "ab"[i // 2]} for i in range(4)]
SEEN = {0: (0.1, 0.0), 1: (0.5, 0.5), 3: (0.9, 1.0)}  # the second row of b was solved; row 2 was never asked


def history(share: int = 0, latest=SEEN) -> History:
    return History(ROWS, latest, Progress(share, 100))


def results(*given: tuple[int, list[float]]):
    return [(ROWS[i], [Reward(value, value == 1) for value in values]) for i, values in given]


def test_weights_by_difficulty_follow_the_latest_share_of_right_answers():
    assert pools(history(), [0.25, 0.75], [1.0, 2.0, 0.5], unseen=1.5).tolist() == [1.0, 2.0, 1.5, 0.5]
    at = {0: (0, 0.25), 1: (0, 0.26), 3: (0, 0.75)}  # a threshold belongs to the pool below it
    assert pools(history(latest=at), [0.25, 0.75], [1.0, 2.0, 3.0]).tolist() == [1.0, 2.0, 1.0, 2.0]
    assert learning_signal(history(), floor=0.1).tolist() == [0.1, 1.0, 1.0, 0.1]
    assert by_column(history(), "weight").tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(UserError, match="each row needs a number in this column"):
        by_column(history(), "source")
    with pytest.raises(UserError, match="weights has one number more than thresholds"):
        pools(history(), [0.5], [1.0])


def test_a_stage_ends_by_the_share_of_the_run_or_by_what_is_solved():
    stages = [{"values": ["a"], "until": 0.3}, {"values": ["a", "b"]}]
    assert staged(history(29), "source", stages).tolist() == [1, 1, 0, 0]
    assert staged(history(30), "source", stages).tolist() == [1, 1, 1, 1]
    reached = [{"values": ["a"], "reach": 0.25, "asked": 2}, {"values": ["b"]}]  # (0 + 0.5) / 2 of a is solved
    assert staged(history(), "source", reached).tolist() == [0, 0, 1, 1]
    assert staged(history(latest={1: (1, 1)}), "source", reached).tolist() == [1, 1, 0, 0]  # one row is too few
    with pytest.raises(UserError, match=r"no row has source in \['c'\]; there are a, b"):
        staged(history(), "source", [{"values": ["c"]}])


def test_chances_are_in_proportion_to_the_weights_and_weight_0_never_comes():
    sampler = Weighted(ROWS, 1, 7, partial(by_column, name="weight"))
    counts = np.bincount([sampler.draw(r, 1)[0]["n"] for r in range(3000)], minlength=4)
    assert counts[0] == 0
    for count, p in zip(counts[1:], (1 / 6, 2 / 6, 3 / 6), strict=True):
        assert abs(count / 3000 - p) < 4 * math.sqrt(p * (1 - p) / 3000)


def test_a_rollout_gets_no_example_twice_while_there_are_enough():
    sampler = Weighted(ROWS, 2, 0, partial(by_column, name="weight"))
    first, later = sampler.draw(5, 2), sampler.draw(5, 2, first=2)
    assert sorted(row["n"] for row in first + later) == [1, 2, 3] and sampler.draw(5, 2) == first
    assert sampler.draw(5, 2, first=3) == []
    others = [Weighted(ROWS, 2, seed, sampler.weight) for seed in range(1, 9)]
    assert any(other.draw(5, 2) != first for other in others)
    sampler.draw(5, 2), sampler.draw(5, 2, first=2)
    sampler.observe(results((1, [1.0]), (2, [1.0]), (3, [1.0])))
    assert {*sampler.latest} == {1, 2, 3}  # those of both draws
    assert len(sampler.draw(5, 7)) == 7  # a rollout's first ones come again if there are too few


def test_what_was_observed_decides_and_a_resumed_sampler_draws_the_same():
    sampler = Weighted(ROWS, 4, 0, partial(pools, thresholds=[0.99], weights=[1.0, 0.0]))
    sampler.draw(0, 4)
    sampler.observe(results((0, [1.0, 1.0]), (1, [1.0, 0.0]), (2, [math.nan]), (3, [math.nan, 1.0])))
    assert sampler.latest == {0: (1.0, 1.0), 1: (0.5, 0.5), 3: (1.0, 1.0)}
    assert sampler.weights().tolist() == [0, 1, 1, 0]
    assert sampler.progress(1) == {"data/prompts": 4.0, "data/asked": 0.75, "data/drawable": 0.5}
    again = Weighted(ROWS, 4, 0, sampler.weight)
    again.load_state_dict(sampler.state_dict())
    assert [again.draw(r, 2) for r in range(5)] == [sampler.draw(r, 2) for r in range(5)]
    sampler.observe(results((1, [1.0])))
    sampler.draw(1, 2)
    sampler.observe(results((2, [1.0])))
    with pytest.raises(RolloutError, match="all examples have weight 0"):
        sampler.draw(2, 2)


def test_progress_is_that_of_the_rollout_that_is_played():
    sampler = Weighted(ROWS, 2, 0, lambda history: np.full(4, history.progress.share))
    set_progress(1, 2)
    try:
        assert sampler.weights().tolist() == [0.5] * 4
    finally:
        set_progress(0, 1)
