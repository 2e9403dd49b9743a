"""Checks a model after transformers has loaded it, which only warns where a checkpoint and its model differ."""

from collections.abc import Iterable, Mapping
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from grpo.system.distributed import local
from grpo.system.errors import UserError, plural

# arguments of from_pretrained: report, do not raise
STRICT = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def fully_loaded(what: str, loaded: tuple[nn.Module, Mapping[str, Any]]) -> nn.Module:
    """Return a model that was loaded with STRICT. Raises UserError if a weight is missing, has another shape or is not finite.

    what: the model in words. Buffers and tied weights may be missing: the model makes them from its configuration.
    """
    model, report = loaded
    ours = {name for name, _ in model.named_parameters()}
    shapes = [f"{name} {[*stored]} instead of {[*needed]}" for name, stored, needed in report["mismatched_keys"]]
    unknown = f"; it has unknown ones: {_few(report['unexpected_keys'])}" if report["unexpected_keys"] else ""
    fix = "the checkpoint does not fit its config.json, or is incomplete: download or save it again"
    if missing := ours & {*report["missing_keys"]}:
        raise UserError(f"{what} lacks {plural(len(missing), 'weight')}: {_few(missing)}{unknown}; {fix}")
    if shapes:
        raise UserError(f"{what} has weights of other shapes: {_few(shapes)}; {fix}")
    kinds = {kind_of(name) for name in ours}
    if further := [name for name in report["unexpected_keys"] if kind_of(name) in kinds]:
        raise UserError(
            f"{what} has {plural(len(further), 'weight')} of layers beyond the model's: {_few(further)}; {fix}"
        )
    return finite(what, model)


def kind_of(name: str) -> str:
    """Return the name of a weight without its numbers: equal for the same weight of all layers."""
    return "".join(c for c in name if not c.isdigit())


def finite(what: str, model: nn.Module, cause: str = "the checkpoint is damaged") -> nn.Module:
    """Return the model. Raises UserError if a weight is NaN or infinite."""
    if broken := not_finite(model.named_parameters()):
        raise UserError(f"{what} has weights that are NaN or infinite: {_few(broken)}; {cause}")
    return model


def not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors that have a NaN or an infinity on this rank."""
    here = ((name, local(p.detach())) for name, p in named)
    ends = ((name, torch.stack(torch.aminmax(p))) for name, p in here if p.numel())
    return [name for name, both in ends if not both.isfinite().all()]


def _few(names: Iterable[str]) -> str:
    return shorten(", ".join(sorted(names)), 200, placeholder=" ...")
