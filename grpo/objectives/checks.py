"""Refusals: values of an Algorithm, and combinations of them, that have no meaning. One line each, raised as UserError.

`check` looks at an Algorithm alone, `check_rollout` at an Algorithm and the size of a rollout; `advice` names what works and is
rarely meant. Functions here try an advantage, a surrogate and a correction on random numbers, before a model is loaded.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from grpo.objectives.arguments import OFFERED, WITHOUT_RATIO, call, parameters
from grpo.objectives.batch import TokenBatch
from grpo.objectives.entropy import EntropyBonus
from grpo.objectives.kl import KL
from grpo.objectives.loss import Level, Reduce, clip
from grpo.system.errors import UserError, oneof

if TYPE_CHECKING:
    from grpo.objectives.algorithm import Algorithm

log = logging.getLogger(__name__)


def check(a: "Algorithm") -> None:
    """Raises UserError for the first thing about `a` that has no meaning."""
    oneof("algo.level", a.level, get_args(Level))
    oneof("algo.reduce", a.reduce, get_args(Reduce))
    oneof("algo.old_policy", a.old_policy, ("trainer", "rollout"))
    for message in chain(bad_values(a), bad_names(a), bad_axes(a), bad_bounds(a)):
        raise UserError(message)


def bad_values(a: "Algorithm") -> Iterator[str]:
    """Single values."""
    for name in ("num_epochs", "num_minibatches", "sampling_rounds", "max_tokens"):
        if not isinstance(value := getattr(a, name), int) or value < 1:
            yield f"algo.{name}={value} must be a whole number, at least 1"
    for name in ("whiten", "mask_truncated"):
        if not isinstance(value := getattr(a, name), bool):
            yield f"algo.{name}={value} must be true or false"
    for name, kind in (("kl", KL), ("entropy", EntropyBonus)):
        if not isinstance(getattr(a, name), kind):
            yield f"algo.{name}={getattr(a, name)} must be a grpo {kind.__name__}: coef 0 switches it off"
    if (delta := a.off_policy_delta) is not None and (not isinstance(delta, int | float) or delta <= 0):
        yield f"algo.off_policy_delta={delta} must be a number above 0, or null"
    if not 0 < a.top_entropy <= 1:
        yield f"algo.top_entropy={a.top_entropy} is a share of the tokens: above 0, and 1 for all of them"
    if not 0 <= a.overlong_share <= 1:
        yield f"algo.overlong_share={a.overlong_share} is a share of max_tokens: 0 (off) to 1, DAPO's is 0.2"


def bad_names(a: "Algorithm") -> Iterator[str]:
    """Functions with a parameter that nobody gives them."""
    for axis, offered in OFFERED.items():
        if (function := getattr(a, axis)) is None:
            continue
        names = WITHOUT_RATIO if axis == "surrogate" and a.level == "none" else offered
        for name, parameter in parameters(function).items():
            if parameter.default is not parameter.empty or parameter.kind == parameter.VAR_KEYWORD or name in names:
                continue
            if name in offered:
                yield (
                    f"algo.level=none, but algo.surrogate ({name_of(function)}) needs the {name}: take "
                    "algo/surrogate=reinforce, or algo.level=token"
                )
            yield f"algo.{axis} ({name_of(function)}) wants {name!r}, there is only: {', '.join(names)}"


def bad_axes(a: "Algorithm") -> Iterator[str]:
    """Axes that do not go together."""
    with_ratio = a.kl.place == "loss_with_ratio"
    if a.level == "none" and a.kl.in_loss and with_ratio:
        yield "algo.kl.place=loss_with_ratio, but algo.level=none has no ratio: set algo.kl.place=loss"
    if a.old_policy == "rollout" and a.correction is not None:
        yield (
            "algo.old_policy=rollout puts the engine's mismatch into the ratio, and algo.correction would count it "
            "twice: set algo/correction=none or algo.old_policy=trainer"
        )
    takes_ratio = parameters(a.surrogate).keys() & {"ratio", "log_ratio"}
    if a.level not in ("token", "none") and not takes_ratio and not with_ratio:
        yield (
            f"algo.level={a.level} has no effect: algo.surrogate ({name_of(a.surrogate)}) does not look at the ratio; "
            "set algo.level=none"
        )
    if "rewards" not in parameters(a.advantage):
        for name, is_on in (("overlong_share", a.overlong_share), ("kl.place=reward", a.kl.of_reward)):
            if is_on:
                yield f"algo.{name} changes the reward, and algo.advantage ({name_of(a.advantage)}) does not look at it"


def bad_bounds(a: "Algorithm") -> Iterator[str]:
    """Bounds of `clip` that never act, or always."""
    if getattr(a.surrogate, "func", a.surrogate) is not clip:
        return
    low, high, dual = (parameters(a.surrogate)[name].default for name in ("low", "high", "dual"))
    given, widest = f"algo.surrogate.low={low} high={high}", max(low or 0, high or 0)
    if (low is not None and not 0 < low <= 1) or (high is not None and high <= 0):
        yield f"{given}: they are distances from 1, 0 < low <= 1 and high > 0, as in 0.2 and 0.28; null is no bound"
    if dual is not None and dual <= 1 + (high or 0):
        yield f"algo.surrogate.dual={dual} must be above 1 + high, 3 is usual; null is off"
    if a.level in ("sequence", "sequence_token") and widest >= 0.05:
        yield (
            f"{given} with algo.level={a.level}: a mean over the tokens moves far less than a token's ratio, such bounds "
            "never act; GSPO's are low=3e-4 high=4e-4, or set algo.level=token"
        )
    if a.level in ("token", "sequence_sum") and 0 < widest < 0.005:
        yield (
            f"{given} with algo.level={a.level}: nearly every token would be clipped; such bounds are for "
            "algo.level=sequence, token ratios take 0.2"
        )


def check_rollout(a: "Algorithm", prompts: int, group_size: int, ahead: int = 0) -> None:
    """Raises UserError where `a` does not fit a rollout of prompts x group_size samples, which are `ahead` rollouts old when
    they are learned from, and where a function fails on random numbers. Logs the advice."""
    for line in advice(a):
        log.warning(line)
    sizes = bad_sizes(a, prompts, group_size, ahead)
    for message in chain(sizes, bad_functions(a, prompts, group_size)):
        raise UserError(message)


def bad_sizes(a: "Algorithm", prompts: int, group_size: int, ahead: int) -> Iterator[str]:
    """Sizes that do not fit each other, and samples of older weights that are taken for the policy's own."""
    takes = parameters(a.surrogate).keys()
    compares = takes & {"ratio", "log_ratio", "old_logprobs"}
    knows_age = a.correction is not None or "rollout_logprobs" in takes or (compares and a.old_policy == "rollout")
    if ahead and not knows_age:
        bypass = "algo.old_policy=rollout (the ratio compares with the policy that sampled) or " if compares else ""
        yield (
            f"rollout.ahead={ahead}: the samples are older than the policy, and this objective takes them for its own: set "
            f"{bypass}algo/correction=tis (they count by how likely they have become)"
        )
    rows = prompts * group_size
    if rows % a.num_minibatches:
        valid = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        yield (
            f"algo.num_minibatches={a.num_minibatches} does not divide the {rows} rows of a rollout "
            f"({prompts} prompts x {group_size} samples); valid values: {valid}"
        )
    if group_size == 1 and a.sampling_rounds > 1:
        yield (
            "rollout.group_size=1: a group of one never differs in reward, dynamic sampling would discard them all; "
            "set algo.sampling_rounds=1 or a larger group"
        )


