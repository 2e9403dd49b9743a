"""The part of a GPU that a run leaves for vLLM, in GB worked by hand. vLLM computes with 2 GB beside its weights and cache."""

import pytest

from grpo.engines.room import Room

GB = 10**9


@pytest.mark.parametrize(
    ("total", "usable", "update", "rollout", "weights", "sequence", "cache", "share", "sleeps"),
    [
        (80, 80, 30, 20, 3, 0.1, 4, 9, False),  # 3 + 2 + 4 are all that it can use
        (80, 80, 60, 20, 3, 0.1, 40, 20, False),  # what the update leaves, in which 32 sequences of 0.1 fit
        (24, 24, 20, 14, 3, 0.1, 40, 10, True),  # the update leaves 4, and 32 sequences need 8.2
        (24, 24, 20, 14, 3, 0.1, 0.5, 5.5, True),  # a small rollout needs 5.5, and the update leaves 4
        (100, 100, 5, 3, 60, 0.1, 40, 90, False),  # never more than nine tenths
        (100, 80, 5, 3, 60, 0.1, 40, 75, False),  # of what is free
        (80, 76, 60, 20, 3, 0.1, 40, 16, False),  # the same with 4 that a display and the slack take
        (80, 68, 60, 30, 3, 0.1, 40, 38, True),  # 8 are left, in which 32 sequences do not fit: it sleeps
        (16, 16, 20, 18, 3, 0.1, 4, 0, True),  # nothing is left
    ],
)
def test_vllm_takes_what_an_update_leaves_or_sleeps(
    total, usable, update, rollout, weights, sequence, cache, share, sleeps
):
    room = Room(*(round(size * GB) for size in (total, usable, update, rollout, weights, sequence, cache)))
    assert room.share(None) == (pytest.approx(share / total), sleeps)


def test_the_user_and_a_rollout_ahead_decide_about_sleep():
    room = Room(24 * GB, 24 * GB, 20 * GB, 14 * GB, 3 * GB, GB // 10, 40 * GB)
    assert room.share(False) == (pytest.approx(4 / 24), False)
    roomy = Room(80 * GB, 80 * GB, 30 * GB, 20 * GB, 3 * GB, GB // 10, 4 * GB)
    assert roomy.share(True) == (pytest.approx(9 / 80), True)
    ahead = Room(24 * GB, 24 * GB, 20 * GB, 14 * GB, 3 * GB, GB // 10, 40 * GB, may_sleep=False)
    assert ahead.share(None) == (pytest.approx(4 / 24), False)


def test_too_little_for_the_weights_and_one_sequence():
    room = Room(24 * GB, 24 * GB, 20 * GB, 14 * GB, 3 * GB, GB // 10, 40 * GB)
    assert room.lacks(4.0 / 24) and not room.lacks(4.2 / 24)  # 3 of weights, 1 to compute with, 0.1 for the sequence
