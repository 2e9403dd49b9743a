"""The advantages of papers against numbers worked by hand."""

import math

import torch
from torch import tensor

from grpo.objectives.baselines import alp, best_only, gpg, length_penalty

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