def bad_functions(a: "Algorithm", prompts: int, group_size: int) -> Iterator[str]:
    """The functions of the axes, tried on random numbers."""
    some = partial(torch.rand, (prompts, group_size), generator=torch.Generator().manual_seed(0))
    least = -1.0 if a.overlong_share or a.kl.of_reward else 0.0  # those make rewards negative
    given = {"rewards": some() + least, "lengths": 1 + some(), "parts": defaultdict(some)}
    advantages = tried(a, "advantage", lambda: call(a.advantage, given), (prompts, group_size))
    if group_size == 1 and not advantages.any():
        yield (
            "rollout.group_size=1: advantages compare the samples of one prompt, so at least 2 are needed "
            "(algo=reinforce_pp takes 1)"
        )
    logprobs, batch = random_batch()
    term, logged, _ = tried(a, "surrogate", lambda: a.policy_term(logprobs, batch), (2, 3))
    if a.correction is not None:
        tried(a, "correction", lambda: a.correction(torch.zeros(2, 3), batch.mask), (2, 3))
    if not term.requires_grad:
        yield f"algo.surrogate ({name_of(a.surrogate)}) has no gradient: it must depend on logprobs or ratio"
    for name, values in logged.items():
        if not isinstance(values, Tensor) or values.shape != (2, 3):
            yield f"algo.surrogate ({name_of(a.surrogate)}) says {name!r}, which must be [B, C] like the loss"


