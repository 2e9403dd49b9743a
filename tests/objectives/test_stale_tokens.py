"""Tokens of several versions: which pair of log-probabilities each objective compares, by hand.

A completion of three tokens, sampled by versions 3, 4 and 5, is learned from at version 6, in the second update of the rollout:

    probability of the token                        0     1     2
    mu  the version that sampled it                 0.4   0.5   0.2
    p   the trainer's, version 6, before updates    0.6   0.2   0.8
    pi  the policy, after one update                0.66  0.26  0.56

    p / mu   1.5   0.4   4      product 2.4
    pi / p   1.1   1.3   0.7    the second is above the bound of 1.2
    pi / mu  1.65  0.52  2.8    their roots of 3, 2 and 1: 1.1817 0.7211 2.8
"""

from dataclasses import replace

import pytest
import torch
from conftest import preset
from helpers.learning import episode, fresh, make_module, rollout
from torch import Tensor, tensor

from grpo.apps.try_algorithm import check_algorithm
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Reward, Trajectory
from grpo.extras.teachers.distillation import iw_opd, topd, vopd
from grpo.extras.teachers.teaching import Teaching
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import TokenBatch
from grpo.objectives.kl import KL
from grpo.objectives.loss import clip, reinforce
from grpo.rollout.collate import collate
from grpo.rollout.types import Sample
from grpo.rollout.versions import with_staleness
from grpo.system.errors import UserError

close = torch.testing.assert_close
MU, P, PI = (tensor([probabilities]).log() for probabilities in ([0.4, 0.5, 0.2], [0.6, 0.2, 0.8], [0.66, 0.26, 0.56]))


def sample(*turns: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None], age: int = 0) -> Sample:
    """Return a sample with these turns: prompt, ids, versions."""
    made = [Turn(prompt, Completion(ids, (-1.0,) * len(ids), "stop", versions)) for prompt, ids, versions in turns]
    return Sample({}, Trajectory(()), tuple(made), Reward(0.0, False), age)


def partial_rollout() -> TokenBatch:
    """The completion above, as the engine gives it, at version 6."""
    done = Completion((7, 8, 9), tuple(MU[0].tolist()), "stop", versions=(3, 4, 5))
    groups = [[Sample({}, Trajectory(()), (Turn((1,), done),), Reward(0.0, False))]]
    return with_staleness(collate(groups), groups, version=3, update=6)


def learned(algorithm: Algorithm) -> tuple[dict[str, Tensor], float, list[float]]:
    """Return what the loss logs, the loss, and its gradient, with A = 1."""
    tokens, logprobs = partial_rollout(), PI.clone().requires_grad_()
    weights = algorithm.weights(tokens.mask)
    batch = replace(tokens, advantages=torch.ones(1, 3), old_logprobs=P, weights=weights)
    loss, logged = algorithm.loss(logprobs, torch.zeros(1, 3), batch)
    return logged, loss.item(), torch.autograd.grad(loss, logprobs)[0][0].tolist()


def test_each_token_keeps_its_version_and_its_log_probability():
    """Not those of a prefix that newer weights scored again."""
    tokens = partial_rollout()
    assert tokens.staleness.tolist() == [[3, 2, 1]] and tokens.staleness.max() == 6 - 3
    close(tokens.rollout_logprobs, MU)


