"""Kernels of liger-kernel (arXiv 2410.10989) for the norms, rotary embeddings and gated MLPs of one model on a GPU.

transformers' `apply_liger_kernel` changes a model, and also the classes and functions of its family, so that the reference would
change too. Here these are restored, and only the modules of the model itself differ. The head has kernels of its own.
"""

import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from inspect import isclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from grpo.extras.kernels.agreement import embedding_gradient, not_parallel
from grpo.extras.kernels.fallback import Replaceable
from grpo.models.adapted import without_adapter
from grpo.models.compiled import reason_of
from grpo.models.logprobs import completion_logprobs
from grpo.models.packing import error_in, few_tokens
from grpo.models.pretrained import Kernels
from grpo.system.distributed import one_pass
from grpo.system.errors import StopError, UserError

log = logging.getLogger(__name__)
LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}  # they would replace the model's own forward
ROTARY = "apply_rotary_pos_emb"


class LigerKernels(Replaceable):
    """Liger's kernels in the policy's modules, which compute as their classes do once they have failed."""

    name, without, code = "Liger", "model.kernels=none", ("liger_kernel/",)
    instead = "norms, rotary embeddings and MLPs are computed by transformers, which is slower on a GPU"


LIGER = LigerKernels()


def takes_liger(wanted: Kernels, gpu: bool, installed: bool) -> bool:
    """Return whether Liger's kernels are to be tried. gpu: the model is on one, or will be. Raises UserError if they are
    wanted and cannot run."""
    if wanted == "liger" and not gpu:
        raise UserError("model.kernels=liger needs a CUDA GPU, and this run has none: set model.kernels=auto")
    if wanted == "liger" and not installed:
        line = "model.kernels=liger needs the package liger-kernel: pip install '.[liger]'"
        raise UserError(f"{line}, or set model.kernels=auto")
    return wanted != "none" and gpu and installed


def is_installed() -> bool:
    """Return whether liger-kernel and what it needs are installed."""
    return find_spec("liger_kernel") is not None and find_spec("triton") is not None


def use_liger(model: nn.Module, wanted: Kernels) -> list[str]:
    """Give a model Liger's kernels if they are wanted, and agree with its own on a few tokens. Returns what they compute: the
    names of classes and functions; none if they are not used, after a warning with the reason if that is not the setting."""
    if LIGER.failed or not takes_liger(wanted, next(model.parameters()).is_cuda, is_installed()):
        return []
    try:
        exact = on_few_tokens(model)
        names, undo = patched(model)
    except (torch.OutOfMemoryError, StopError):
        raise
    except Exception as error:  # a package may raise anything
        log.warning("model.kernels: Liger's kernels are not used: %s", reason_of(error))
        return []
    if names and not (why := objection_to(model, exact)):
        fall_back(model)
        return names
    undo()
    log.warning(
        "model.kernels: Liger's kernels are not used for %s: %s",
        type(model).__name__,
        why if names else f"it has none for the type {model.config.model_type}",
    )
    return []


def fall_back(model: nn.Module) -> None:
    """Let each module of a model that has Liger's kernels compute as its class does once these have failed."""
    for module in without_adapter(model).modules():
        if isinstance(forward := vars(module).get("forward"), MethodType):
            module.forward = MethodType(until_it_fails(forward.__func__), module)


def until_it_fails(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward with Liger's kernels, and that of its class once they have failed."""

    def chosen(self, *args, **kwargs):
        if not LIGER.failed:
            try:
                return forward(self, *args, **kwargs)
            except Exception as error:
                # with a gradient the whole update is made again, since modules before this one are recomputed
                if torch.is_grad_enabled() or not LIGER.raised(error):
                    raise
                LIGER.fail(error)
        return type(self).forward(self, *args, **kwargs)

    return chosen


def on_few_tokens(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of a few tokens, without autocast, and the gradient of the embedded tokens."""
    batch = few_tokens(model)
    with torch.no_grad(), torch.autocast(batch.ids.device.type, enabled=False):
        logprobs, _ = one_pass(model, completion_logprobs, batch, 1.0)
    return logprobs[batch.mask], embedding_gradient(model, "padded", None)


def objection_to(model: nn.Module, exact: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Return why a model's kernels must not be used, against the numbers without them; empty if they agree."""
    try:
        logprobs, gradient = on_few_tokens(model)
    except (torch.OutOfMemoryError, StopError):
        raise
    except Exception as error:  # a compiler may raise anything
        return reason_of(error)
    return error_in(model, logprobs, exact[0]) or not_parallel(gradient, exact[1])


def patched(model: nn.Module) -> tuple[list[str], Callable[[], None]]:
    """Give the modules of a model Liger's kernels. Returns the names of what these compute, and a function that removes them."""
    base = without_adapter(model)
    before = {module: dict(vars(module)) for module in base.modules()}
    shared = {owner: dict(vars(owner)) for owner in shared_by(base)}
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # of kernels for other hardware
    try:
        apply_liger(base)
        rotary = {owner: vars(owner).get(ROTARY) for owner in shared if not isclass(owner)}
    finally:
        for owner, values in shared.items():
            restore(owner, values)
    for module in base.modules():
        owner = sys.modules[type(module).__module__]
        own, new = vars(owner).get(ROTARY), rotary.get(owner)
        forward = getattr(type(module), "forward", None)
        if new is not own and ROTARY in getattr(getattr(forward, "__code__", None), "co_names", ()):
            module.forward = MethodType(with_globals(forward, {ROTARY: new}), module)
    changed = [module for module, values in before.items() if vars(module).keys() != values.keys()]
    names = sorted({type(module).__name__ for module in changed})

    def undo() -> None:
        for module in changed:
            vars(module).clear()
            vars(module).update(before[module])

    return names, undo


def apply_liger(model: nn.Module) -> None:
    """Change a model and its family as transformers does, without the losses."""
    from transformers.integrations.liger import apply_liger_kernel  # imports peft

    apply_liger_kernel(model, LOSSES)


def shared_by(model: nn.Module) -> list[Any]:
    """Return the modules of Python in which the parts of a model are defined, and the classes that are defined there."""
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    files = [file for file in files if file.__name__.startswith("transformers.")]
    return [*files, *{each for file in files for each in vars(file).values() if isclass(each)}]


def restore(owner: Any, values: dict[str, Any]) -> None:
    """Give a module of Python or a class the attributes that it had."""
    for name, now in list(vars(owner).items()):
        if name not in values:
            delattr(owner, name)
        elif now is not values[name]:
            setattr(owner, name, values[name])


def with_globals(function: FunctionType, changed: dict[str, Any]) -> FunctionType:
    """Return a function that sees other globals."""
    own = function.__globals__ | changed
    twin = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
