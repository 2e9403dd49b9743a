"""How an Algorithm calls the functions of its axes: each gets the values that its parameters name.

A new advantage, surrogate or correction is therefore one function, whose parameters name the values that it needs.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, get_args

from grpo.rewards.resolve import imported
from grpo.system.errors import UserError
from grpo.system.ranges import accepts, require

WITHOUT_RATIO = ("logprobs", "rollout_logprobs", "advantages", "mask", "counted", "sample", "group")
# an advantage with `mask` is of tokens
OF_TOKENS = ("mask", "sample", "turn", "old_logprobs", "values", "prob_squares")
OFFERED = {  # values for the function of each axis; of level and reduce only for one of your own
    "advantage": ("rewards", "lengths", "parts", "steps", "progress", "examples", "observations", *OF_TOKENS),
    "surrogate": ("ratio", "log_ratio", "old_logprobs", *WITHOUT_RATIO),
    "choice": ("logprobs", "entropy", "advantages", "rng"),
    "correction": ("log_w", "mask", "old_logprobs", "rollout_logprobs", "staleness"),
    "level": ("log_ratio", "mask"),
    "reduce": ("mask", "sample", "group", "lengths", "samples", "tokens", "count", "max_tokens", "total"),
}


def parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, by name."""
    return inspect.signature(function).parameters


def call(axis: str, function: Callable, offered: Mapping[str, Any]) -> Any:
    """Call the function of an axis with the offered values that its parameters name. Where it raises a UserError, which names an
    argument, the key of the axis comes first."""
    names = parameters(function)
    try:
        return function(**{name: value for name, value in offered.items() if name in names})
    except UserError as error:
        raise UserError(f"{named(axis, function)}: {error}") from error


def lacking(axis: str, function: Callable, offered: Iterable[str]) -> Iterator[str]:
    """Yield the parameters of a function for which there is no value. Raises UserError for a default, which a setting may have
    changed, that does not fit its annotation."""
    for name, parameter in parameters(function).items():
        if parameter.default is not parameter.empty:
            require(f"Algorithm.{axis}.{name}", parameter.default, parameter.annotation)
        elif parameter.kind != parameter.VAR_KEYWORD and name not in offered:
            yield name


def named(axis: str, function: Callable) -> str:
    """Return the key and the function of an axis, such as `Algorithm.surrogate (clip)`."""
    return f"Algorithm.{axis} ({function_name(function)})"


def function_name(function: Callable) -> str:
    """Return the name of a function, or of the class of an object that is called like one."""
    function = getattr(function, "func", function)  # of a partial
    return getattr(function, "__name__", type(function).__name__)


def too_old(cause: str, takes: Collection[str], corrected: bool, old_policy: str) -> str:
    """Return the line about samples of an older policy that a surrogate takes as the policy's own, "" if it does not. cause: the
    setting that makes them old. takes: the names of its parameters. corrected: whether a correction weighs its loss."""
    compares = not {"ratio", "log_ratio", "old_logprobs"}.isdisjoint(takes)
    if corrected or (old_policy == "rollout" if compares else "rollout_logprobs" in takes):
        return ""
    line = f"{cause}: the samples are older than the policy, and this objective takes them as its own"
    bypass = "Algorithm.old_policy=rollout (the ratio compares with the policy that sampled) or " if compares else ""
    return f"{line}: set {bypass}Algorithm.correction=tis (weights by the change of their probability)"


def function_of(axis: str, value: Any, kind: Any) -> Any:
    """Return the function that a value of the axis names, if it is a text that names one; else the value. kind: a union of the
    axis's own words and FunctionName."""
    words, _ = get_args(kind)
    is_name = isinstance(value, str) and not accepts(words, value)
    return imported(value, f"Algorithm.{axis}, the function") if is_name else value
