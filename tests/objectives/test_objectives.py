"""The axes of an algorithm against numbers worked by hand."""

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import ROOT, preset
from torch import tensor

from grpo.apps.try_algorithm import advice, check_algorithm
from grpo.extras.losses import importance
from grpo.extras.losses.baselines import alp, best_only, gdpo, gpg, length_penalty, length_weighted, max_rl
from grpo.extras.losses.turns import remax
from grpo.objectives.advantage import group_advantages, has_signal, leave_one_out, no_baseline, reward_to_go, whiten
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.arguments import parameters
from grpo.objectives.batch import Scores
from grpo.objectives.entropy import EntropyBonus, EntropyController
from grpo.objectives.kl import k1, k2, k3
from grpo.objectives.loss import clip, off_policy_keep, policy_log_ratio, reinforce, token_weights
from grpo.objectives.shaping import overlong_penalty
from grpo.objectives.trial import even_batch
from grpo.system.errors import UserError
from grpo.training.meter import Means, note_loss

NAN = math.nan
LOG2 = math.log(2)
close = torch.testing.assert_close


# -- advantage


def test_grpo_advantage():
    # mean 0.5, squares 4 x 0.25, over G-1 = 3: std 0.57735
    got = group_advantages(tensor([[1.0, 0, 0, 1]]), eps=0.0)
    close(got, tensor([[0.5, -0.5, -0.5, 0.5]]) / math.sqrt(1 / 3))
    close(group_advantages(tensor([[1.0, 0, 0, 1]]), eps=0.1), got * (1 / 3) ** 0.5 / ((1 / 3) ** 0.5 + 0.1))
    # over G, as Atropos has it: std 0.5
    close(group_advantages(tensor([[1.0, 0, 0, 1]]), ddof=0, eps=0.0), tensor([[1.0, -1, -1, 1]]))


def test_dr_grpo_advantage_is_the_centred_reward():
    close(group_advantages(tensor([[3.0, 0, 0]]), scale="none"), tensor([[2.0, -1, -1]]))


def test_batch_std_is_over_all_groups():
    # all rewards 1 0 3 0: mean 1, squares 0 1 4 1, over 3: std sqrt(2)
    got = group_advantages(tensor([[1.0, 0], [3.0, 0]]), scale="batch", eps=0.0)
    close(got, tensor([[0.5, -0.5], [1.5, -1.5]]) / math.sqrt(2))


def test_leave_one_out():
    close(leave_one_out(tensor([[1.0, 0, 0, 1]])), tensor([[2 / 3, -2 / 3, -2 / 3, 2 / 3]]))
    rewards = torch.rand(3, 5)
    close(group_advantages(rewards, scale="none"), 4 / 5 * leave_one_out(rewards))  # Dr.GRPO = (G-1)/G RLOO


def test_length_weighted_baseline():
    # (1 x 30 + 0 x 10) / 40
    close(length_weighted(tensor([[1.0, 0]]), tensor([[30.0, 10]])), tensor([[0.25, -0.75]]))


def test_max_rl():
    close(max_rl(tensor([[1.0, 0, 0, 0], [1.0, 1, 1, 0]])), tensor([[3.0, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1]]))
    with pytest.raises(UserError, match="must not be negative"):
        max_rl(tensor([[-1.0, 1]]))


def test_gdpo_normalises_every_part():
    # correct: +-0.5 over std 1/sqrt(2); format in the other direction and in only one group
    parts = {"correct": tensor([[1.0, 0], [1.0, 0]]), "format": tensor([[0.0, 100], [7.0, 7]])}
    # sums: 1/sqrt(2) x (1 - 2, -1 + 2), then (1, -1); mean 0, squares 4 x 1/2 over 3
    got = gdpo(parts, {"correct": 1.0, "format": 2.0}, eps=0.0)
    close(got, tensor([[-1.0, 1], [1, -1]]) / math.sqrt(2) / math.sqrt(2 / 3))
    # where a part does not apply, the other counts alone: sums (1, -1) and (2, -2), squares 1 + 1 + 4 + 4 over 2 x 3
    parts["format"] = tensor([[NAN, NAN], [1.0, 0.0]])
    got = gdpo(parts, {"correct": 1.0, "format": 1.0}, eps=0.0)
    close(got, tensor([[1.0, -1], [2, -2]]) / math.sqrt(10 / 3))
    close(gdpo(parts, eps=0.0), got)
    with pytest.raises(UserError, match="no part 'style'; there are correct, format"):
        gdpo(parts, {"style": 1.0})


