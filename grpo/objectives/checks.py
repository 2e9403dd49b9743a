"""Refusals: values of an Algorithm, and combinations of them, that have no meaning. One line each, raised as UserError.

`check` looks at an Algorithm alone, `check_rollout` at an Algorithm and the size of a rollout; `advice` names what works and is
rarely meant. All of it needs no model.
"""

import logging
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, get_args

from grpo.objectives.arguments import OFFERED, WITHOUT_RATIO, name_of, parameters
from grpo.objectives.entropy import EntropyBonus
from grpo.objectives.kl import KL
from grpo.objectives.loss import Level, Reduce, clip
from grpo.objectives.trial import bad_functions
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
    for message in chain(bad_sizes(a, prompts, group_size, ahead), bad_functions(a, prompts, group_size)):
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


def advice(a: "Algorithm") -> Iterator[str]:
    """Settings that work and are rarely meant, a sentence each."""
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
