"""The surrogates of papers, and KPop, on tokens worked out by hand."""

import math

import pytest
import torch
from torch import tensor

from grpo.extras.losses.surrogates import bernoulli_kl, dppo, gmpo, kl_cov, kpop, topr, vespo

close = torch.testing.assert_close


def at_token(function, policy: float, rollout: float, advantage: float, **settings) -> tuple[float, float, set[str]]:
    """Return the loss of a token whose probability was `rollout` and is `policy`, its gradient by the log-probability, and the
    metrics that are not 0."""
    logprobs, before = tensor([[math.log(policy)]], requires_grad=True), tensor([[math.log(rollout)]])
    given = {"ratio": (logprobs - before).exp(), "logprobs": logprobs, "advantages": tensor([[advantage]])}
    given |= {"rollout_logprobs": before} if function is dppo else {}
    result = function(**given, **settings)
    loss, logged = result if isinstance(result, tuple) else (result, {})
    loss.sum().backward()
    return loss.item(), logprobs.grad.item(), {name for name, values in logged.items() if values.any()}


@pytest.mark.parametrize(
    ("rollout", "policy", "advantage", "loss", "said"),
    [
        (0.01, 0.05, 1.0, -5.0, set()),  # five times as likely, but only by 0.04
        (0.5, 0.75, 1.0, 0.0, {"clip_fraction_high"}),  # half as likely again, by 0.25
        (0.5, 0.75, -1.0, 1.5, set()),  # which is no reason to leave it likely
        (0.5, 0.25, -1.0, 0.0, {"clip_fraction_low"}),
        (0.5, 0.25, 1.0, -0.5, set()),
    ],
)
def test_dppo_bounds_the_change_of_a_probability(rollout, policy, advantage, loss, said):
    for settings in ({}, {"divergence": "kl", "delta": 0.05}):  # the KLs are 0.0247 and 0.1438
        got = at_token(dppo, policy, rollout, advantage, **settings)
        assert got[:2] == pytest.approx((loss, loss)) and got[2] == said
    # KL(rollout, policy) is 0.0247 for the first, and 0.0415 the other way round
    assert at_token(dppo, 0.05, 0.01, 1.0, divergence="kl", delta=0.03)[0] == pytest.approx(-5.0)


def test_the_kl_of_two_coins():
    # 0.01 ln(1/5) + 0.99 ln(99/95); 0.5 ln(2/3) + 0.5 ln 2
    got = bernoulli_kl(tensor([0.01, 0.5, 0.5]).log(), tensor([0.05, 0.75, 0.5]).log())
    close(got, tensor([0.0247, 0.1438, 0.0]), atol=1e-4, rtol=0)
    certain = tensor([0.0, -1e-9, -30.0])  # probabilities of 1, nearly 1 and nearly 0
    assert bernoulli_kl(certain[:, None], certain).isfinite().all()


def test_topr_lets_wrong_answers_fade():
    assert at_token(topr, 0.2, 0.4, 2.0)[:2] == pytest.approx((-2 * math.log(0.2), -2.0))  # whatever the ratio
    assert at_token(topr, 0.2, 0.4, -2.0)[:2] == pytest.approx((2 * 0.5 * math.log(0.2), 1.0))
    assert at_token(topr, 0.4, 0.2, -2.0)[:2] == pytest.approx((2 * math.log(0.4), 2.0))