def test_the_weights_of_gdpo_are_those_that_are_given():
    made = preset("algo/advantage=gdpo", "algo.advantage.weights={correct: 1, unique_letters: 0.5}")
    assert made.advantage.keywords["weights"] == {"correct": 1, "unique_letters": 0.5}


BASELINES = [
    group_advantages,
    lambda rewards: group_advantages(rewards, scale="none"),
    lambda rewards: group_advantages(rewards, scale="batch"),
    leave_one_out,
    lambda rewards: length_weighted(rewards, tensor([[3.0, 5, 7, 11, 13, 17, 19]])),
    max_rl,
    gpg,
    best_only,
    lambda rewards: alp(rewards, torch.full_like(rewards, 7.0), {"correct": rewards}),
    lambda rewards: length_penalty(rewards, torch.full_like(rewards, 7.0), rewards[..., None]),
    lambda rewards: gdpo({"correct": rewards}, {"correct": 1.0}),
]


@pytest.mark.parametrize("advantage", BASELINES)
def test_equal_rewards_teach_exactly_nothing(advantage):
    rewards = torch.full((1, 7), 0.1)  # their mean in float32 is not 0.1
    assert (rewards - rewards.mean()).abs().max() > 0
    assert torch.equal(advantage(rewards), torch.zeros(1, 7))


@pytest.mark.parametrize("advantage", [*BASELINES[:4], *BASELINES[5:-1]])
def test_an_unknown_reward_is_as_if_the_sample_were_not_there(advantage):
    rewards = tensor([[1.0, NAN, 0, 0.5], [0.0, 1.0, NAN, NAN]])
    got = advantage(rewards)
    assert torch.equal(got.isnan(), rewards.isnan())
    close(got[0, [0, 2, 3]], advantage(tensor([[1.0, 0, 0.5], [0, 1, NAN]]))[0])


def test_a_reward_nobody_could_give_stays_out_of_the_baseline():
    close(group_advantages(tensor([[1.0, NAN, 0, 0.5]]), scale="none"), tensor([[0.5, NAN, -0.5, 0.0]]), equal_nan=True)
    # (30 x 1 + 10 x 0) / 40, the 20 tokens in between count nowhere
    got = length_weighted(tensor([[1.0, NAN, 0]]), tensor([[30.0, 20, 10]]))
    close(got, tensor([[0.25, NAN, -0.75]]), equal_nan=True)
    assert group_advantages(tensor([[NAN, NAN]])).isnan().all()
    close(group_advantages(tensor([[NAN, 0.1]])), tensor([[NAN, 0.0]]), equal_nan=True)


def test_which_groups_have_a_signal():
    assert has_signal(tensor([[1.0, 0], [1.0, 1], [NAN, 1], [NAN, NAN], [NAN, -1]])).tolist() == [True, *[False] * 4]


def test_eps_may_be_nothing():
    assert group_advantages(tensor([[0.3, 0.3], [1.0, 0.0]]), eps=0.0)[0].tolist() == [0.0, 0.0]


def test_no_baseline():
    assert no_baseline(tensor([[2.0], [0.0]])).tolist() == [[2.0], [0.0]]


def test_whitening_over_tokens():
    # three tokens of 1 and one of 5: mean 2, variance (1 + 1 + 1 + 9) / 4 = 3
    mask = tensor([[True, True, True], [True, False, False]])
    got = whiten(tensor([[1.0, 1, 1], [5, 0, 0]]), mask, eps=0.0)
    expected = tensor([[-1.0, -1, -1], [3, 0, 0]]) / math.sqrt(3)
    close(got, expected)
    other = iter(
        [[(1, tensor(5.0), tensor(5.0), tensor(5.0))], [tensor(9.0)]]
    )  # what another rank has of the second row
    got = whiten(torch.ones(1, 3), mask[:1], eps=0.0, concatenated=lambda own: own + next(other))
    close(got, expected[:1])


def test_reward_to_go_runs_on_through_the_turns_of_a_sample():
    values = tensor([[1.0, 2, 99], [4, 8, 16], [32, 99, 99]])
    mask = tensor([[True, True, False], [True, True, True], [True, False, False]])
    got = reward_to_go(values, mask, tensor([0, 1, 0]))  # the third row is the second turn of the first sample
    assert got.tolist() == [[35.0, 34, 0], [28, 24, 16], [32, 0, 0]]


def test_soft_punishment_of_overlong_answers():
    # L_max 100, L_c 20
    got = overlong_penalty(tensor([10.0, 80, 90, 95, 100]), max_tokens=100, share=0.2)
    close(got, tensor([0.0, 0, -0.5, -0.75, -1]))


