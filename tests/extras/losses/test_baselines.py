"""The advantages of papers against numbers worked by hand."""

import math

import torch
from torch import tensor

from grpo.extras.losses.baselines import alp, best_only, gdpo, gpg, length_penalty, length_weighted, max_rl
from grpo.extras.losses.turns import remax, turn_returns
from grpo.objectives.advantage import group_advantages, has_signal, leave_one_out, whiten

NAN = math.nan
close = torch.testing.assert_close


def test_gpg_makes_up_for_groups_that_teach_nothing():
    # one of two groups teaches: (1/2, -1/2) x 2 / 1
    close(gpg(tensor([[1.0, 0], [1.0, 1]])), tensor([[1.0, -1], [0, 0]]))
    close(gpg(tensor([[1.0, 0], [1.0, 0]])), tensor([[0.5, -0.5], [0.5, -0.5]]))
    assert not gpg(tensor([[1.0, 1], [0.0, 0]])).any()


def test_pass_at_k_gives_the_best_sample_what_it_adds():
    rewards = tensor([[0.2, 1.0, 0.7], [1.0, 1.0, 0.0], [NAN, 0.5, 0.25], [NAN, 0.5, NAN], [0.0, 0.0, 0.0]])
    expected = tensor([[0.0, 0.3, 0.0], [0.0, 0.0, 0.0], [NAN, 0.25, 0.0], [NAN, 0.0, NAN], [0.0, 0.0, 0.0]])
    close(best_only(rewards), expected, equal_nan=True)


def test_alp_makes_length_dear_where_prompts_are_easy():
    right, lengths = tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]), tensor([[50.0, 100]]).expand(3, 2)
    # beta x solve rate x length: 0.05 and 0.1; half of it; and half of it again, since 1 / G is the least
    got = alp(right, lengths, {"correct": right}, beta=1e-3)
    close(got, tensor([[0.025, -0.025], [0.5 + 0.0125, -0.5 - 0.0125], [0.0125, -0.0125]]))


def test_a_length_penalty_grows_with_what_the_group_earns():
    right, lengths = tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]), tensor([[50.0, 100]]).expand(3, 2)
    # mean 1: penalties 0.125 and 0.25; mean 1/2: half of them; mean 0: none
    got = length_penalty(right, lengths, right[..., None])
    close(got, tensor([[0.0625, -0.0625], [0.53125, -0.53125], [0.0, 0.0]]))
    turns = tensor([[0.0, 1.0], [1.0, NAN]]).expand(3, 2, 2)  # two turns and one: 0.1 and 0.05 more
    close(length_penalty(right, lengths, turns)[0], tensor([0.0375, -0.0375]))
    unknown = length_penalty(tensor([[1.0, 1.0, NAN]]), tensor([[50.0, 100, 900]]), tensor([[[0.0]] * 3]))
    close(unknown, tensor([[0.0625, -0.0625, NAN]]), equal_nan=True)  # its length is no one's measure


def test_no_penalty_of_length_is_a_bonus_where_wrong_answers_cost_one():
    r, lengths = tensor([[1.0, -1.0], [-1.0, -1.0], [NAN, -1.0], [-2.0, -1.0]]), tensor([[50.0, 100]]).expand(4, 2)
    # earned: (2, 0), mean 1: shaped 0.875 and -1.25; all wrong: (0, 0); (0, 1), mean 1/2: shaped -2.0625 and -1.125
    expected = tensor([[1.0625, -1.0625], [0.0, 0.0], [NAN, 0.0], [-0.46875, 0.46875]])
    close(length_penalty(r, lengths, r[..., None]), expected, equal_nan=True)
    # half are right, or 1/G: 0.5 x 1e-3 x length
    got = alp(r, lengths, {"correct": (r > 0).float()}, beta=1e-3)
    close(got, tensor([[1.0125, -1.0125], [0.0125, -0.0125], [NAN, 0.0], [-0.4875, 0.4875]]), equal_nan=True)


def test_equal_but_for_rounding_teaches_exactly_nothing():
    for size in (1e-3, 1.0, 900.0, -5.0):
        rewards, lengths = size * tensor([[1.0, 1.0 + 5e-7, 1.0 - 4e-7, 1.0]]), torch.full((1, 4), 9.0)
        steps, parts = rewards[..., None], {"correct": rewards, "greedy": rewards.flip(1)}
        found = [
            group_advantages(rewards, "group", 0, 1e-8), group_advantages(rewards, "batch", eps=0.0), leave_one_out(rewards),
            gpg(rewards), best_only(rewards), length_weighted(rewards, lengths), gdpo(parts, {"correct": 1.0}, eps=1e-8),
            length_penalty(rewards, lengths, steps), alp(rewards, lengths, parts), turn_returns(rewards, steps),
            remax(rewards, parts), whiten(rewards, torch.ones(1, 4, dtype=torch.bool)), max_rl(rewards.abs()),
        ]  # fmt: skip
        assert [place for place, one in enumerate(found) if one.any()] == []
        assert group_advantages(size * tensor([[1.0, 1.0 + 4e-6]]), eps=0.0).abs().min() > 0.5
    assert has_signal(tensor([[0.0, 1e-9], [-1e-9, 1e-9], [1.0, 1.0 + 5e-7], [5e5, 5e5 + 1], [0.0, 0.0]])).tolist() == [
        True, True, False, True, False,
    ]  # fmt: skip
