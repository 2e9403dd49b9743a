"""Bounds on the distance from the policy that sampled, on tokens worked out by hand, beside their neighbours."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import preset
from torch import Tensor, tensor

from grpo.extras.losses.importance import geometric, low_error
from grpo.extras.losses.regions import effective_share, icepop, ipo, p3o, squared_residual, up
from grpo.extras.losses.surrogates import cispo, dppo
from grpo.objectives.loss import clip
from grpo.objectives.trial import even_batch

close = torch.testing.assert_close


def at_token(function, rollout: float, policy: float, advantage: float, **settings) -> tuple[float, float, set[str]]:
    """Return the loss of a token whose probability was `rollout` and is `policy`, its gradient by the log-probability, and the
    metrics that are not 0."""
    logprobs, before = tensor([[math.log(policy)]], requires_grad=True), tensor([[math.log(rollout)]])
    given = {"ratio": (logprobs - before).exp(), "logprobs": logprobs, "rollout_logprobs": before}
    if function in (up, clip):
        del given["rollout_logprobs"]
    if function is clip:
        del given["logprobs"]
    loss, logged = function(**given, advantages=tensor([[advantage]]), **settings)
    loss.sum().backward()
    return loss.item(), logprobs.grad.item(), {name for name, values in logged.items() if values.any()}


# rollout, policy, A: -r A where ipo, icepop and dppo (at ipo's 0.3) keep the token, else 0
MOVES = [
    (0.5, 0.9, 1.0, 0.0, -1.8, 0.0),  # up by 0.4, ratio 1.8
    (0.5, 0.9, -1.0, 0.0, 1.8, 1.8),  # against its advantage: dppo alone keeps it, of the two
    (0.9, 0.5, 1.0, 0.0, -5 / 9, -5 / 9),
    (0.9, 0.5, -1.0, 0.0, 5 / 9, 0.0),
    (0.01, 0.06, 1.0, -6.0, 0.0, -6.0),  # up by 0.05, ratio 6
    (0.06, 0.01, -1.0, 1 / 6, 0.0, 1 / 6),
    (0.5, 0.75, 1.0, -1.5, -1.5, -1.5),
    (0.01, 0.04, -1.0, 4.0, 4.0, 4.0),  # ratio 4
]


@pytest.mark.parametrize(("rollout", "policy", "advantage", "by_ipo", "by_icepop", "by_dppo"), MOVES)
def test_what_is_kept_by_difference_by_ratio_and_by_direction(rollout, policy, advantage, by_ipo, by_icepop, by_dppo):
    side = {"clip_fraction_high" if policy > rollout else "clip_fraction_low"}
    found = [(ipo, {}, by_ipo), (icepop, {}, by_icepop), (dppo, {"delta": 0.3}, by_dppo)]
    for function, settings, expected in found:
        loss, gradient, said = at_token(function, rollout, policy, advantage, **settings)
        assert (loss, gradient) == pytest.approx((expected, expected), rel=1e-5), function.__name__
        assert said == (set() if expected else side), function.__name__


def test_bounds_are_those_that_are_set():
    assert at_token(ipo, 0.5, 0.75, 1.0, eps=0.2)[0] == 0
    assert at_token(icepop, 0.2, 0.09, 1.0, low=0.5)[0] == at_token(icepop, 0.2, 0.5, 1.0, high=2.0)[0] == 0
    assert at_token(icepop, 0.2, 0.11, 1.0, low=0.5)[0] == pytest.approx(-0.55)


@pytest.mark.parametrize("name", ["ipo", "icepop", "p3o", "kimi_k15"])
@pytest.mark.parametrize("moved", [-300.0, 300.0])
def test_a_token_infinitely_far_away_gives_no_nan(name, moved):
    """Its ratio is cut to e^20, but mu itself is not: log pi - log mu is -300 or 300, in a surrogate that compares them."""
    algorithm = preset(f"algo={name}")
    logprobs = tensor([[-1.0, min(0.0, moved)]], requires_grad=True)
    rollout = tensor([[-1.0, min(0.0, -moved)]])
    fields = {"rollout_logprobs": rollout, "old_logprobs": rollout, "advantages": torch.ones(1, 2)}
    loss, _ = algorithm.loss(logprobs, torch.zeros(1, 2), replace(even_batch(1, 2, 0.0), **fields))
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert loss.isfinite() and gradient.isfinite().all()
    assert name not in ("ipo", "icepop") or gradient[0].tolist() == [-1.0, 0.0]


def test_up_learns_right_answers_without_a_bound():
    for rollout, policy in ((0.1, 0.9), (0.9, 0.1), (0.3, 0.3)):  # whatever the old policy
        assert at_token(up, rollout, policy, 2.0) == (-2.0, -2.0, set())
    assert at_token(clip, 0.1, 0.9, 2.0)[:2] == pytest.approx((-2.4, 0.0))  # where PPO has stopped
    assert at_token(up, 0.8, 0.4, -1.0)[:2] == pytest.approx((0.8, 0.0))  # wrong ones as in PPO
    assert at_token(up, 0.1, 0.2, -1.0)[:2] == pytest.approx((2.0, 2.0))
    assert at_token(up, 0.1, 0.4, -1.0)[:2] == pytest.approx((3.0, 0.0))  # with the dual bound
    assert at_token(up, 0.1, 0.4, -1.0, dual=None)[:2] == pytest.approx((4.0, 4.0))
    assert at_token(up, 0.8, 0.6, -1.0, low=0.1)[:2] == pytest.approx((0.9, 0.0))


def test_the_effective_share_of_a_row():
    weights = tensor([[1.0, 1.0, 1.0, 9.0], [3.0, 1.0, 9.0, 9.0], [1e9, 1e-9, 1e-9, 1e-9], [9.0, 9.0, 9.0, 9.0]])
    mask = tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    # 16 / (2 x 10), a fourth, an empty row
    close(effective_share(weights, mask), tensor([[1.0], [0.8], [0.25], [1.0]]))


def moved_row(*log_ratios: float) -> dict[str, Tensor]:
    """Return the arguments of a surrogate for a row of log-probabilities -1 that moved, and a token of padding."""
    old = torch.full((1, len(log_ratios) + 1), -1.0)
    logprobs = (old + tensor([[*log_ratios, 5.0]])).requires_grad_()
    mask = torch.ones_like(old).bool()
    mask[0, -1] = False
    log_ratio = (logprobs - old) * mask
    given = {"ratio": log_ratio.exp(), "log_ratio": log_ratio, "logprobs": logprobs, "old_logprobs": old, "mask": mask}
    return given | {"advantages": torch.ones_like(old)}


def test_p3o_bounds_the_weight_by_the_effective_share():
    """Ratios 3 and 1: the share is 0.8, and so are both weights; 0.2 of the KL's gradient 1 - 1/r pulls back."""
    row = moved_row(math.log(3.0), 0.0)
    del row["log_ratio"]
    loss, logged = p3o(**row)
    close(logged["effective_share"], torch.full((1, 3), 0.8))
    log3 = math.log(3.0)
    # -0.8 log pi + 0.2 (1/3 - 1 + log 3); k3 of the second is 0
    close(loss[0, :2], tensor([-0.8 * (log3 - 1) + 0.2 * (log3 - 2 / 3), 0.8]))
    close(torch.autograd.grad(loss[0, :2].sum(), row["logprobs"])[0], tensor([[-0.8 + 0.2 * 2 / 3, -0.8, 0.0]]))