# each: the overrides, f, rho, the loss -(f min(rho, clip(rho))) / 3, and its gradient -f rho / 3, 0 where the clip acts
OBJECTIVES = {
    "tis": (["algo/correction=tis"], [1.5, 0.4, 2], [1.1, 1.3, 0.7],
            -(1.5 * 1.1 + 0.4 * 1.2 + 2 * 0.7) / 3, [-0.55, 0, -1.4 / 3]),
    "mis": (["algo/correction=mis"], [2.4] * 3, [1.1, 1.3, 0.7], -2.4 * (1.1 + 1.2 + 0.7) / 3, [-0.88, 0, -0.56]),
    "mis, above its bound": (["algo/correction=mis", "algo.correction.high=2.3"], [0] * 3, [1.1, 1.3, 0.7], 0, [0] * 3),
    "icepop": (["algo/correction=icepop"], [1.5, 0, 4], [1.1, 1.3, 0.7], -(1.65 + 4 * 0.7) / 3, [-0.55, 0, -2.8 / 3]),
    "geometric": (["algo/correction=geometric"], [0] * 3, [1.1, 1.3, 0.7], 0, [0] * 3),  # 2.4^(1/3) = 1.339 > 1.01
    "geometric, wide": (["algo/correction=geometric", "algo.correction.high=1.34"], [1.5, 0.4, 2], [1.1, 1.3, 0.7],
                        -(1.65 + 0.48 + 1.4) / 3, [-0.55, 0, -1.4 / 3]),
    "decoupled": (["algo=decoupled"], [1.5, 0.4, 4], [1.1, 1.3, 0.7], -(1.65 + 0.48 + 2.8) / 3, [-0.55, 0, -2.8 / 3]),
    "decoupled, capped": (["algo=decoupled", "algo.correction.high=3.9"], [1.5, 0.4, 0], [1.1, 1.3, 0.7],
                          -(1.65 + 0.48) / 3, [-0.55, 0, 0]),
    "rollout": (["algo.old_policy=rollout"], None, [1.65, 0.52, 2.8], -(1.2 + 0.52 + 1.2) / 3, [0, -0.52 / 3, 0]),
    "between": (["algo=decoupled", "algo.old_policy=between"], [1.65 ** (2 / 3), 0.52**0.5, 1],
                [1.65 ** (1 / 3), 0.52**0.5, 2.8], -(1.65 + 0.52 + 1.2) / 3, [-0.55, -0.52 / 3, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_pairs_of_each_objective(name):
    overrides, f, rho, expected, gradient = OBJECTIVES[name]
    logged, loss, got = learned(preset("algo.reduce=token", *overrides))
    assert ("correction" in logged) == (f is not None)
    if f is not None:
        close(logged["correction"], tensor([f]).float())
    close(logged["ratio"], tensor([rho]))
    assert loss == pytest.approx(expected, rel=1e-5) and got == pytest.approx(gradient, rel=1e-5)


def test_the_version_before_is_reached_by_even_steps():
    """log pi moves by 0.3 a version from version 3 to 6: between is its value at version 5, whatever version sampled."""
    at = {version: -2.0 + 0.3 * version for version in (3, 4, 5, 6)}
    algorithm = preset("algo=decoupled", "algo.old_policy=between")
    rollouts = tensor([[at[3], at[4], at[5], at[6]]])
    tokens = replace(
        with_staleness(collate(groups := [[sample(((1,), (7, 8, 9, 5), (3, 4, 5, 6)))]]), groups, 3, 6),
        rollout_logprobs=rollouts, advantages=torch.ones(1, 4), old_logprobs=torch.zeros(1, 4), weights=torch.ones(1, 4),
    )  # fmt: skip
    loss, logged = algorithm.loss(learns := torch.full((1, 4), at[6], requires_grad=True), torch.zeros(1, 4), tokens)
    close(logged["ratio"].log(), tensor([[0.3, 0.3, 0.3, 0.0]]), atol=1e-6, rtol=0)
    assert torch.autograd.grad(loss, learns)[0][0, :3].tolist() == [0, 0, 0]  # clipped, and between has no gradient
    close(logged["correction"].log(), tensor([[0.6, 0.3, 0.0, 0.0]]), atol=1e-6, rtol=0)


# -- a correction of your own


def fading(log_w: Tensor, staleness: Tensor, share: float = 0.9) -> Tensor:
    """Return share^d: a token counts less with each version that it is older."""
    return share**staleness


def test_a_correction_may_ask_for_the_age_of_a_token():
    algorithm = Algorithm(lambda rewards: rewards - rewards.mean(), clip, 4, reduce="token", correction=fading)
    check_algorithm(algorithm, 2, 2, ahead=3)
    logged, loss, gradient = learned(algorithm)
    close(logged["correction"], tensor([[0.729, 0.81, 0.9]]))
    assert loss == pytest.approx(-(0.729 * 1.1 + 0.81 * 1.2 + 0.9 * 0.7) / 3)
    assert gradient == pytest.approx([-0.729 * 1.1 / 3, 0, -0.21])
    new = replace(
        partial_rollout(), staleness=None, advantages=torch.ones(1, 3), old_logprobs=P, weights=torch.ones(1, 3)
    )
    assert algorithm.loss(PI, torch.zeros(1, 3), new)[1]["correction"].tolist() == [[1, 1, 1]]
    with pytest.raises(UserError, match=r"needs 'age'; available are only: .*rollout_logprobs, staleness"):
        replace(algorithm, correction=lambda age: age)


# -- from samples to tokens


def test_staleness_of_turns_branches_and_replayed_samples():
    in_one_row = sample(((1, 2), (3, 4), (3, 4)), ((1, 2, 3, 4, 9), (5,), (5,)))
    branched = sample(((1, 2), (3,), (3,)), ((1, 7), (8,), (5,)), ((1, 2, 3, 6), (4,), (4,)))  # a row of turns 0 and 2
    silent, replayed = sample(((1,), (2, 3), None)), sample(((1,), (2,), None), age=1)
    groups = [[in_one_row, branched], [silent, replayed]]
    expected = [[3, 2, 0, 1], [3, 0, 2, 0], [1, 0, 0, 0], [2, 2, 0, 0], [3, 0, 0, 0]]
    assert with_staleness(collate(groups), groups, version=4, update=6).staleness.tolist() == expected
    apart = [groups[1], groups[0]]  # a rank's groups come in any order
    got = with_staleness(collate(apart, first=[2, 0]), apart, version=4, update=6)
    assert got.sample.tolist() == [2, 3, 0, 1, 1] and got.staleness.tolist() == expected[3:] + expected[:3]
    assert got.rows(slice(0, 2)).staleness.tolist() == [[2, 2], [3, 0]]  # a microbatch
    early = [[sample(((1,), (2,), None), age=3)]]
    assert with_staleness(collate(early), early, version=1, update=4).staleness.tolist() == [
        [4]
    ]  # version 0 is the first


def test_tokens_of_the_newest_weights_cost_nothing():
    groups = [[sample(((1,), (2, 3), None)), sample(((1,), (2,), (6,)))], [sample()]]
    assert with_staleness(tokens := collate(groups), groups, version=6, update=6) is tokens


# -- in the update


def test_a_weight_in_two_parts_makes_the_same_step(toy):
    """Without bounds, f rho is pi / mu, also where p is between the two; and then no pass comes before the updates."""
    logprobs = ((-3.0, -4.0), (-5.0,))
    groups = [[episode((11, 12), (21, 22), logprobs[0]), episode((11, 12), (23,), logprobs[1])]] * 2
    unbounded = {"surrogate": lambda ratio, advantages: -ratio * advantages, "num_minibatches": 2, "reduce": "token"}
    ends = []
    for old, correction in (("rollout", None), ("between", truncated_high), ("trainer", truncated_high)):
        policy = fresh(toy)
        module = make_module(policy, **unbounded, old_policy=old, correction=correction)
        assert module.algorithm.needs_old == (old == "trainer")
        tokens = with_staleness(collate(groups), groups, version=0, update=3)
        metrics = module.training_step(rollout(tokens=tokens, groups=groups), 0)
        ends.append((torch.cat([p.flatten() for p in policy.parameters()]), metrics))
    start = torch.cat([p.flatten() for p in fresh(toy).parameters()])
    assert (ends[0][0] - start).abs().max() > 1e-3
    close(ends[1][0], ends[0][0], atol=1e-6, rtol=0)
    close(ends[2][0], ends[0][0], atol=1e-6, rtol=0)
    gaps = [metrics["rollout/logprob_gap"] for _, metrics in ends]
    assert gaps[1] == pytest.approx(gaps[0])  # of engine and trainer, whatever p is


def truncated_high(log_w: Tensor, mask: Tensor) -> Tensor:
    from grpo.extras.losses.importance import truncated

    return truncated(log_w, mask, high=1e9)


# -- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"correction": None}, "a correction has the rest: set Algorithm.correction=tis"),
        (
            {"surrogate": reinforce, "level": "none"},
            "has no ratio, and Algorithm.correction alone is a part of its weight",
        ),
        ({"kl": KL(0.1, "k1", "reward")}, "KL.place=reward needs the old policy"),
        ({"advantage": lambda rewards, mask, old_logprobs: old_logprobs}, "the advantage needs the old policy"),
        ({"teacher": Teaching(1.0)}, "the teacher's part needs the old policy"),
        ({"teacher": Teaching(1.0, "reverse", cap=2.0)}, "the teacher's part needs the old policy"),
    ],
)
def test_between_is_refused_where_it_is_not_known(change, words):
    algorithm = preset("algo=decoupled", "algo.old_policy=between")
    replace(algorithm, teacher=Teaching(1.0, "reverse"))
    with pytest.raises(UserError, match=words):
        replace(algorithm, **change)


@pytest.mark.parametrize(
    ("divergence", "cap", "weighed"),
    [
        ("sampled", None, True), (topd, None, True), (iw_opd, None, False), (iw_opd, 2.0, True), (vopd, None, False),
        (vopd, 2.0, True), ("reverse", None, None),
    ],
)  # fmt: skip
def test_old_samples_for_a_teacher(divergence, cap, weighed):
    """weighed: whether a ratio to the policy that sampled can weigh them; None: whole distributions need none."""

    def check(old_policy: str) -> None:
        teacher = Teaching(1.0, divergence, cap=cap)
        algorithm = Algorithm(
            lambda rewards: rewards - rewards.mean(), clip, 4, policy_coef=0.0, teacher=teacher, old_policy=old_policy
        )
        check_algorithm(algorithm, 2, 2, ahead=4)

    if weighed is None:
        check("trainer")
    else:
        with pytest.raises(UserError, match=r"Plan\.ahead=4: the divergence takes the samples as the policy's own"):
            check("trainer")
    if weighed is False:
        with pytest.raises(
            UserError, match=r"set Algorithm.old_policy=rollout Teaching.cap=2, or a divergence of distr"
        ):
            check("rollout")
    else:
        check("rollout")


def test_decoupled_ppo_takes_samples_of_any_age():
    for more in ([], ["algo.old_policy=between"], ["algo.num_minibatches=4"]):
        check_algorithm(preset("algo=decoupled", *more), 4, 2, ahead=8)
