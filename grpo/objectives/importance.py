"""Importance weights that correct for the engine's mismatch. Pure functions; B rows, C completion tokens.

w = old policy / rollout policy, token by token, is 1 where engine and trainer agree. A correction gets log_w [B, C] (0 outside
of the mask) and mask [B, C]. It returns the factor f [B, C] of equation 1, without gradient.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from grpo.system.errors import UserError, oneof

Level = Literal["token", "sequence"]


def weight(log_w: Tensor, mask: Tensor, level: Level) -> Tensor:
    """w of every token, or their product over the row, [B, C]."""
    oneof("algo.correction.level", level, get_args(Level))
    log_w = log_w * mask
    return (log_w if level == "token" else log_w.sum(1, keepdim=True).expand_as(log_w)).exp()


def check_bounds(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise UserError(
            f"algo.correction: low={low} high={high} must have 1 between them: there engine and trainer agree"
        )


def truncated(log_w: Tensor, mask: Tensor, level: Level = "token", high: float = 2.0) -> Tensor:
    """TIS: min(w, high)."""
    check_bounds(0, high)
    return weight(log_w, mask, level).clamp(max=high)


def masked(log_w: Tensor, mask: Tensor, level: Level = "sequence", low: float = 0.0, high: float = 3.0) -> Tensor:
    """w where low <= w <= high, else 0. By sequence MIS (arXiv 2512.23075), by token IcePop (arXiv 2510.18855)."""
    check_bounds(low, high)
    w = weight(log_w, mask, level)
    return torch.where((w >= low) & (w <= high), w, 0.0)


def geometric(log_w: Tensor, mask: Tensor, low: float = 0.99, high: float = 1.01, cap: float = 2.0) -> Tensor:
    """The row counts if low <= exp(mean_t log w) <= high; min(w, cap) on top, token by token."""
    check_bounds(low, high)
    mean = (log_w * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    keep = (mean.exp() >= low) & (mean.exp() <= high)
    return torch.where(keep, truncated(log_w, mask, "token", cap), 0.0)