# -- KL


def test_kl_estimators():
    # the target twice as likely: log rho = log 2
    policy, target = tensor([[0.0, -1.0]]), tensor([[LOG2, -1.0]])
    close(k1(policy, target), tensor([[-LOG2, 0.0]]))
    close(k2(policy, target), tensor([[LOG2**2 / 2, 0.0]]))
    close(k3(policy, target), tensor([[1 - LOG2, 0.0]]))


@pytest.mark.parametrize("gap", [20.5, 89.0, 500.0])
def test_k3_is_bounded_as_the_ratio_is(gap):
    """e^20 - 21 at most, without a gradient; e^89 is no number of float32. The other side grows as the log-ratio does."""
    policy = tensor([[-gap - 1, -1.0, -1.0]], requires_grad=True)
    estimate = k3(policy, tensor([[-1.0, -gap - 1, -19.0]]))
    close(estimate, tensor([[math.exp(20) - 21, gap - 1 + math.exp(-gap), 17.0]]))
    close(torch.autograd.grad(estimate.sum(), policy)[0], tensor([[0.0, 1.0, 1.0]]))


# -- level of the ratio

ROWS = tensor([[True, True, True], [True, False, False]])


@pytest.mark.parametrize(
    ("level", "value", "gradient"),
    [
        ("token", [[0.3, 0.6, 0.0], [0.5, 0, 0]], [[1, 1, 1], [1, 0, 0]]),
        ("sequence", [[0.3, 0.3, 0.3], [0.5, 0, 0]], [[1, 1, 1], [1, 0, 0]]),
        ("sequence_sum", [[0.9, 0.9, 0.9], [0.5, 0, 0]], [[3, 3, 3], [1, 0, 0]]),
        ("sequence_token", [[0.3, 0.3, 0.3], [0.5, 0, 0]], [[1, 1, 1], [1, 0, 0]]),
    ],
)
def test_levels_of_the_ratio(level, value, gradient):
    old = tensor([[-1.0, -2, -3], [-1, 7, 7]])
    logprobs = (old + tensor([[0.3, 0.6, 0.0], [0.5, 9, 9]])).requires_grad_()
    got = policy_log_ratio(logprobs, old, ROWS, level)
    close(got, tensor(value))
    close(torch.autograd.grad(got.sum(), logprobs)[0], tensor(gradient).float())
    if level == "sequence_token":  # the gradient of a token's ratio is its own: s_i
        first = policy_log_ratio(logprobs, old, ROWS, level).exp()[0, 0]
        close(torch.autograd.grad(first, logprobs)[0][0], tensor([math.exp(0.3), 0, 0]))
    if level == "sequence":
        first = policy_log_ratio(logprobs, old, ROWS, level).exp()[0, 0]
        close(torch.autograd.grad(first, logprobs)[0][0], torch.full((3,), math.exp(0.3) / 3))


def test_a_ratio_beyond_all_bounds_has_a_finite_gradient():
    logprobs = torch.zeros(1, 3, requires_grad=True)
    ratio = policy_log_ratio(logprobs, torch.full((1, 3), -90.0), tensor([[True] * 3]), "sequence_sum").exp()
    loss, _ = clip(ratio, torch.ones(1, 3))
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [[0.0, 0.0, 0.0]]


def test_a_log_ratio_beyond_20_is_counted_as_clipped():
    from grpo.extras.losses.surrogates import sapo

    batch = replace(even_batch(1, 3, -30.0), advantages=torch.ones(1, 3), mask=tensor([[True, True, False]]))
    logprobs = tensor([[-1.0, -55.0, -1.0]], requires_grad=True)  # log-ratios 29 and -25; padding has 0
    for surrogate in (partial(clip, low=None, high=None), partial(clip, high=30.0), sapo, reinforce):
        loss, logged = Algorithm(group_advantages, surrogate, 4).loss(logprobs, torch.zeros(1, 3), batch)
        note_loss(means := Means(), batch, logprobs.detach(), logged)
        metrics = means.result()
        assert metrics["loss/clip_fraction_high"] == metrics["loss/clip_fraction_low"] == 0.5  # one of two tokens
        if surrogate is not reinforce:  # which does not use the ratio
            assert not torch.autograd.grad(loss, logprobs)[0].any()


# -- surrogates


