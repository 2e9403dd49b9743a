"""Refusals: values of an Algorithm, and combinations of them, that have no meaning. One line each, raised as UserError.

`check` looks at an Algorithm alone, `check_rollout` at an Algorithm and the size of a rollout; `advice` names what works and is
rarely meant. All of it needs no model.
"""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from grpo.objectives.arguments import OFFERED, WITHOUT_RATIO, named, parameters
from grpo.objectives.entropy import EntropyBonus
from grpo.objectives.kl import KL
from grpo.objectives.loss import Level, Reduce, clip
from grpo.objectives.trial import check_functions
from grpo.system.errors import UserError, oneof

if TYPE_CHECKING:
    from grpo.objectives.algorithm import Algorithm

log = logging.getLogger(__name__)


def check(a: "Algorithm") -> None:
    """Raises UserError for the first thing about `a` that has no meaning."""
    oneof("algo.level", a.level, get_args(Level))
    oneof("algo.reduce", a.reduce, get_args(Reduce))
    oneof("algo.old_policy", a.old_policy, ("trainer", "rollout"))
    check_values(a)
    for axis in OFFERED:
        if getattr(a, axis) is not None:
            check_parameters(a, axis)
    check_axes(a)
    if getattr(a.surrogate, "func", a.surrogate) is clip:
        check_clip(a.level, *(parameters(a.surrogate)[name].default for name in ("low", "high", "dual")))


def check_values(a: "Algorithm") -> None:
    for name in ("num_epochs", "num_minibatches", "sampling_rounds", "max_tokens"):
        if not isinstance(value := getattr(a, name), int) or value < 1:
            raise UserError(f"algo.{name}={value} must be a whole number, at least 1")
    for name in ("whiten", "mask_truncated"):
        if not isinstance(value := getattr(a, name), bool):
            raise UserError(f"algo.{name}={value} must be true or false")
    for name, kind in (("kl", KL), ("entropy", EntropyBonus)):
        if not isinstance(value := getattr(a, name), kind):
            raise UserError(f"algo.{name}={value} must be a grpo {kind.__name__}: coef 0 switches it off")
    if (delta := a.off_policy_delta) is not None and (not isinstance(delta, int | float) or delta <= 0):
        raise UserError(f"algo.off_policy_delta={delta} must be a number above 0, or null")
    if not 0 < a.top_entropy <= 1:
        raise UserError(f"algo.top_entropy={a.top_entropy} is a share of the tokens: above 0, and 1 for all of them")
    if not 0 <= a.overlong_share <= 1:
        raise UserError(f"algo.overlong_share={a.overlong_share} is a share of max_tokens: 0 (off) to 1, DAPO's is 0.2")


def check_parameters(a: "Algorithm", axis: str) -> None:
    offered = WITHOUT_RATIO if axis == "surrogate" and a.level == "none" else OFFERED[axis]
    for name, parameter in parameters(getattr(a, axis)).items():
        if parameter.default is not parameter.empty or parameter.kind == parameter.VAR_KEYWORD or name in offered:
            continue
        if name in OFFERED[axis]:
            raise UserError(
                f"algo.level=none, but {named(a, axis)} needs the {name}: take algo/surrogate=reinforce, or algo.level=token"
            )
        raise UserError(f"{named(a, axis)} wants {name!r}, there is only: {', '.join(offered)}")


def check_axes(a: "Algorithm") -> None:
    with_ratio = a.kl.place == "loss_with_ratio"
    if a.level == "none" and a.kl.in_loss and with_ratio:
        raise UserError("algo.kl.place=loss_with_ratio, but algo.level=none has no ratio: set algo.kl.place=loss")
    if a.old_policy == "rollout" and a.correction is not None:
        raise UserError(
            "algo.old_policy=rollout puts the engine's mismatch into the ratio, and algo.correction would count it twice: set "
            "algo/correction=none or algo.old_policy=trainer"
        )
    takes_ratio = parameters(a.surrogate).keys() & {"ratio", "log_ratio"}
    if a.level not in ("token", "none") and not takes_ratio and not with_ratio:
        raise UserError(
            f"algo.level={a.level} has no effect: {named(a, 'surrogate')} does not look at the ratio; set algo.level=none"
        )
    if "rewards" not in parameters(a.advantage):
        for name, is_on in (("overlong_share", a.overlong_share), ("kl.place=reward", a.kl.of_reward)):
            if is_on:
                raise UserError(f"algo.{name} changes the reward, and {named(a, 'advantage')} does not look at it")