def test_p3o_is_the_policy_gradient_where_ratios_are_equal_and_cispo_bounds_by_a_number():
    row = moved_row(-0.5, -0.5, -0.5)
    del row["log_ratio"]
    weight = math.exp(-0.5)
    for loss, _ in (p3o(**row), cispo(row["ratio"], row["logprobs"], row["advantages"])):
        close(
            torch.autograd.grad(loss[0, :3].sum(), row["logprobs"], retain_graph=True)[0][0, :3],
            -weight * torch.ones(3),
        )
    above = moved_row(0.5, 0.5)
    del above["log_ratio"]
    assert p3o(**above)[0][0, 0].item() == pytest.approx(0.5)  # -1 x log pi: a weight is at most 1
    assert cispo(above["ratio"], above["logprobs"], above["advantages"])[0][0, 0].item() == pytest.approx(
        0.5 * math.e**0.5
    )


def test_the_squared_residual_prices_distance():
    """A = 1 and a row whose log-ratios add up to 0.3, with tau 2: (1 - 0.6)^2 / (2 x 2 x 2), gradient -(1 - 0.6) / 2."""
    row = moved_row(0.5, -0.2)
    given = [row[name] for name in ("log_ratio", "advantages", "mask")]
    loss = squared_residual(*given, tau=2.0)
    close(loss[0, :2], torch.full((2,), 0.02))
    close(torch.autograd.grad(loss[0, :2].sum(), row["logprobs"])[0], tensor([[-0.4, -0.4, 0.0]]))
    far = moved_row(0.5, 0.5)  # tau S = 2 is more than A: a right answer is pulled back
    loss = squared_residual(far["log_ratio"], far["advantages"], far["mask"], tau=2.0)
    close(torch.autograd.grad(loss[0, :2].sum(), far["logprobs"])[0], tensor([[1.0, 1.0, 0.0]]))