def surrogate(function, ratio: float, advantage: float, **settings):
    """Return the loss, its gradient with respect to the log-probability, and the metrics that are not 0, at one token."""
    from grpo.extras.losses.surrogates import cispo

    logprobs = tensor([[math.log(ratio) - 2.0]], requires_grad=True)
    given = {"ratio": (logprobs + 2.0).exp(), "advantages": tensor([[advantage]])}
    if function is cispo:
        given["logprobs"] = logprobs
    result = function(**given, **settings)
    loss, said = result if isinstance(result, tuple) else (result, {})
    loss.sum().backward()
    return loss.item(), logprobs.grad.item(), {name for name, values in said.items() if values.any()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "said"),
    [
        (1.0, 1.0, -1.0, -1.0, set()),
        (1.5, 1.0, -1.28, 0.0, {"clip_fraction_high"}),  # too likely already
        (1.5, -1.0, 1.5, 1.5, set()),  # too likely and bad: pushed back in full
        (4.0, -1.0, 3.0, 0.0, {"clip_fraction_high"}),  # but not by more than dual
        (0.5, -1.0, 0.8, 0.0, {"clip_fraction_low"}),  # unlikely enough
        (0.5, 1.0, -0.5, -0.5, set()),
        (1.25, 2.0, -2.5, -2.5, set()),
    ],
)
def test_clip(ratio, advantage, loss, gradient, said):
    got = surrogate(clip, ratio, advantage, low=0.2, high=0.28, dual=3.0)
    assert got[:2] == pytest.approx((loss, gradient)) and got[2] == said


def test_a_bound_that_is_not_there():
    assert surrogate(clip, 9.0, 1.0, high=None)[:2] == pytest.approx((-9.0, -9.0))
    assert surrogate(clip, 0.1, -1.0, low=None)[:2] == pytest.approx((0.1, 0.1))
    assert surrogate(clip, 0.1, -1.0, high=None)[:2] == pytest.approx((0.8, 0.0))
    assert surrogate(clip, 4.0, -1.0, dual=None)[:2] == pytest.approx((4.0, 4.0))


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (2.0, 2.0), (9.0, 5.0)])
def test_cispo_bounds_the_weight_and_keeps_the_gradient(ratio, weight):
    from grpo.extras.losses.surrogates import cispo

    loss, gradient, said = surrogate(cispo, ratio, -2.0, bound=5.0)
    assert loss == pytest.approx(2 * weight * (math.log(ratio) - 2.0))  # -weight x A x log pi
    assert gradient == pytest.approx(2 * weight) and said == ({"clip_fraction_high"} if ratio > 5 else set())


def test_sapo_is_ppo_at_one_and_fades_away_from_it():
    from grpo.extras.losses.surrogates import sapo

    # sigmoid(0) 4 / tau = 2 / tau; the gradient is sigmoid' 4 = 1 there, whatever tau
    assert surrogate(sapo, 1.0, 1.0)[:2] == pytest.approx((-2.0, -1.0))
    assert surrogate(sapo, 1.0, -1.0, tau_negative=1.05)[:2] == pytest.approx((2 / 1.05, 1.0))
    # at r = 2, tau = 1: sigmoid(1) = 0.731059, times 4; gradient 4 x 0.731059 x 0.268941 x r
    assert surrogate(sapo, 2.0, 1.0)[:2] == pytest.approx((-4 * 0.7310586, -4 * 0.7310586 * 0.2689414 * 2))


def test_reinforce():
    close(reinforce(tensor([[-0.5]]), tensor([[2.0]])), tensor([[1.0]]))


# -- reduction

MASK = tensor([[True, True, True, True], [True, False, False, False]])


@pytest.mark.parametrize(
    ("reduce", "long", "short"),
    [("sequence", 1 / 8, 1 / 2), ("token", 1 / 5, 1 / 5), ("constant", 1 / 20, 1 / 20), ("sum", 1 / 2, 1 / 2)],
)
def test_token_weights(reduce, long, short):
    expected = tensor([[long] * 4, [short, 0.0, 0.0, 0.0]])
    close(token_weights(MASK, reduce, max_tokens=10), expected)
    # another rank has one sample of five tokens
    shared = token_weights(MASK, reduce, max_tokens=10, total=lambda counts: counts + tensor([1.0, 5.0, 1.0]))
    close(shared, expected * (1 / 2 if reduce == "token" else 2 / 3))
    # a row from which nothing is learned counts nowhere but in the constant, which is 1 / (3 x 10) now, or as many as we say
    with_empty = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)])
    close(token_weights(with_empty, reduce, max_tokens=10)[:2], expected * (2 / 3 if reduce == "constant" else 1))
    close(token_weights(with_empty, "constant", max_tokens=10, count=5)[0], torch.full((4,), 1 / 50))


