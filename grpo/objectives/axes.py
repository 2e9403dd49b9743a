"""Refuses meaningless settings of an Algorithm, and meaningless combinations of its axes, each with a UserError of one line.

Every Algorithm is checked when it is made. In each function `a` is an Algorithm, without the type, since algorithm.py imports
this file.
"""

from typing import Any

from grpo.objectives.arguments import OFFERED, WITHOUT_RATIO, function_name, lacking, named, parameters
from grpo.objectives.entropy import EntropyBonus
from grpo.objectives.kl import KL
from grpo.objectives.loss import clip
from grpo.system.errors import UserError


def check_axes(a: Any) -> None:
    """Raises UserError for the first meaningless setting of `a`."""
    for name, kind in (("kl", KL), ("entropy", EntropyBonus)):
        if not isinstance(value := getattr(a, name), kind):
            raise UserError(f"algo.{name}={value} must be a grpo {kind.__name__}: coef 0 switches it off")
    for axis in OFFERED:
        if callable(getattr(a, axis)):
            check_parameters(a, axis)
    check_combinations(a)
    _, high, dual = clip_bounds(a)
    if dual is not None and dual <= 1 + (high or 0):
        raise UserError(f"algo.surrogate.dual={dual} must be above 1 + high, 3 is usual; null is off")


def check_parameters(a: Any, axis: str) -> None:
    """Refuse a function with a parameter for which there is no value, or a value that does not fit its annotation."""
    offered = WITHOUT_RATIO if axis == "surrogate" and a.level == "none" else OFFERED[axis]
    function = getattr(a, axis)
    for name in lacking(axis, function, offered):
        if name in OFFERED[axis]:
            fix = "take algo/surrogate=reinforce, or algo.level=token"
            raise UserError(f"algo.level=none, but {named(axis, function)} needs the {name}: {fix}")
        raise UserError(f"{named(axis, function)} needs {name!r}; available are only: {', '.join(offered)}")


def check_combinations(a: Any) -> None:
    """Refuse meaningless combinations of axes."""
    with_ratio = a.kl.place == "loss_with_ratio"
    if a.level == "none" and a.kl.in_loss and with_ratio:
        raise UserError("algo.kl.place=loss_with_ratio, but algo.level=none has no ratio: set algo.kl.place=loss")
    if a.old_policy == "rollout" and a.correction is not None:
        line = "algo.old_policy=rollout puts the engine's mismatch into the ratio, and algo.correction would count it twice"
        raise UserError(f"{line}: set algo/correction=none or algo.old_policy=trainer")
    if a.old_policy == "between":
        check_between(a)
    if a.correction is not None and getattr(getattr(a.surrogate, "func", a.surrogate), "weighs_rollout", False):
        name = f"algo/surrogate={function_name(a.surrogate)}"
        line = f"{name} compares with the policy that sampled, and algo.correction would count that twice"
        raise UserError(f"{line}: set algo/correction=none")
    takes_ratio = parameters(a.surrogate).keys() & {"ratio", "log_ratio"}
    if a.level not in ("token", "none") and not takes_ratio and not with_ratio:
        level = named("level", a.level) if callable(a.level) else f"algo.level={a.level}"
        raise UserError(
            f"{level} has no effect: {named('surrogate', a.surrogate)} does not use the ratio; set algo.level=none"
        )
    if not (a.policy_coef or a.others):
        raise UserError("algo.policy_coef=0, and no other part of the loss has a weight: nothing would be learned")
    if not {"rewards", "steps"} & parameters(a.advantage).keys():
        for name, is_on in (("overlong_share", a.overlong_share), ("kl.place=reward", kl_in_reward(a))):
            if is_on:
                raise UserError(
                    f"algo.{name} changes the reward, but {named('advantage', a.advantage)} does not use it"
                )


def check_between(a: Any) -> None:
    """Refuse old_policy=between where only a part of pi / mu would count, or where the old policy is needed before the loss."""
    if a.correction is None:
        line = "the ratio is then a root of policy / rollout policy, and a correction has the rest"
        raise UserError(f"algo.old_policy=between: {line}: set algo/correction=tis, or algo.old_policy=rollout")
    if not {"ratio", "log_ratio"} & parameters(a.surrogate).keys():
        line = f"{named('surrogate', a.surrogate)} has no ratio, and algo.correction alone is a part of its weight"
        raise UserError(f"algo.old_policy=between: {line}: set algo.old_policy=trainer")
    needs = {
        "algo.kl.place=" + a.kl.place: a.kl.in_reward,
        "the advantage": a.freezes_first,
        "the teacher's part": any(term.needs_old for term in a.others),
    }
    for name in [name for name, is_on in needs.items() if is_on]:
        line = f"{name} needs the old policy, which is not known before the update"
        raise UserError(f"algo.old_policy=between: {line}: set algo.old_policy=trainer")


def clip_bounds(a: Any) -> tuple[float | None, float | None, float | None]:
    """Return low, high and dual of `clip`; None for each if the surrogate is another function."""
    if getattr(a.surrogate, "func", a.surrogate) is not clip:
        return None, None, None
    return tuple(parameters(a.surrogate)[name].default for name in ("low", "high", "dual"))


def kl_in_reward(a: Any) -> bool:
    """Return whether the KL enters the rewards of samples, not those of tokens."""
    return a.kl.in_reward and a.kl.place == "reward"