def tried(a: "Algorithm", axis: str, attempt: Callable[[], Any], shape: tuple[int, int]) -> Any:
    """The result of the attempt. Raises UserError unless that is, or begins with, a finite tensor of this shape."""
    said = f"algo.{axis} ({name_of(getattr(a, axis))})"
    try:
        result = attempt()
    except UserError:
        raise
    except Exception as error:  # whatever the function of a user raises
        raise UserError(f"{said} fails on random numbers: {type(error).__name__}: {error}") from error
    tensor = result[0] if isinstance(result, tuple) else result
    if not isinstance(tensor, Tensor) or tensor.shape != shape:
        found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise UserError(f"{said} must return a tensor of shape {list(shape)}, and gave {found}")
    if not tensor.isfinite().all():
        raise UserError(f"{said} gives numbers that are not finite on random ones: look at its settings")
    return result


def advice(a: "Algorithm") -> Iterator[str]:
    """What works and is rarely meant, a sentence each."""
    if a.kl.coef and a.kl.estimator == "k1" and a.kl.place == "loss":
        yield (
            "algo.kl: the expected gradient of k1 in the loss is 0 (arXiv 2510.01555), it only adds noise; k2 there, k1 with "
            "place=reward, and k1 or k3 with place=loss_with_ratio pull towards the reference"
        )
    if a.kl.in_reward and a.kl.estimator != "k1":
        yield f"algo.kl: {a.kl.estimator} in the reward does not have the gradient of the KL, k1 does"
    if not a.kl.coef and (a.kl.place, a.kl.estimator, a.kl.target) != ("loss", "k3", "reference"):
        yield "algo.kl.coef=0: there is no KL, and the other keys of algo.kl do nothing"
    if a.level == "none" and a.updates_per_rollout > 1:
        yield (
            f"algo.level=none with {a.updates_per_rollout} updates a rollout: all but the first learn from an older "
            "policy's samples as if they were their own; algo/surrogate=clip algo.level=token weighs them"
        )


def silent_without_advantage(a: "Algorithm") -> bool:
    """Whether the surrogate has no gradient where the advantage is 0. One of a user's may have terms of its own."""
    logprobs, batch = random_batch()
    with torch.enable_grad():
        term, _, _ = a.policy_term(logprobs, replace(batch, advantages=torch.zeros(2, 3)))
        return not torch.autograd.grad(term.sum(), logprobs, materialize_grads=True)[0].any()


def random_batch() -> tuple[Tensor, TokenBatch]:
    """Log-probabilities [2, 3] and what goes with them, to try functions on."""
    logprobs, old, rollout = -torch.rand(3, 2, 3, generator=torch.Generator().manual_seed(0))
    batch = TokenBatch(
        ids=torch.zeros(2, 4, dtype=torch.int64),
        attention_mask=torch.ones(2, 4, dtype=torch.int64),
        mask=torch.ones(2, 3, dtype=torch.bool),
        rollout_logprobs=rollout,
        sample=torch.arange(2),
        advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 3),
        old_logprobs=old,
    )
    return logprobs.requires_grad_(), batch


def name_of(function: Callable) -> str:
    return getattr(function, "func", function).__name__
