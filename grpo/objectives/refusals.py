"""Refuses an Algorithm that has no meaning, does not fit a rollout, or whose functions fail, each with a UserError of one line.

A line has the names of Python, such as `Algorithm.level`; the command line writes its keys there (`names` in
grpo/config/keys.yaml). Nothing here needs a model. In each function `a` is an Algorithm, without the type, since algorithm.py
imports this file. `check_axes` is called for every Algorithm, `check_algorithm` for one that is to be trained with. `advice`
names settings that work but are rarely meant.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from grpo.objectives.arguments import (
    OF_TOKENS,
    OFFERED,
    WITHOUT_RATIO,
    call,
    function_name,
    lacking,
    named,
    parameters,
    too_old,
)
from grpo.objectives.entropy import EntropyBonus
from grpo.objectives.kl import KL
from grpo.objectives.loss import clip, policy_log_ratio, token_weights
from grpo.objectives.trial import even_batch, random_batch, tried
from grpo.system.errors import UserError, plural
from grpo.system.progress import Progress

# -- every Algorithm


def check_axes(a: Any) -> None:
    """Raises UserError for the first meaningless setting of `a`, or combination of its axes."""
    for line in chain(wrong_values(a), combinations(a)):
        raise UserError(line)


def wrong_values(a: Any) -> Iterator[str]:
    """Yield a line for each part of another type, for each function with a parameter for which there is no value, and for a bound
    that never acts."""
    for name, kind in (("kl", KL), ("entropy", EntropyBonus)):
        if not isinstance(value := getattr(a, name), kind):
            yield f"Algorithm.{name}={value} must be a grpo {kind.__name__}: coef 0 switches it off"
    for axis in OFFERED:
        offered = WITHOUT_RATIO if axis == "surrogate" and a.level == "none" else OFFERED[axis]
        function = getattr(a, axis)
        for name in lacking(axis, function, offered) if callable(function) else ():
            if name in OFFERED[axis]:
                fix = "take Algorithm.surrogate=reinforce, or Algorithm.level=token"
                yield f"Algorithm.level=none, but {named(axis, function)} needs the {name}: {fix}"
            yield f"{named(axis, function)} needs {name!r}; available are only: {', '.join(offered)}"
    _, high, dual = clip_bounds(a)
    if dual is not None and dual <= 1 + (high or 0):
        yield f"Algorithm.surrogate.dual={dual} must be above 1 + high, 3 is usual; null is off"


def combinations(a: Any) -> Iterator[str]:
    """Yield a line for each meaningless combination of axes."""
    with_ratio = a.kl.place == "loss_with_ratio"
    surrogate, advantage = named("surrogate", a.surrogate), named("advantage", a.advantage)
    if a.level == "none" and a.kl.in_loss and with_ratio:
        yield "KL.place=loss_with_ratio, but Algorithm.level=none has no ratio: set KL.place=loss"
    if a.old_policy == "rollout" and a.correction is not None:
        line = "Algorithm.old_policy=rollout puts the engine's mismatch into the ratio, and the correction would count it twice"
        yield f"{line}: set Algorithm.correction=none or Algorithm.old_policy=trainer"
    if a.old_policy == "between":
        yield from wrong_between(a)
    if a.correction is not None and getattr(getattr(a.surrogate, "func", a.surrogate), "weighs_rollout", False):
        line = "compares with the policy that sampled, and Algorithm.correction would count that twice"
        yield f"Algorithm.surrogate={function_name(a.surrogate)} {line}: set Algorithm.correction=none"
    if a.level not in ("token", "none") and not uses_ratio(a) and not with_ratio:
        level = named("level", a.level) if callable(a.level) else f"Algorithm.level={a.level}"
        yield f"{level} has no effect: {surrogate} does not use the ratio; set Algorithm.level=none"
    if not (a.policy_coef or a.others):
        yield "Algorithm.policy_coef=0, and no other part of the loss has a weight: nothing would be learned"
    for name, is_on in (("Algorithm.overlong_share", a.overlong_share), ("KL.place=reward", kl_in_reward(a))):
        if is_on and not {"rewards", "steps"} & parameters(a.advantage).keys():
            yield f"{name} changes the reward, but {advantage} does not use it"


def wrong_between(a: Any) -> Iterator[str]:
    """Yield a line for old_policy=between where only a part of pi / mu would count, or the old policy is needed before a loss."""
    cause, fix = "Algorithm.old_policy=between", "set Algorithm.old_policy=trainer"
    if a.correction is None:
        line = "the ratio is then a root of policy / rollout policy, and a correction has the rest"
        yield f"{cause}: {line}: set Algorithm.correction=tis, or Algorithm.old_policy=rollout"
    if not uses_ratio(a):
        line = f"{named('surrogate', a.surrogate)} has no ratio, and Algorithm.correction alone is a part of its weight"
        yield f"{cause}: {line}: {fix}"
    taught = any(term.needs_old for term in a.others)
    needs = {f"KL.place={a.kl.place}": a.kl.in_reward, "the advantage": a.freezes_first, "the teacher's part": taught}
    for name in [name for name, is_on in needs.items() if is_on]:
        yield f"{cause}: {name} needs the old policy, which is not known before the update: {fix}"


def uses_ratio(a: Any) -> bool:
    """Return whether the surrogate names the ratio."""
    return bool({"ratio", "log_ratio"} & parameters(a.surrogate).keys())


def clip_bounds(a: Any) -> tuple[float | None, float | None, float | None]:
    """Return low, high and dual of `clip`; None for each if the surrogate is another function."""
    if getattr(a.surrogate, "func", a.surrogate) is not clip:
        return None, None, None
    return tuple(parameters(a.surrogate)[name].default for name in ("low", "high", "dual"))


def kl_in_reward(a: Any) -> bool:
    """Return whether the KL enters the rewards of samples, not those of tokens."""
    return a.kl.in_reward and a.kl.place == "reward"


# -- an Algorithm and a rollout


def check_algorithm(a: Any, prompts: int, group_size: int, ahead: int = 0, critic: bool = False) -> None:
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


def check_age(a: Any, cause: str) -> None:
    """Raise UserError if `a` takes samples of an older policy as the policy's own. cause: the setting that makes them old."""
    for term in a.others:
        term.check_age(a, cause)
    line = too_old(cause, parameters(a.surrogate), a.correction is not None, a.old_policy)
    if a.policy_coef and line:
        raise UserError(line)


def try_functions(a: Any, count: int) -> None:
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


def try_advantage(a: Any, prompts: int, group_size: int) -> None:
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


def advice(a: Any) -> Iterator[str]:
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