def check_clip(level: Level, low: float | None, high: float | None, dual: float | None) -> None:
    given, widest = f"algo.surrogate.low={low} high={high}", max(low or 0, high or 0)
    if (low is not None and not 0 < low <= 1) or (high is not None and high <= 0):
        raise UserError(f"{given}: they are distances from 1, 0 < low <= 1 and high > 0, as 0.2; null is no bound")
    if dual is not None and dual <= 1 + (high or 0):
        raise UserError(f"algo.surrogate.dual={dual} must be above 1 + high, 3 is usual; null is off")
    if level in ("sequence", "sequence_token") and widest >= 0.05:
        raise UserError(
            f"{given} with algo.level={level}: a mean over the tokens moves far less than a token's ratio, such bounds never "
            "act; GSPO's are low=3e-4 high=4e-4, or set algo.level=token"
        )
    if level in ("token", "sequence_sum") and 0 < widest < 0.005:
        raise UserError(
            f"{given} with algo.level={level}: nearly every token would be clipped; take 0.2, or algo.level=sequence"
        )


def check_rollout(a: "Algorithm", prompts: int, group_size: int, ahead: int = 0) -> None:
    """Raises UserError where `a` does not fit a rollout of prompts x group_size samples, which are `ahead` rollouts old when
    they are learned from, and where a function fails on random numbers. Logs the advice."""
    for line in advice(a):
        log.warning(line)
    takes = parameters(a.surrogate).keys()
    compares = takes & {"ratio", "log_ratio", "old_logprobs"}
    knows_age = a.correction is not None or "rollout_logprobs" in takes or (compares and a.old_policy == "rollout")
    if ahead and not knows_age:
        bypass = "algo.old_policy=rollout (the ratio compares with the policy that sampled) or " if compares else ""
        raise UserError(
            f"rollout.ahead={ahead}: the samples are older than the policy, and this objective takes them for its own: set "
            f"{bypass}algo/correction=tis (they count by how likely they have become)"
        )
    rows = prompts * group_size
    if rows % a.num_minibatches:
        valid = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        raise UserError(
            f"algo.num_minibatches={a.num_minibatches} does not divide the {rows} rows of a rollout ({prompts} prompts x "
            f"{group_size} samples); valid values: {valid}"
        )
    if group_size == 1 and a.sampling_rounds > 1:
        raise UserError("rollout.group_size=1: dynamic sampling would discard every group; set algo.sampling_rounds=1")
    check_functions(a, prompts, group_size)


def advice(a: "Algorithm") -> Iterator[str]:
    """Settings that work and are rarely meant, a sentence each."""
    if a.kl.coef and a.kl.estimator == "k1" and a.kl.place == "loss":
        yield (
            "algo.kl: the expected gradient of k1 in the loss is 0 (arXiv 2510.01555); k2 there, k1 with place=reward, and k1 "
            "or k3 with place=loss_with_ratio pull towards the reference"
        )
    if a.kl.in_reward and a.kl.estimator != "k1":
        yield f"algo.kl: {a.kl.estimator} in the reward does not have the gradient of the KL, k1 does"
    if not a.kl.coef and (a.kl.place, a.kl.estimator, a.kl.target) != ("loss", "k3", "reference"):
        yield "algo.kl.coef=0: there is no KL, and the other keys of algo.kl do nothing"
    if a.level == "none" and a.updates_per_rollout > 1:
        yield (
            f"algo.level=none with {a.updates_per_rollout} updates a rollout: all but the first learn from an older policy's "
            "samples as if they were their own; algo/surrogate=clip algo.level=token weighs them"
        )