def test_kimi_k15_sums_over_the_answer_and_pmd_mean_divides_by_its_length():
    """Answers of 4 and 1 tokens with A = 1 and no distance yet: -A log pi over 2 answers, or over their lengths, too."""
    batch = replace(
        even_batch(2, 4, -1.0), mask=tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool(), advantages=torch.ones(2, 4)
    )
    for name, gradient in (("kimi_k15", [-0.5, -0.5]), ("pmd_mean", [-0.125, -0.5])):
        algorithm = preset(f"algo={name}")
        logprobs = torch.full((2, 4), -1.0, requires_grad=True)
        loss, _ = algorithm.loss(logprobs, torch.zeros(2, 4), replace(batch, weights=algorithm.weights(batch.mask)))
        assert torch.autograd.grad(loss, logprobs)[0][:, 0].tolist() == pytest.approx(gradient)
    rewards = tensor([[1.0, 0.0, 0.0, 0.0]])
    found = {name: preset(f"algo={name}").advantage(rewards)[0, 0].item() for name in ("kimi_k15", "pmd_mean")}
    assert found == {"kimi_k15": 0.75, "pmd_mean": 1.0}


def test_a_row_is_left_out_by_its_mean_error_where_the_geometric_mean_sees_none():
    log_w = tensor(
        [[1.0, -1.0, 9.0], [math.log(3.0), 0.0, 9.0], [math.log(2.9), 0.0, 9.0], [0.0, -math.inf, 9.0], [9.0] * 3]
    )
    mask = tensor([[1, 1, 0]] * 4 + [[0, 0, 0]]).bool()
    # means of exp |log w|: e; (3 + 1) / 2; 1.95; infinite; an empty row
    close(low_error(log_w, mask), tensor([[0.0] * 3, [1.0] * 3, [1.0] * 3, [0.0] * 3, [1.0] * 3]))
    assert low_error(log_w, mask, most=1.96).sum(1).tolist() == [0, 0, 3, 0, 3]
    kept = geometric(log_w[:2] * mask[:2], mask[:2], cap=9.0)
    close(kept[:, :2], tensor([[math.e, 1 / math.e], [0.0, 0.0]]))  # it keeps the first, whose differences cancel
