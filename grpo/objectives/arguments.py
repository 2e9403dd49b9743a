"""How an Algorithm calls the functions of its axes: each gets the values that its parameters name.

So a new advantage, surrogate or correction is one function, and says by its parameters what it needs.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

WITHOUT_RATIO = ("logprobs", "rollout_logprobs", "advantages", "mask")
OFFERED = {  # to the function of each axis
    "advantage": ("rewards", "lengths", "parts"),
    "surrogate": ("ratio", "log_ratio", "old_logprobs", *WITHOUT_RATIO),
    "correction": ("log_w", "mask"),
}


def parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def call(function: Callable, given: Mapping[str, Any]) -> Any:
    """The function, called with those of the `given` values that it has parameters for."""
    return function(**{name: value for name, value in given.items() if name in parameters(function)})


def named(algorithm: Any, axis: str) -> str:
    """The key and the function of an axis, as `algo.surrogate (clip)`."""
    function = getattr(algorithm, axis)
    return f"algo.{axis} ({getattr(function, 'func', function).__name__})"
