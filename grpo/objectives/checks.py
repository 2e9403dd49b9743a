"""Refuses meaningless values of an Algorithm, and meaningless combinations of them, each with a UserError of one line.

`with_functions` finds the functions that an Algorithm names. `check` looks at an Algorithm alone, `check_rollout` at an Algorithm
and the size of a rollout; `advice` names settings that work but are rarely meant. None of this needs a model.
"""

import logging
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from grpo.objectives.arguments import OFFERED, WITHOUT_RATIO, named, parameters
from grpo.objectives.choices import top_entropy
from grpo.objectives.entropy import EntropyBonus
from grpo.objectives.kl import KL
from grpo.objectives.loss import Level, Reduce, clip
from grpo.objectives.surrogates import vespo
from grpo.objectives.trial import check_functions, kl_in_reward
from grpo.rewards.resolve import imported
from grpo.system.errors import UserError
from grpo.system.ranges import accepts, require

if TYPE_CHECKING:
    from grpo.objectives.algorithm import Algorithm

log = logging.getLogger(__name__)


def with_functions(a: "Algorithm") -> dict[str, Any]:
    """Return the fields of `a` that name a function, with that function in place of the name."""
    found: dict[str, Any] = {}
    for axis, kind in (("level", Level), ("reduce", Reduce)):
        if isinstance(value := getattr(a, axis), str) and not accepts(get_args(kind)[0], value):
            found[axis] = imported(value, f"algo.{axis}, the function")
    if a.top_entropy < 1:
        if (a.choice and getattr(a.choice, "func", None)) not in (None, top_entropy):
            raise UserError(
                "algo.top_entropy below 1 is a choice of tokens of its own: set it to 1, or algo/choice=none"
            )
        found["choice"] = partial(top_entropy, share=a.top_entropy)
    return found


def check(a: "Algorithm") -> None:
    """Raises UserError for the first meaningless setting of `a`."""
    for name, kind in (("kl", KL), ("entropy", EntropyBonus)):
        if not isinstance(value := getattr(a, name), kind):
            raise UserError(f"algo.{name}={value} must be a grpo {kind.__name__}: coef 0 switches it off")
    for axis in OFFERED:
        if callable(getattr(a, axis)):
            check_parameters(a, axis)
    check_axes(a)
    _, high, dual = clip_bounds(a)
    if dual is not None and dual <= 1 + (high or 0):
        raise UserError(f"algo.surrogate.dual={dual} must be above 1 + high, 3 is usual; null is off")


def check_parameters(a: "Algorithm", axis: str) -> None:
    """Refuse a function with a parameter for which there is no value, or a value that does not fit its annotation."""
    offered = WITHOUT_RATIO if axis == "surrogate" and a.level == "none" else OFFERED[axis]
    for name, parameter in parameters(getattr(a, axis)).items():
        if parameter.default is not parameter.empty:
            require(f"algo.{axis}.{name}", parameter.default, parameter.annotation)
        if parameter.default is not parameter.empty or parameter.kind == parameter.VAR_KEYWORD or name in offered:
            continue
        if name in OFFERED[axis]:
            fix = "take algo/surrogate=reinforce, or algo.level=token"
            raise UserError(f"algo.level=none, but {named(a, axis)} needs the {name}: {fix}")
        raise UserError(f"{named(a, axis)} needs {name!r}; available are only: {', '.join(offered)}")


def check_axes(a: "Algorithm") -> None:
    """Refuse meaningless combinations of axes."""
    with_ratio = a.kl.place == "loss_with_ratio"
    if a.level == "none" and a.kl.in_loss and with_ratio:
        raise UserError("algo.kl.place=loss_with_ratio, but algo.level=none has no ratio: set algo.kl.place=loss")
    if a.old_policy == "rollout" and a.correction is not None:
        line = "algo.old_policy=rollout puts the engine's mismatch into the ratio, and algo.correction would count it twice"
        raise UserError(f"{line}: set algo/correction=none or algo.old_policy=trainer")
    if a.correction is not None and getattr(a.surrogate, "func", a.surrogate) is vespo:
        line = "algo/surrogate=vespo compares with the policy that sampled, and algo.correction would count that twice"
        raise UserError(f"{line}: set algo/correction=none")
    takes_ratio = parameters(a.surrogate).keys() & {"ratio", "log_ratio"}
    if a.level not in ("token", "none") and not takes_ratio and not with_ratio:
        level = named(a, "level") if callable(a.level) else f"algo.level={a.level}"
        raise UserError(f"{level} has no effect: {named(a, 'surrogate')} does not use the ratio; set algo.level=none")
    if not {"rewards", "steps"} & parameters(a.advantage).keys():
        for name, is_on in (("overlong_share", a.overlong_share), ("kl.place=reward", kl_in_reward(a))):
            if is_on:
                raise UserError(f"algo.{name} changes the reward, but {named(a, 'advantage')} does not use it")


def clip_bounds(a: "Algorithm") -> tuple[float | None, float | None, float | None]:
    """Return low, high and dual of `clip`; None for each if the surrogate is another function."""
    if getattr(a.surrogate, "func", a.surrogate) is not clip:
        return None, None, None
    return tuple(parameters(a.surrogate)[name].default for name in ("low", "high", "dual"))


def check_rollout(a: "Algorithm", prompts: int, group_size: int, ahead: int = 0, critic: bool = False) -> None:
    """Raises UserError if `a` does not fit a rollout of prompts x group_size samples, or if a function fails on random
    numbers. ahead: the age of the samples, in rollouts, when they are learned from. critic: the run has one. Logs the advice."""
    if (used := "values" in parameters(a.advantage)) != critic:
        needs = "needs the values of a critic: set critic=head or critic=model"
        unused = "does not use the values of the critic: set critic=none, or algo/advantage=gae"
        raise UserError(f"{named(a, 'advantage')} {needs if used else unused}")
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
        size = f"{rows} rows of a rollout ({prompts} prompts x {group_size} samples)"
        raise UserError(f"algo.num_minibatches={a.num_minibatches} does not divide the {size}; valid values: {valid}")
    check_functions(a, prompts, group_size)


def check_age(a: "Algorithm", cause: str) -> None:
    """Raise UserError if `a` takes samples of an older policy as the policy's own. cause: the setting that makes them old."""
    takes = parameters(a.surrogate).keys()
    compares = takes & {"ratio", "log_ratio", "old_logprobs"}
    if a.correction is None and "rollout_logprobs" not in takes and not (compares and a.old_policy == "rollout"):
        bypass = "algo.old_policy=rollout (the ratio compares with the policy that sampled) or " if compares else ""
        line = f"{cause}: the samples are older than the policy, and this objective takes them as its own"
        raise UserError(f"{line}: set {bypass}algo/correction=tis (weights by the change of their probability)")


def advice(a: "Algorithm") -> Iterator[str]:
    """Yield a sentence for each setting that works but is rarely meant."""
    low, high, _ = clip_bounds(a)
    given, widest = f"algo.surrogate.low={low} high={high} with algo.level={a.level}", max(low or 0, high or 0)
    if a.level in ("sequence", "sequence_token") and widest >= 0.05:
        line = "a mean over many tokens moves less than a token's ratio, so these bounds may seldom act"
        yield f"{given}: {line}; GSPO's are low=3e-4 high=4e-4, see loss/clip_fraction_low and _high"
    if a.level in ("token", "sequence_sum") and 0 < widest < 0.005:
        yield f"{given}: these bounds may clip nearly every token; 0.2 is usual, or set algo.level=sequence"
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