@pytest.mark.parametrize(
    ("moved", "advantage", "factor"),
    [
        ((0.0, 0.0), 1.0, 1.0),
        ((-0.4, 0.4 - math.log(2)), 1.0, 1.1204),  # W = 1/2: (1/2)^2 e^(3/2)
        ((0.0, math.log(2)), -1.0, 1.0827),  # W = 2: 2^3 e^-2
        ((60.0, 60.0), 1.0, 0.0),  # far away
        ((-60.0, -60.0), -1.0, 0.0),
    ],
)
def test_vespo_weighs_a_row_by_its_own_ratio(moved, advantage, factor):
    logprobs = tensor([[-1.0, -3.0, -5.0]], requires_grad=True)
    rollout = logprobs.detach() - tensor([[*moved, 9.0]])  # the last is padding
    mask = tensor([[True, True, False]])
    loss, logged = vespo(logprobs, rollout, torch.full((1, 3), advantage), mask)
    close(logged["factor"], torch.full((1, 3), factor), atol=1e-4, rtol=0)
    close(loss[:, :2], factor * advantage * tensor([[1.0, 3.0]]), atol=1e-3, rtol=0)
    close(torch.autograd.grad(loss[:, :2].sum(), logprobs)[0], -factor * advantage * mask, atol=1e-4, rtol=0)


def test_vespo_without_its_brake_is_bounded():
    """W^k with lambda 0: of W = e^60 it would be e^600."""
    loss, logged = vespo(tensor([[-1.0]]), tensor([[-61.0]]), torch.ones(1, 1), tensor([[True]]), 10.0, 0.0)
    close(logged["factor"], tensor([[math.exp(20)]]))
    close(loss, logged["factor"])


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    log_ratio, mask = tensor([[0.6, -0.2, 7.0]]), tensor([[True, True, False]])
    close(gmpo(log_ratio, torch.ones(1, 3), mask), torch.full((1, 3), -math.exp(0.1)))  # (0.4 - 0.2) / 2
    close(gmpo(log_ratio, -torch.ones(1, 3), mask), torch.full((1, 3), math.exp(0.2)))  # not bounded above if A < 0
    close(gmpo(-log_ratio, -torch.ones(1, 3), mask), torch.full((1, 3), math.exp(-0.1)))
    close(gmpo(log_ratio, torch.ones(1, 3), mask, low=0.1, high=0.5), torch.full((1, 3), -math.exp(0.15)))


def test_kl_cov_holds_the_tokens_that_do_not_count():
    log_ratio = tensor([[0.2, -0.2, -0.2]], requires_grad=True)
    got = kl_cov(log_ratio.exp(), log_ratio, torch.ones(1, 3), tensor([[True, True, False]]), coef=0.5)
    close(got, tensor([[-math.exp(0.2), -math.exp(-0.2), -math.exp(-0.2) + 0.1]]))
    expected = tensor([[-math.exp(0.2), -math.exp(-0.2), -math.exp(-0.2) - 0.5]])
    close(torch.autograd.grad(got.sum(), log_ratio)[0], expected)


def test_kpop_leaves_out_tokens_on_which_the_engine_disagrees():
    # 0.8 ln 9 = 1.758, 0.9 ln 19 = 2.650, in both directions
    trainer, engine = tensor([0.9, 0.1, 0.95, 0.05, 0.3]).log(), tensor([0.1, 0.9, 0.05, 0.95, 0.3]).log()
    close(kpop(trainer - engine, trainer, engine, delta=2.0), tensor([9.0, 1 / 9, 0.0, 0.0, 1.0]))  # else w, as IcePop
    close(kpop(trainer - engine, trainer, engine, delta=1.7), tensor([0.0, 0.0, 0.0, 0.0, 1.0]))
    # 0.5 ln 500 + 0.5 ln(500 / 999) = 2.761 in one direction, and 0.687 in the other
    trainer, engine = tensor([0.5, 0.001]).log(), tensor([0.001, 0.5]).log()
    assert kpop(trainer - engine, trainer, engine, delta=2.0).tolist() == [0, 0]
    # the paper's 0.1: KLs of 0.087 and 0.082, and of 0.108 and 0.102; a rare token may move by a larger ratio
    trainer, engine = tensor([0.5, 0.5, 0.01]).log(), tensor([0.3, 0.28, 0.002]).log()
    close(kpop(trainer - engine, trainer, engine), tensor([5 / 3, 0.0, 5.0]))
