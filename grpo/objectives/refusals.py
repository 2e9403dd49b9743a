"""Refuses an Algorithm that has no meaning, with a UserError of one line.

A line has the names of Python, such as `Algorithm.level`; the command line writes its keys there (`names` in
grpo/config/keys.yaml). Nothing here needs a model. In each function `a` is an Algorithm, without the type, since algorithm.py
imports this file. `check_axes` is called for every Algorithm. grpo/apps/try_algorithm.py refuses one that does not fit a rollout,
or whose functions fail.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from grpo.objectives.arguments import OFFERED, WITHOUT_RATIO, function_name, lacking, named, parameters, too_old
from grpo.objectives.entropy import EntropyBonus
from grpo.objectives.kl import KL
from grpo.objectives.loss import clip
from grpo.system.errors import UserError

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
    if not weighs(a):
        line = "the ratio is then a root of policy / rollout policy, and a correction has the rest"
        yield f"{cause}: {line}: set Algorithm.correction=tis, or Algorithm.old_policy=rollout"
    if not uses_ratio(a):
        line = f"{named('surrogate', a.surrogate)} has no ratio, and Algorithm.correction alone is a part of its weight"
        yield f"{cause}: {line}: {fix}"
    taught = any(term.needs_old for term in a.others)
    needs = {f"KL.place={a.kl.place}": a.kl.in_reward, "the advantage": a.freezes_first, "the teacher's part": taught}
    for name in [name for name, is_on in needs.items() if is_on]:
        yield f"{cause}: {name} needs the old policy, which is not known before the update: {fix}"


def weighs(a: Any) -> bool:
    """Return whether a correction weighs tokens by old policy / rollout policy. `weighs = False`: it only leaves some out."""
    return a.correction is not None and getattr(getattr(a.correction, "func", a.correction), "weighs", True)


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


# -- an Algorithm and the age of its samples


def check_age(a: Any, cause: str) -> None:
    """Raise UserError if `a` takes samples of an older policy as the policy's own. cause: the setting that makes them old."""
    for term in a.others:
        term.check_age(a, cause)
    line = too_old(cause, parameters(a.surrogate), weighs(a), a.old_policy)
    if a.policy_coef and line:
        raise UserError(line)
