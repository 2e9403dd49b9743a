"""Autocast of a pretended device, by CUDA's lists: which operations compute in 16 bits, and which in float32.

It casts what Python calls. C++ code of torch, backward passes among it, takes what it gets, so that a sum of a backward pass is
added up in 16 bits, where CUDA's would be float32. The cache of casts is not there: the project's runs have none.
"""

import threading
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LOW = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "addr", "einsum",
    "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d", "prelu", "chain_matmul",
}  # fmt: skip
HIGH = {
    "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "__pow__", "__rpow__", "reciprocal", "rsqrt", "softplus", "sum",
    "prod", "cumsum", "cumprod", "softmax", "log_softmax", "logsumexp", "norm", "layer_norm", "group_norm", "cosine_similarity",
    "cdist", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "nll_loss",
}  # fmt: skip


class Of(threading.local):
    """The autocasts that a thread is in, the innermost last: None for one that is off."""

    def __init__(self) -> None:
        self.inside: list[torch.dtype | None] = [None]


NOW = Of()


class Casting(TorchFunctionMode):
    """Casts the arguments of operations that the device's autocast knows."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name, low = kwargs or {}, getattr(function, "__name__", ""), NOW.inside[-1]
        if low is None or "out" in kwargs or kwargs.get("out_dtype") is not None:
            return function(*args, **kwargs)
        if name in LOW:
            args, kwargs = cast(args, low, True), cast(kwargs, low, True)
        elif name in HIGH and kwargs.get("dtype") is None:
            args = cast(args, torch.float32, False)
        return function(*args, **kwargs)


def cast(x: Any, dtype: torch.dtype, lowers: bool) -> Any:
    """Return x with its floating tensors of the device in another number type. lowers: float32 ones, too."""
    if isinstance(x, Tensor):
        known = x.is_floating_point() and x.dtype != torch.float64 and x.device.type == "lazy"
        return x.to(dtype) if known and (lowers or x.dtype != torch.float32) else x
    if isinstance(x, dict):
        return {key: cast(value, dtype, lowers) for key, value in x.items()}
    return type(x)(cast(part, dtype, lowers) for part in x) if type(x) in (list, tuple) else x


class Autocast:
    """torch.autocast of the pretended device."""

    def __init__(
        self, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        self.low, self.mode = (dtype or torch.bfloat16) if enabled else None, Casting()

    def __enter__(self) -> None:
        NOW.inside.append(self.low)
        if (
            self.low is not None
        ):  # in an autocast, too: a backward pass that recomputes layers runs without the mode around it
            self.mode.__enter__()

    def __exit__(self, *given: Any) -> None:
        if self.low is not None:
            self.mode.__exit__(*given)
        NOW.inside.pop()


def autocast(ours: str, device_type: str, *given: Any, **named: Any) -> Any:
    """Return the autocast of a type of device. ours: the pretended one."""
    if device_type == ours:
        return Autocast(*given, **named)
    return torch.amp.autocast_mode.autocast(device_type, *given, **named)


def is_on() -> bool:
    """Return whether this thread is in an autocast of the device."""
    return NOW.inside[-1] is not None


def lowered() -> torch.dtype:
    """Return the number type of this thread's autocast."""
    return NOW.inside[-1] or torch.bfloat16
