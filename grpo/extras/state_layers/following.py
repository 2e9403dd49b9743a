"""The functions by which layers with a state mix tokens, made to follow the plan of a packed row.

transformers computes such a layer with functions of its module: a causal convolution, and a scan that takes a state and returns
another. Projections, gates and norms see one token at a time. So only these functions need to know where a sequence begins: here
they are replaced in the module by ones that look at `PLAN`. Without a plan they are called as they were.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from grpo.extras.state_layers.calls import FINAL, Convolution, Scan
from grpo.extras.state_layers.packed import mixing_of
from grpo.models.packed_attention import PLAN


def follow(model: nn.Module) -> bool:
    """Let the layers of a model that carry a state follow plans, and return whether there are any. Other models of their classes
    then do, too."""
    found = False
    for forward in filter(inspect.isfunction, {inspect.unwrap(type(module).forward) for module in model.modules()}):
        names, file = forward.__code__.co_names, forward.__globals__
        for name, function in ((name, file.get(name)) for name in names):
            if inspect.isfunction(function) and (way := way_of(name, function)):
                file[name] = Following(function, way)
            found |= isinstance(file.get(name), Following)
    return found


def way_of(name: str, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return how a function is computed by plan; None if it mixes no tokens."""
    if name == "mamba_inner_fn" or "split_conv1d" in name:
        return lambda *_: None  # the whole layer as one kernel, which transformers does without where it gets None
    if name.endswith("causal_conv1d_fn"):
        return lambda mixing, function, args, kwargs: mixing.convolve(Convolution(function, args, kwargs))
    if FINAL & {*inspect.signature(function).parameters}:
        return lambda mixing, function, args, kwargs: mixing.scan(Scan(function, args, kwargs))
    return None


class Following:
    """A function of a module of transformers, which follows the plan of the pass if there is one."""

    def __init__(self, function: Callable[..., Any], way: Callable[..., Any]) -> None:
        self.function, self.way = function, way

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mixing = mixing_of(PLAN.get())
        return self.way(mixing, self.function, args, kwargs) if mixing else self.function(*args, **kwargs)