# -- correction: two rows, w = 2 and 1/4 on the first, 1 on the second and padding after it

LOG_W = tensor([[LOG2, -2 * LOG2], [0.0, 5.0]])
SEEN = tensor([[True, True], [True, False]])


@pytest.mark.parametrize(
    ("function", "settings", "first", "second"),
    [
        (importance.truncated, {"high": 1.5}, [1.5, 0.25], 1.0),
        (importance.truncated, {"level": "sequence", "high": 1.5}, [0.5, 0.5], 1.0),  # 2 x 1/4 = 1/2
        (importance.masked, {"level": "token", "low": 0.5, "high": 5.0}, [2.0, 0.0], 1.0),  # IcePop
        (importance.masked, {"low": 0.4, "high": 2.0}, [0.5, 0.5], 1.0),  # MIS
        (importance.masked, {"low": 0.6, "high": 2.0}, [0.0, 0.0], 1.0),
        (importance.geometric, {}, [0.0, 0.0], 1.0),  # exp(mean) = 1/sqrt(2)
        (importance.geometric, {"low": 0.7, "cap": 1.5}, [1.5, 0.25], 1.0),
    ],
)
def test_corrections(function, settings, first, second):
    got = function(LOG_W, SEEN, **settings)
    close(got[0], tensor(first))
    close(got[1, 0].item(), second)


def test_the_geometric_mean_is_over_the_row_and_not_over_its_padding():
    """Over two tokens the mean of log w is 0.016, and e^0.016 > 1.01; over all four places e^0.008 = 1.008 would be kept."""
    log_w, mask = tensor([[0.024, 0.008, 0.0, 0.0]]), tensor([[True, True, False, False]])
    assert importance.geometric(log_w, mask).tolist() == [[0.0] * 4]


def test_the_weight_of_a_row_is_truncated_as_one():
    close(importance.truncated(-LOG_W, SEEN, "sequence", 1.5)[0], tensor([1.5, 1.5]))  # 1/2 x 4 = 2


def test_rows_that_the_policy_has_left_are_dropped():
    # mean_t log(rollout / policy): 0.2 and 0.6
    rollout, logprobs = torch.zeros(2, 2), tensor([[-0.1, -0.3], [-0.6, 9.0]])
    for advantage, kept in ((1.0, [True, True]), (-1.0, [True, False])):
        got = off_policy_keep(logprobs, rollout, torch.full((2, 2), advantage), SEEN, delta=0.5)
        assert got[:, 0].tolist() == kept


# -- entropy


def test_a_steered_entropy_bonus():
    bonus = EntropyController(EntropyBonus(coef=0.01, target=0.5, step=0.004, most=0.012))
    assert bonus.alpha == 0.0  # no entropy is known yet
    bonus.update(0.4)
    assert bonus.coef == bonus.alpha == 0.012  # not above `most`
    bonus.update(0.5)
    assert bonus.coef == bonus.alpha == 0.012  # at the target counts as below it
    bonus.update(0.6)
    assert bonus.coef == pytest.approx(0.008) and bonus.alpha == 0.0
    bonus.update(None)  # the last entropy counts again
    bonus.update(0.7)
    assert bonus.coef == 0.0 and bonus.entropy == 0.7
    fixed = EntropyController(EntropyBonus(coef=0.01))
    assert fixed.alpha == 0.01
    fixed.update(9.0)
    assert fixed.alpha == fixed.coef == 0.01


def test_an_entropy_controller_goes_on_from_its_state():
    bonus, other = (EntropyController(EntropyBonus(coef=0.01, target=0.5, step=0.004)) for _ in range(2))
    bonus.update(0.4)
    assert bonus.state_dict() == {
        "entropy_coef": pytest.approx(0.014), "last_entropy": 0.4, "first_entropy_coef": 0.01,
    }  # fmt: skip
    other.load_state_dict({"updates": 3, **bonus.state_dict()})  # checkpoints keep it beside the count of updates
    assert other.alpha == bonus.alpha > 0.01


