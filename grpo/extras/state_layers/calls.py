"""Calls of the functions by which layers with a state mix tokens: a causal convolution, a scan; of other tokens than they were
called with.

Shapes: T tokens in a packed row; n sequences of L tokens; D channels; N numbers of state for each channel.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# arguments that have a value for each token; of transformers' functions and of the kernels that replace them
OF_TOKENS = {"query", "key", "value", "g", "beta", "hidden_states", "dt", "B", "C", "z"}
INITIAL = {"initial_state", "initial_states"}
FINAL = {"output_final_state", "return_final_states", "return_last_state"}


class MixingCall:
    """A function with its arguments, without those that it does not know. Positions stay positions: kernels have other names."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.parameters = function, inspect.signature(function).parameters
        self.places = [*self.parameters][: len(args)]
        named = {name: value for name, value in kwargs.items() if name in self.parameters}
        self.given: dict[str, Any] = dict(zip(self.places, args, strict=True)) | named

    def __call__(self, **changed: Any) -> Any:
        given = self.given | changed
        return self.function(*[given.pop(name) for name in self.places], **given)


class Convolution(MixingCall):
    """A causal convolution of each channel. x: [1, D, T]. width: the tokens that it sees, the present one included."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(function, args, kwargs)
        self.name = next(iter(self.parameters))
        self.x, self.width = self.given[self.name], self.given["weight"].shape[-1]

    def of(self, x: Tensor) -> Tensor:
        """Return the convolution of other tokens, [n, D, L], with zeros before the first."""
        return self(**{self.name: x})


class Scan(MixingCall):
    """A recurrence over tokens: a state, changed by each token, from which its output is read."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(function, args, kwargs)
        [self.final] = FINAL & {*self.parameters}
        self.initial = next(iter(INITIAL & {*self.parameters}), None)
        self.axis = 2 if self.final == "return_last_state" else 1  # of tokens
        self.of_tokens = {k: v for k, v in self.given.items() if k in OF_TOKENS and isinstance(v, Tensor)}
        self.takes_state = self.initial is not None  # and gives it a gradient

    def at(self, places: Tensor, padding: Tensor) -> dict[str, Tensor]:
        """Return the arguments of these tokens. places: [n, L]; padding: [n, L] bool, of places that get zeros."""
        found = {}
        for name, x in self.of_tokens.items():
            x = x[0].movedim(self.axis - 1, 0)  # [T, ...]
            x = x.index_select(0, places.flatten()).view(*places.shape, *x.shape[1:])
            x = x.masked_fill(padding.view(*padding.shape, *[1] * (x.ndim - 2)), 0.0)
            found[name] = x.movedim(1, self.axis)
        return found

    def of(self, tokens: dict[str, Tensor], state: Tensor | None = None, final: bool = False) -> tuple[Tensor, Any]:
        """Return the outputs of these tokens, [n, L, ...], and the state after them if final. state: before them; None: zeros."""
        changed: dict[str, Any] = tokens | {self.final: final}
        any_of_them = next(iter(tokens.values()))
        if "chunk_size" in self.parameters and any_of_them.device.type == "cpu":
            # a chunk is padded to its size, and a Mamba computes all pairs in it
            size, length = self.parameters["chunk_size"].default, any_of_them.shape[self.axis]
            changed["chunk_size"] = min(self.given.get("chunk_size", size), 1 << (length - 1).bit_length())
        if self.takes_state:
            changed[self.initial] = state
        result = self(**changed)
        out, after = result if isinstance(result, tuple) else (result, None)
        if state is not None and not self.takes_state:
            out, after = self.carried(tokens, state, out, after)
        return out.movedim(self.axis, 1), after

    def result(self, out: Tensor) -> Any:
        """Return what the layer expects of outputs, [1, T, ...]: some functions return a state, too, which it then ignores."""
        out = out.movedim(1, self.axis)
        return (out, None) if self.final == "output_final_state" else out

    def carried(self, tokens: dict[str, Tensor], state: Tensor, out: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Add what a state before them does to the outputs [n, D, L] and the last state [n, D, N] of a Mamba, which are linear
        in it. For sampling: mamba_ssm gives the state after a prompt no gradient."""
        steps, A, bias = tokens["dt"], self.given["A"], self.given.get("delta_bias")
        steps = steps if bias is None else steps + bias.to(steps.dtype)[:, None]
        steps = F.softplus(steps) if self.given.get("delta_softplus") else steps
        left = torch.exp(A[:, None] * steps.float().cumsum(-1)[..., None])  # [n, D, L, N]
        read = torch.einsum("ndls,nds,nsl->ndl", left, state.float(), tokens["C"].float())
        read = read * F.silu(tokens["z"].float()) if "z" in tokens else read
        return out + read.to(out.dtype), after + (left[:, :, -1] * state).to(after.dtype)
