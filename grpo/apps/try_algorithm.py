"""Refuses an Algorithm that does not fit a rollout, or whose functions fail on random numbers, before a model is loaded.

A line has the names of Python, as in grpo/objectives/refusals.py, which refuses what has no meaning in any run. `advice` names
settings that work but are rarely meant.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from grpo.objectives.algorithm import Algorithm
from grpo.objectives.arguments import OF_TOKENS, call, named, parameters
from grpo.objectives.loss import policy_log_ratio, token_weights
from grpo.objectives.refusals import check_age, clip_bounds, kl_in_reward
from grpo.objectives.trial import even_batch, random_batch, tried
from grpo.system.errors import UserError, plural
from grpo.system.progress import Progress


def check_algorithm(a: Algorithm, prompts: int, group_size: int, ahead: int = 0, critic: bool = False) -> None:
    """Raises UserError if `a` does not fit a rollout of prompts x group_size samples, or if a function fails on random numbers.
    ahead: the age of the samples, in rollouts, when they are learned from. critic: the run has one."""
    if (used := "values" in parameters(a.advantage)) != critic:
        needs = "needs the values of a critic: set critic=head or critic=model"
        unused = "does not use the values of the critic: set critic=none, or Algorithm.advantage=gae"
        raise UserError(f"{named('advantage', a.advantage)} {needs if used else unused}")
    if critic and a.kl.in_reward:
        line = "the critic's targets are the rewards without a KL"
        raise UserError(f"KL.place={a.kl.place} changes the rewards, but {line}: take Algorithm.kl=loss")
    if ahead:
        check_age(a, f"Plan.ahead={ahead}")
    rows = prompts * group_size
    if rows % a.num_minibatches:
        valid = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        size = f"{plural(rows, 'row')} of a rollout ({plural(prompts, 'prompt')} x {plural(group_size, 'sample')})"
        line = f"Algorithm.num_minibatches={a.num_minibatches} does not divide the {size}"
        raise UserError(f"{line}; valid values: {valid}")
    try_advantage(a, prompts, group_size)
    try_functions(a, prompts * group_size)


def try_functions(a: Algorithm, count: int) -> None:
    """Raises UserError for a function that raises, or returns no finite tensor of its shape. count: the samples of a rollout."""
    for term in a.others:
        term.tried()
    logprobs, batch = random_batch()
    old, rng = batch.old_logprobs, torch.Generator().manual_seed(0)
    moved = {"log_w": torch.zeros(2, 3), "mask": batch.mask, "old_logprobs": old, "rollout_logprobs": old}
    chosen = {name: torch.rand(count, generator=rng) for name in ("logprobs", "entropy", "advantages")}
    attempts = {
        "level": partial(policy_log_ratio, logprobs, old, batch.mask, a.level),
        "reduce": partial(token_weights, batch.mask, a.reduce, a.max_tokens),
        "surrogate": partial(a.policy_term, logprobs, batch),
        "correction": partial(call, "correction", a.correction, moved | {"staleness": torch.ones(2, 3)}),
        "choice": partial(call, "choice", a.choice, chosen | {"rng": rng}),
    }
    names = {axis: named(axis, function) for axis in attempts if callable(function := getattr(a, axis))}
    shapes = {axis: (count,) if axis == "choice" else (2, 3) for axis in names}
    results = {axis: tried(name, attempts[axis], shapes[axis]) for axis, name in names.items()}
    surrogate, (term, logged, _) = names["surrogate"], results["surrogate"]
    if not term.requires_grad:
        raise UserError(f"{surrogate} has no gradient: it must depend on logprobs or ratio")
    for name, values in logged.items():
        if not isinstance(values, Tensor) or values.shape != (2, 3):
            raise UserError(f"{surrogate} logs {name!r}, which must be [B, C] like the loss")


def try_advantage(a: Algorithm, prompts: int, group_size: int) -> None:
    """Raises UserError for an advantage function that fails on random rewards, or has only advantages of 0."""
    takes, shape = parameters(a.advantage), (prompts, group_size)
    if "examples" in takes:  # whose columns are unknown
        return
    some = partial(torch.rand, shape, generator=torch.Generator().manual_seed(0))
    least = -1.0 if a.overlong_share or kl_in_reward(a) else 0.0  # these make rewards negative
    rewards = some() + least
    offered = {"rewards": rewards, "lengths": 1 + some(), "parts": defaultdict(some), "progress": Progress()}
    offered |= {"steps": rewards[..., None], "observations": [[["a"]] * group_size] * prompts}
    batch = even_batch(prompts * group_size, 3, -1.0)
    offered |= {name: getattr(batch, name) for name in OF_TOKENS}
    twin = copy.deepcopy(a.advantage)  # it may have a state
    shapes = [(len(batch), 3)] if "mask" in takes else [shape, (*shape, 1)]
    advantages = tried(named("advantage", a.advantage), partial(call, "advantage", twin, offered), *shapes)
    if group_size == 1 and a.policy_coef and not advantages.any():
        fix = "at least 2 are needed (algo=reinforce_pp takes 1)"
        raise UserError(f"Plan.group_size=1: advantages compare the samples of a prompt, {fix}")


def advice(a: Algorithm) -> Iterator[str]:
    """Yield a sentence for each setting that works but is rarely meant."""
    low, high, _ = clip_bounds(a)
    bounds, widest = (
        f"Algorithm.surrogate.low={low} high={high} with Algorithm.level={a.level}",
        max(low or 0, high or 0),
    )
    if a.level in ("sequence", "sequence_token") and widest >= 0.05:
        line = "a mean over many tokens moves less than a token's ratio, so these bounds may seldom act"
        yield f"{bounds}: {line}; GSPO's are low=3e-4 high=4e-4, see loss/clip_fraction_low and _high"
    if a.level in ("token", "sequence_sum") and 0 < widest < 0.005:
        yield f"{bounds}: these bounds may clip nearly every token; 0.2 is usual, or set Algorithm.level=sequence"
    if a.kl.coef and a.kl.estimator == "k1" and a.kl.place == "loss":
        others = "k2 there, k1 with place=reward, and k1 or k3 with place=loss_with_ratio pull towards the reference"
        yield f"KL.estimator: the expected gradient of k1 in the loss is 0 (arXiv 2510.01555); {others}"
    if a.kl.in_reward and a.kl.estimator != "k1":
        yield f"KL.estimator: {a.kl.estimator} in the reward does not have the gradient of the KL, k1 does"
    if not a.kl.coef and (a.kl.place, a.kl.estimator, a.kl.target) != ("loss", "k3", "reference"):
        yield "KL.coef=0: there is no KL, and the other settings of the KL do nothing"
    if a.level == "none" and a.updates_per_rollout > 1:
        line = f"{a.updates_per_rollout} updates a rollout: all but the first learn from an older policy's samples as their own"
        yield f"Algorithm.level=none with {line}; Algorithm.surrogate=clip Algorithm.level=token weights them"