@pytest.mark.parametrize(
    ("then", "now", "alpha"),
    [
        ({"coef": 0.01}, {"coef": 0.02}, 0.02),  # a fixed coefficient is a setting
        ({"coef": 0.01, "target": 0.5}, {"coef": 0.01}, 0.01),  # it no longer moves
        ({"coef": 0.01, "target": 0.5}, {"coef": 0.02, "target": 0.5}, 0.02),  # it begins anew
        ({"coef": 0.01, "target": 0.5}, {"coef": 0.01, "target": 0.6}, 0.015),  # what it has learned
        ({"coef": 0.01, "target": 0.5}, {"coef": 0.01, "target": 0.5, "most": 0.012}, 0.012),
    ],
)
def test_a_resumed_coefficient_is_learned_or_set(then, now, alpha):
    """After one update with the entropy 0.4, an adaptive coefficient of 0.01 is 0.015."""
    before, after = EntropyController(EntropyBonus(**then)), EntropyController(EntropyBonus(**now))
    before.update(0.4)
    after.load_state_dict(before.state_dict())
    assert after.alpha == pytest.approx(alpha)


# -- refused settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo.reduce=mean"], "algo.reduce=mean must be one of sequence, token, constant, sum or a function of yours"),
        (["algo.reduce=mine.py:weights"], "algo.reduce, the function 'mine.py:weights' cannot be imported: .* no file"),
        (
            ["algo.reduce=grpo.extras.losses.surrogates.cispo"],
            r"algo.reduce \(cispo\) needs 'ratio'; available are only: mask",
        ),
        (["algo.level=json.dumps"], r"algo.level \(dumps\) needs 'obj'; available are only: log_ratio, mask"),
        (["algo.level=row"], "algo.level=row must be one of token, sequence"),
        (["algo.surrogate.low=1.2"], "algo.surrogate.low=1.2 must be a number above 0 and at most 1, or null"),
        (["algo.surrogate.high=0"], "algo.surrogate.high=0 must be a number above 0, or null"),
        (["algo.surrogate.dual=1.1"], "algo.surrogate.dual=1.1 must be above 1 \\+ high"),
        (["algo.kl.coef=-1"], "algo.kl.coef=-1 must be a number of at least 0"),
        (["algo.kl.estimator=k4"], "k4 is not one of k1, k2, k3"),
        (["algo.kl.coef=0.1", "algo.kl.target=null"], "algo.kl.target=null is not one of reference, rollout"),
        (["algo/kl=reward", "algo.kl.target=rollout"], "no KL to penalise"),
        (["algo.kl.sync_every=8"], "moves a reference that nothing uses"),
        (["algo.level=none"], "algo.level=none, but algo.surrogate \\(clip\\) needs the ratio"),
        (["algo.level=none", "algo/surrogate=reinforce", "algo/kl=loss_with_ratio"], "has no ratio"),
        (["algo=atropos", "algo/correction=tis"], "would count it twice"),
        (["algo=vespo", "algo/correction=tis"], "algo/surrogate=vespo compares with the policy that sampled"),
        (["algo=clip_cov", "algo.top_entropy=0.2"], "algo.top_entropy below 1 is a choice of tokens of its own"),
        (["algo=clip_cov", "algo.choice.share=0"], "algo.choice.share=0 must be a number above 0 and at most 1"),
        (["algo/correction=tis", "algo.correction.level=row"], "algo.correction.level=row is not one of"),
        (["algo.advantage.scale=row"], "algo.advantage.scale=row is not one of group, batch, none"),
        (["algo.top_entropy=0"], "algo.top_entropy=0 must be a number above 0 and at most 1"),
        (["algo.overlong_share=4096"], "algo.overlong_share=4096 must be a number of at least 0 and at most 1"),
        (["algo.entropy.coef=-1"], "algo.entropy"),
        (["algo.num_epochs=1.5"], "algo.num_epochs=1.5 must be an integer of at least 1"),
        (["algo.whiten=no"], "algo.whiten=no must be true or false"),
        (["algo.entropy=null"], "algo.entropy=None must be a grpo EntropyBonus"),
        (["algo.entropy.target=abc"], "algo.entropy.target=abc must be a number of at least 0, or null"),
        (["algo.off_policy_delta=abc"], "algo.off_policy_delta=abc must be a number above 0"),
        (["algo.kl.coef=abc"], "algo.kl.coef=abc must be a number"),
        (["algo=cispo", "algo.surrogate.bound=0.28"], "algo.surrogate.bound=0.28 must be a number of at least 1"),
        (["algo=sapo", "algo.surrogate.tau_positive=0"], "must be a number above 0"),
        (["algo/correction=mis", "algo.correction.low=5"], "must be a number of at least 0 and at most 1"),
        (
            ["algo/correction=tis", "algo.correction.high=0.5"],
            r"^algo.correction \(truncated\): .* need 0 <= low <= 1 <= high",
        ),
        (["algo.advantage.eps=-1"], "algo.advantage.eps=-1 must be a number of at least 0"),
        (["algo/surrogate=reinforce", "algo.level=sequence"], "algo.level=sequence has no effect"),
        (
            ["algo/advantage=gdpo", "algo.advantage.weights=3"],
            "weights=3 must be a mapping, each value a number, or null",
        ),
        (["algo=dapo", "algo/advantage=gdpo"], "algo.overlong_share changes the reward"),
        (["algo=rloo", "algo/advantage=gdpo"], "algo.kl.place=reward changes the reward"),
        (["algo=dapo", "algo/advantage=max_rl"], r"^algo.advantage \(max_rl\): rewards must not be negative"),
        (["algo=rloo", "rollout.group_size=1"], "rollout.group_size=1: advantages compare"),
        (["algo=grpo", "rollout.group_size=1"], "at least 2 are needed \\(algo=reinforce_pp takes 1\\)"),
    ],
)
def test_combinations_without_meaning_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        preset(*overrides)


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        (partial(gdpo, weights={}), r"weights is empty: name parts of the reward"),
        (partial(gdpo, weights={"form": 1.0}), r"weights: no part 'form'; there are correct"),
        (remax, r"parts has no 'greedy', the reward of a greedy answer; it has correct: set selection=greedy"),
    ],
)
def test_an_error_of_an_axis_names_its_key_and_the_argument(advantage, message):
    """The function names its argument; `call` puts the key before it, at the start and at every update."""
    scores, parts = torch.ones(1, 2), {"correct": torch.ones(1, 2)}
    offered = {"rewards": scores, "parts": parts}
    with pytest.raises(UserError, match=f"^{message}"):
        advantage(**{name: offered[name] for name in parameters(advantage) if name in offered})
    name = getattr(advantage, "func", advantage).__name__
    with pytest.raises(UserError, match=rf"^Algorithm\.advantage \({name}\): {message}"):
        Algorithm(advantage, clip, max_tokens=4).credit(
            Scores(scores, parts, scores, scores, scores == 0), even_batch(2, 2, -1.0)
        )


