"""Refuses an Algorithm that does not fit a rollout, or whose functions fail, each with a UserError of one line.

`check_algorithm` makes both checks: `check_rollout` against the size of a rollout, and `check_functions`, which tries the
functions on random numbers. `advice` names settings that work but are rarely meant. None of this needs a model.
"""

import copy
import logging
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from grpo.objectives.algorithm import Algorithm
from grpo.objectives.arguments import OF_TOKENS, call, named, parameters, too_old
from grpo.objectives.axes import clip_bounds, kl_in_reward
from grpo.objectives.loss import policy_log_ratio, token_weights
from grpo.objectives.trial import even_batch, random_batch, tried
from grpo.system.errors import UserError, plural
from grpo.system.progress import Progress

log = logging.getLogger(__name__)


def check_algorithm(a: Algorithm, prompts: int, group_size: int, ahead: int = 0, critic: bool = False) -> None:
    """Raises UserError if `a` does not fit a rollout of prompts x group_size samples, or if a function fails on random numbers.
    ahead: the age of the samples, in rollouts, when they are learned from. critic: the run has one. Logs the advice."""
    check_rollout(a, prompts, group_size, ahead, critic)
    check_functions(a, prompts, group_size)


def check_rollout(a: Algorithm, prompts: int, group_size: int, ahead: int, critic: bool) -> None:
    """Raises UserError if `a` does not fit a rollout; see `check_algorithm`."""
    if (used := "values" in parameters(a.advantage)) != critic:
        needs = "needs the values of a critic: set critic=head or critic=model"
        unused = "does not use the values of the critic: set critic=none, or algo/advantage=gae"
        raise UserError(f"{named('advantage', a.advantage)} {needs if used else unused}")
    if critic and a.kl.in_reward:
        line = "the critic's targets are the rewards without a KL"
        raise UserError(f"algo.kl.place={a.kl.place} changes the rewards, but {line}: take algo/kl=loss")
    for line in advice(a):
        log.warning(line)
    if ahead:
        check_age(a, f"rollout.ahead={ahead}")
    rows = prompts * group_size
    if rows % a.num_minibatches:
        valid = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        size = f"{plural(rows, 'row')} of a rollout ({plural(prompts, 'prompt')} x {plural(group_size, 'sample')})"
        raise UserError(f"algo.num_minibatches={a.num_minibatches} does not divide the {size}; valid values: {valid}")


def check_functions(a: Algorithm, prompts: int, group_size: int) -> None:
    """Raises UserError for a function that raises, returns no finite tensor of the right shape, or leaves nothing to learn."""
    check_advantage(a, prompts, group_size)
    for term in a.others:
        term.tried()
    logprobs, batch = random_batch()
    if callable(a.level):
        level = partial(policy_log_ratio, logprobs, batch.old_logprobs, batch.mask, a.level)
        tried(named("level", a.level), level, (2, 3))
    if callable(a.reduce):
        tried(named("reduce", a.reduce), partial(token_weights, batch.mask, a.reduce, a.max_tokens), (2, 3))
    surrogate = named("surrogate", a.surrogate)
    term, logged, _ = tried(surrogate, partial(a.policy_term, logprobs, batch), (2, 3))
    if a.correction is not None:
        old = batch.old_logprobs
        offered = {"log_w": torch.zeros(2, 3), "mask": batch.mask, "old_logprobs": old, "rollout_logprobs": old}
        offered["staleness"] = torch.ones(2, 3)
        tried(named("correction", a.correction), partial(call, "correction", a.correction, offered), (2, 3))
    if a.choice is not None:
        count, rng = prompts * group_size, torch.Generator().manual_seed(0)
        offered = {name: torch.rand(count, generator=rng) for name in ("logprobs", "entropy", "advantages")}
        tried(named("choice", a.choice), partial(call, "choice", a.choice, offered | {"rng": rng}), (count,))
    if not term.requires_grad:
        raise UserError(f"{surrogate} has no gradient: it must depend on logprobs or ratio")
    for name, values in logged.items():
        if not isinstance(values, Tensor) or values.shape != (2, 3):
            raise UserError(f"{surrogate} logs {name!r}, which must be [B, C] like the loss")


def check_advantage(a: Algorithm, prompts: int, group_size: int) -> None:
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
        raise UserError(f"rollout.group_size=1: advantages compare the samples of a prompt, {fix}")


def check_age(a: Algorithm, cause: str) -> None:
    """Raise UserError if `a` takes samples of an older policy as the policy's own. cause: the setting that makes them old."""
    for term in a.others:
        term.check_age(a, cause)
    if not a.policy_coef:
        return
    takes = parameters(a.surrogate).keys()
    compares = takes & {"ratio", "log_ratio", "old_logprobs"}
    if a.correction is None and "rollout_logprobs" not in takes and not (compares and a.old_policy == "rollout"):
        raise UserError(too_old(cause, bool(compares)))


def advice(a: Algorithm) -> Iterator[str]:
    """Yield a sentence for each setting that works but is rarely meant."""
    low, high, _ = clip_bounds(a)
    bounds, widest = f"algo.surrogate.low={low} high={high} with algo.level={a.level}", max(low or 0, high or 0)
    if a.level in ("sequence", "sequence_token") and widest >= 0.05:
        line = "a mean over many tokens moves less than a token's ratio, so these bounds may seldom act"
        yield f"{bounds}: {line}; GSPO's are low=3e-4 high=4e-4, see loss/clip_fraction_low and _high"
    if a.level in ("token", "sequence_sum") and 0 < widest < 0.005:
        yield f"{bounds}: these bounds may clip nearly every token; 0.2 is usual, or set algo.level=sequence"
    if a.kl.coef and a.kl.estimator == "k1" and a.kl.place == "loss":
        others = "k2 there, k1 with place=reward, and k1 or k3 with place=loss_with_ratio pull towards the reference"
        yield f"algo.kl: the expected gradient of k1 in the loss is 0 (arXiv 2510.01555); {others}"
    if a.kl.in_reward and a.kl.estimator != "k1":
        yield f"algo.kl: {a.kl.estimator} in the reward does not have the gradient of the KL, k1 does"
    if not a.kl.coef and (a.kl.place, a.kl.estimator, a.kl.target) != ("loss", "k3", "reference"):
        yield "algo.kl.coef=0: there is no KL, and the other keys of algo.kl do nothing"
    if a.level == "none" and a.updates_per_rollout > 1:
        line = f"{a.updates_per_rollout} updates a rollout: all but the first learn from an older policy's samples as their own"
        yield f"algo.level=none with {line}; algo/surrogate=clip algo.level=token weights them"
