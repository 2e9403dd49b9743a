"""Generalized advantage estimation and the critic's loss, with numbers worked by hand."""

import pytest
import torch
from torch import nan, tensor

from grpo.extras.critic.gae import gae, value_loss, value_targets
from grpo.objectives.advantage import reward_to_go

V = tensor([[0.2, 0.4, 0.6]])
ALL = torch.ones(1, 3, dtype=torch.bool)
ONE, SAME = tensor([0]), torch.zeros(1, 3, dtype=torch.int64)
NO_STEPS = torch.full((1, 1, 1), nan)


def close(found, expected):
    torch.testing.assert_close(found, tensor(expected), atol=1e-6, rtol=0)


def test_a_reward_at_the_end():
    """d = (0 + .4 - .2, 0 + .6 - .4, 1 - .6) = (.2, .2, .4); A = (.2 + .5 x .4, .2 + .5 x .4, .4)."""
    given = tensor([[1.0]]), NO_STEPS, V, ALL, ONE, SAME
    close(gae(*given, lam=0.5), [[0.4, 0.4, 0.4]])
    close(value_targets(*given, lam=0.5), [[0.6, 0.8, 1.0]])
    close(value_targets(*given), [[1.0, 1.0, 1.0]])
    # gamma .5: d = (.5 x .4 - .2, .5 x .6 - .4, 1 - .6) = (0, -.1, .4), each A adds a quarter of the next
    close(gae(*given, gamma=0.5, lam=0.5), [[0.0, 0.0, 0.4]])
    close(value_targets(*given, gamma=0.5), [[0.25, 0.5, 1.0]])


def test_tokens_of_tools_and_further_rows_pass_values_through():
    """The three tokens stand in two rows, round a token of a tool, and behind a row of another sample."""
    values = tensor([[0.2, 9.0, 0.4], [0.5, 9.0, 9.0], [0.6, 9.0, 9.0]])
    mask = tensor([[1, 0, 1], [1, 0, 0], [1, 0, 0]]).bool()
    turn = tensor([[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    given = tensor([[1.0, 3.0]]), torch.full((1, 2, 2), nan), values, mask, tensor([0, 1, 0]), turn
    close(gae(*given, lam=0.5), [[0.4, 0.0, 0.4], [2.5, 0.0, 0.0], [0.4, 0.0, 0.0]])
    # the first turn earns 2 of 3, at its last token: r = (2, 0, 1); a turn that has no token earns at the end
    steps = tensor([[[2.0, 1.0, nan], [nan, nan, 3.0]]])
    found = gae(tensor([[3.0, 3.0]]), steps, *given[2:], lam=0.5)
    close(found, [[2.4, 0.0, 0.4], [2.5, 0.0, 0.0], [0.4, 0.0, 0.0]])


def test_lam_0_is_the_next_value_and_lam_1_the_sum_of_what_comes():
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.rand(4, 6, generator=generator), torch.rand(4, 6, generator=generator) > 0.3
    sample, turn = tensor([0, 0, 1, 2]), torch.zeros(4, 6, dtype=torch.int64)
    given = tensor([[1.0, -2.0, 0.5]]), torch.full((1, 3, 1), nan), values, mask, sample, turn
    whole = given[0].flatten()[sample][:, None].expand(4, 6)
    torch.testing.assert_close(gae(*given, lam=1.0), (whole - values) * mask)
    one = gae(*given, lam=0.0)
    to_go = reward_to_go(one, mask, sample)  # without discount the differences add up to R - V
    torch.testing.assert_close(to_go, (whole - values) * mask)


def test_lam_grows_with_the_length():
    """alpha .5: 4 tokens have lam 1 - 1/2, and 1 token 1 - 2, which is 0."""
    values, mask = tensor([[0.0, 0.1, 0.2, 0.4], [0.3, 0.0, 0.0, 0.0]]), tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    given = tensor([[1.0, 1.0]]), torch.full((1, 2, 1), nan), values, mask, tensor([0, 1])
    given = *given, torch.zeros(2, 4, dtype=torch.int64)
    # d = (.1, .1, .2, .6)
    close(gae(*given, alpha=0.5), [[0.275, 0.35, 0.5, 0.6], [0.7, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(gae(*given, alpha=0.5)[:1], gae(*given, lam=0.5)[:1])


def test_an_unknown_reward_and_an_empty_rollout():
    found = gae(tensor([[nan]]), NO_STEPS, V, ALL, ONE, SAME)
    assert found.isnan().all()
    assert not gae(tensor([[1.0]]), NO_STEPS, V, ~ALL, ONE, SAME).any()


@pytest.mark.parametrize(
    ("clip", "loss", "gradient"),
    [
        # V_old 0, R 1; V .2: (.8^2) / 2. V .9: clipped to .5, (.5^2) / 2 without a gradient. V -.9 is no gain: (1.9^2) / 2
        (0.5, [0.32, 0.125, 1.805], [-0.8, 0.0, -1.9]),
        (None, [0.32, 0.005, 1.805], [-0.8, -0.1, -1.9]),
    ],
)
def test_the_loss_does_not_pay_for_large_steps(clip, loss, gradient):
    values = tensor([[0.2, 0.9, -0.9]], requires_grad=True)
    found = value_loss(values, torch.zeros(1, 3), torch.ones(1, 3), clip)
    close(found.detach(), [loss])
    close(torch.autograd.grad(found.sum(), values)[0], [gradient])


def test_turns_are_in_order_whatever_rows_they_are_in():
    """The second turn began anew, in a row of its own, and the third went on from the first."""
    mask = tensor([[1, 1], [1, 0]]).bool()
    values, turn = tensor([[0.2, 0.6], [0.4, 0.0]]), tensor([[0, 2], [1, -1]])
    found = gae(tensor([[1.0]]), tensor([[[0.0, 0.0, 1.0]]]), values, mask, tensor([0, 0]), turn, lam=0.5)
    close(found, [[0.4, 0.4], [0.4, 0.0]])