def test_a_key_of_null_can_be_deleted_once_it_has_a_value():
    assert preset("algo.surrogate.dual=0", "~algo.surrogate.dual").surrogate.keywords.keys() == {"low", "high"}


def test_reinforce_pp_takes_groups_of_one():
    assert preset("algo=reinforce_pp", "rollout.group_size=1").whiten


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda ratio, temperature: ratio, "needs 'temperature'; available are only: ratio, log_ratio, old_logprobs"),
        (lambda advantages: advantages, "has no gradient"),
        (
            lambda ratio, advantages: (ratio * advantages).sum(),
            "must return a tensor of shape \\[2, 3\\], and gave \\(\\)",
        ),
        (lambda ratio: ratio @ ratio, "fails on random numbers: RuntimeError"),
        (lambda ratio: ratio / 0, "not finite on random ones"),
        (lambda ratio: (ratio, {"mean": ratio.mean()}), "logs 'mean', which must be \\[B, C\\]"),
    ],
)
def test_a_surrogate_that_cannot_work_is_refused(function, message):
    with pytest.raises(UserError, match=message):
        check_algorithm(Algorithm(group_advantages, function, max_tokens=4), 2, 2)


def test_the_worked_example_of_the_documentation(tmp_path, monkeypatch):
    """The blocks of docs/objectives.md as a user would save them, named on the command line."""
    text = (ROOT / "docs" / "objectives.md").read_text().partition("## A loss of your own")[2]
    code, yaml = (re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)[1] for language in ("python", "yaml"))
    assert len(code.splitlines()) + len(yaml.splitlines()) <= 10
    (tmp_path / "ideas.py").write_text(code)
    (tmp_path / "algo" / "surrogate").mkdir(parents=True)
    (tmp_path / "algo" / "surrogate" / "spo.yaml").write_text(yaml)
    monkeypatch.syspath_prepend(tmp_path)
    spo = preset(f"hydra.searchpath=[file://{tmp_path}]", "algo/surrogate=spo", "+algo.surrogate.eps=0.25").surrogate
    # -(r A - |A| / (2 eps) (r - 1)^2): at r = 1.5, A = 2 it is -(3 - 1); the gradient -(2 - 4) r is 0 at 1 + eps
    assert surrogate(spo, 1.5, 2.0)[:2] == pytest.approx((-2.0, 3.0))
    assert surrogate(spo, 1.25, 2.0)[1] == pytest.approx(0.0, abs=1e-6)
    assert surrogate(spo, 0.75, -1.0)[:2] == pytest.approx((0.875, 0.0), abs=1e-6)
    (tmp_path / "algo" / "spo.yaml").write_text(
        text.partition("conf/algo/spo.yaml")[2].split("```yaml\n")[1].partition("```")[0]
    )
    own = preset(f"hydra.searchpath=[file://{tmp_path}]", "algo=spo")  # a value of `algo` in a sweep
    assert own.surrogate.func.__name__ == "spo" and str(own.advantage) == str(preset("algo=grpo").advantage)


