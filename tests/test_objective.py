"""Advantages, KL and losses against numbers worked by hand."""

import math

import pytest
import torch
from torch import tensor

from grpo.advantage import group_advantages
from grpo.errors import UserError
from grpo.kl import k3
from grpo.loss import PolicyLoss, clipped_surrogate, token_weights
from grpo.tokens import TokenBatch

NAN = math.nan


def test_grpo_advantage():
    # mean 0.5, squares 4 x 0.25, over G-1 = 3: std 0.57735
    got = group_advantages(tensor([[1.0, 0, 0, 1]]), eps=0.0)
    torch.testing.assert_close(got, tensor([[0.5, -0.5, -0.5, 0.5]]) / math.sqrt(1 / 3))
    torch.testing.assert_close(
        group_advantages(tensor([[1.0, 0, 0, 1]]), eps=0.1), got * (1 / 3) ** 0.5 / ((1 / 3) ** 0.5 + 0.1)
    )


def test_dr_grpo_advantage_is_the_centred_reward():
    torch.testing.assert_close(group_advantages(tensor([[3.0, 0, 0]]), scale_by_std=False), tensor([[2.0, -1, -1]]))


def test_equal_rewards_teach_exactly_nothing():
    rewards = torch.full((1, 7), 0.1)  # whose mean in float32 is not 0.1
    assert (rewards - rewards.mean()).abs().max() > 0
    assert torch.equal(group_advantages(rewards), torch.zeros(1, 7))


def test_a_reward_nobody_could_give_stays_out_of_the_baseline():
    got = group_advantages(tensor([[1.0, NAN, 0, 0.5]]), scale_by_std=False)
    torch.testing.assert_close(got, tensor([[0.5, NAN, -0.5, 0.0]]), equal_nan=True)
    # the two that are left: mean 0.5, std sqrt(0.5)
    got = group_advantages(tensor([[1.0, NAN, 0]]), eps=0.0)
    torch.testing.assert_close(got, tensor([[0.5, NAN, -0.5]]) / math.sqrt(0.5), equal_nan=True)
    assert group_advantages(tensor([[NAN, NAN]])).isnan().all()
    torch.testing.assert_close(group_advantages(tensor([[NAN, 0.1]])), tensor([[NAN, 0.0]]), equal_nan=True)


def test_k3():
    # the reference twice as likely: rho = 2, 2 - 1 - log 2
    got = k3(tensor([[0.0, -1.0]]), tensor([[math.log(2), -1.0]]))
    torch.testing.assert_close(got, tensor([[1 - math.log(2), 0.0]]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.5, 1.0, -1.28, 0.0),  # too likely already: bounded by clip_high
        (1.5, -1.0, 1.5, 1.5),  # too likely and bad: pushed back in full
        (0.5, -1.0, 0.8, 0.0),  # unlikely enough: bounded by clip_low
        (0.5, 1.0, -0.5, -0.5),
        (1.25, 2.0, -2.5, -2.5),
    ],
)
def test_clipped_surrogate(ratio, advantage, loss, gradient):
    logprobs = tensor([[math.log(ratio) - 2.0]], requires_grad=True)
    got, clipped = clipped_surrogate(logprobs, tensor([[-2.0]]), tensor([advantage]), clip_low=0.2, clip_high=0.28)
    got.sum().backward()
    torch.testing.assert_close((got.item(), logprobs.grad.item()), (loss, gradient))
    assert clipped.item() is (gradient == 0.0)


MASK = tensor([[True, True, True, True], [True, False, False, False]])


@pytest.mark.parametrize(
    ("reduce", "long", "short"),
    [("sequence", 1 / 8, 1 / 2), ("token", 1 / 5, 1 / 5), ("constant", 1 / 20, 1 / 20)],
)
def test_token_weights(reduce, long, short):
    expected = tensor([[long] * 4, [short, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(token_weights(MASK, reduce, max_tokens=10), expected)
    # a row that nothing is learned from counts nowhere
    with_empty = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)])
    torch.testing.assert_close(token_weights(with_empty, reduce, max_tokens=10)[:2], expected)


def test_policy_loss_adds_the_kl():
    batch = TokenBatch(
        ids=torch.zeros(1, 3, dtype=torch.int64),
        attention_mask=torch.ones(1, 3, dtype=torch.int64),
        mask=tensor([[True, True]]),
        rollout_logprobs=torch.zeros(1, 2),
        advantages=tensor([2.0]),
        old_logprobs=tensor([[-1.0, -1.0]]),
        reference_logprobs=tensor([[-1.0 + math.log(2), -1.0]]),
        weights=tensor([[0.5, 0.5]]),
    )
    loss, stats = PolicyLoss(max_tokens=2, kl_coef=0.1)(tensor([[-1.0, -1.0]], requires_grad=True), batch)
    # ratio 1, so -2; the KL is 1 - log 2 on the first token and 0 on the second
    torch.testing.assert_close(loss.item(), -2.0 + 0.1 * 0.5 * (1 - math.log(2)))
    assert stats["loss/clip_fraction"].sum() == 0
    torch.testing.assert_close(stats["loss/kl"].sum().item(), 1 - math.log(2))


@pytest.mark.parametrize("wrong", [{"reduce": "tokens"}, {"clip_low": 1.2}, {"clip_high": 0.0}, {"kl_coef": -1.0}])
def test_settings_without_meaning_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        PolicyLoss(max_tokens=1, **wrong)
