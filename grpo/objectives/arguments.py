"""How an Algorithm calls the functions of its axes: each gets the values that its parameters name.

A new advantage, surrogate or correction is therefore one function, whose parameters name the values that it needs.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

WITHOUT_RATIO = ("logprobs", "rollout_logprobs", "advantages", "mask", "counted", "sample", "group")
OF_TOKENS = (
    "mask",
    "sample",
    "turn",
    "old_logprobs",
    "values",
    "prob_squares",
)  # an advantage with `mask` is of tokens
OFFERED = {  # values for the function of each axis; of level and reduce only for one of your own
    "advantage": ("rewards", "lengths", "parts", "steps", "progress", "examples", "observations", *OF_TOKENS),
    "surrogate": ("ratio", "log_ratio", "old_logprobs", *WITHOUT_RATIO),
    "choice": ("logprobs", "entropy", "advantages", "rng"),
    "correction": ("log_w", "mask", "old_logprobs", "rollout_logprobs"),
    "level": ("log_ratio", "mask"),
    "reduce": ("mask", "sample", "lengths", "samples", "tokens", "count", "max_tokens", "total"),
}


def parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function, by name."""
    return inspect.signature(function).parameters


def call(function: Callable, given: Mapping[str, Any]) -> Any:
    """Call the function with the `given` values that its parameters name."""
    wanted = parameters(function)
    return function(**{name: value for name, value in given.items() if name in wanted})


def named(algorithm: Any, axis: str) -> str:
    """Return the key and the function of an axis, such as `algo.surrogate (clip)`."""
    function = getattr(algorithm, axis)
    function = getattr(function, "func", function)
    return f"algo.{axis} ({getattr(function, '__name__', type(function).__name__)})"