def test_a_level_and_a_reduction_of_your_own(tmp_path):
    """The example of docs/objectives.md: the largest log-ratio of a row at each of its tokens; 1 / (B sqrt |o_i|)."""
    page = (ROOT / "docs" / "objectives.md").read_text().partition("## A level or a reduction of your own")[2]
    file = tmp_path / "own_axes.py"
    file.write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    algorithm = preset(f"algo.level={file}:largest", f"algo.reduce={file}:root")
    close(algorithm.weights(MASK), tensor([[1 / 4] * 4, [1 / 2, 0, 0, 0]]))
    assert replace(algorithm, max_tokens=9).reduce is algorithm.reduce
    old = tensor([[-1.0, -2, -3], [-1, 7, 7]])
    logprobs = (old + tensor([[0.3, 0.6, 0.0], [0.5, 9, 9]])).requires_grad_()
    got = policy_log_ratio(logprobs, old, ROWS, algorithm.level)
    close(got, tensor([[0.6, 0.6, 0.6], [0.5, 0, 0]]))
    batch = replace(even_batch(1, 2, -2.0), advantages=tensor([[1.0, 1.0]]))  # log-ratios 0.1 and 0.3
    loss, logged = algorithm.loss(tensor([[-1.9, -1.7]]), torch.zeros(1, 2), batch)
    close(logged["ratio"], torch.full((1, 2), math.exp(0.3)))
    close(loss, tensor(-2.4))  # clipped at 1.2, weight 1 for each of two tokens


def test_a_surrogate_may_ask_which_tokens_count_and_whose_they_are():
    def loss(logprobs, advantages, counted, sample, group):
        return -advantages * logprobs * counted, {
            "sample": 0 * logprobs + sample[:, None],
            "group": 0 * logprobs + group[:, None],
        }

    algorithm = Algorithm(no_baseline, loss, max_tokens=4)
    check_algorithm(algorithm, 2, 2)
    batch = replace(even_batch(4, 2, -1.0), group=None)
    scored = Scores(
        tensor([[1.0, 2], [3, 4]]), {}, torch.ones(2, 2), torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool)
    )
    batch = algorithm.credit(scored, batch)
    counted = tensor([[True, False]]).expand(4, 2)
    whole, logged = algorithm.loss(-torch.ones(4, 2), torch.zeros(4, 2), batch)
    assert logged["sample"][:, 0].tolist() == [0, 1, 2, 3] and logged["group"][:, 0].tolist() == [0, 0, 1, 1]
    half, logged = algorithm.loss(
        -torch.ones(2, 2), torch.zeros(2, 2), replace(batch, counted=counted).rows(slice(2, 4))
    )
    assert (whole, half) == (20.0, 7.0)  # (1 + 2 + 3 + 4) x 2 tokens, 3 + 4 for one token each
    assert logged["sample"][:, 0].tolist() == [2, 3] and logged["group"][:, 0].tolist() == [1, 1]


def test_an_advantage_of_the_wrong_shape_is_refused():
    with pytest.raises(UserError, match=r"shape \[2, 3\] or \[2, 3, 1\], and gave \(2,\)"):
        check_algorithm(Algorithm(lambda rewards: rewards.mean(1), clip, max_tokens=4), 2, 3)


def test_what_is_rarely_meant_is_said():
    assert "the expected gradient of k1 in the loss is 0" in next(
        advice(preset("algo/kl=loss", "algo.kl.estimator=k1"))
    )
    assert "k3 in the reward" in next(advice(preset("algo/kl=reward", "algo.kl.estimator=k3")))
    assert "there is no KL" in next(advice(preset("algo.kl.place=reward")))
    assert "learn from an older policy's samples" in next(advice(preset("algo=rloo", "algo.num_minibatches=4")))
    wide, narrow = preset("algo=gspo", "algo.surrogate.low=0.1"), preset("algo=gspo", "algo.level=token")
    assert "these bounds may seldom act" in next(advice(wide))
    assert "may clip nearly every token" in next(advice(narrow))
    assert list(advice(preset())) == list(advice(preset("algo=rloo"))) == list(advice(preset("algo=gspo"))) == []
