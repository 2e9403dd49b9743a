"""Copies of the trained weights of a policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn


def trained_of(policy: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters, by name."""
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


def on_host(policy: nn.Module) -> dict[str, Tensor]:
    """Return copies of the trained parameters in the memory of the CPU, by name."""
    return {name: p.detach().to("cpu", copy=True) for name, p in trained_of(policy).items()}


@torch.no_grad()
def copy_of(policy: nn.Module, weights: dict[str, Tensor] | None = None) -> nn.Module:
    """Return a copy of the policy, with other trained weights if they are given. The others are shared."""
    copy = deepcopy(policy, {id(p): p for p in policy.parameters() if not p.requires_grad})
    for name, p in trained_of(copy).items():
        p.copy_(weights[name] if weights else p)
    return copy


@contextmanager
def holding(policy: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Let the policy have other trained weights within a `with` block."""
    trained, own = trained_of(policy), on_host(policy)
    with torch.no_grad():
        try:
            for name, p in trained.items():
                p.copy_(weights[name])
            yield
        finally:
            for name, p in trained.items():
                p.copy_(own[name])
