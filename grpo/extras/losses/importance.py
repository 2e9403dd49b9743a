"""Importance weights that correct for the engine's mismatch. Pure functions; B rows, C completion tokens.

w = old policy / rollout policy, token by token, is 1 where engine and trainer agree. A correction gets log_w [B, C] (0 outside
the mask) and mask [B, C]. It returns the factor f [B, C] of equation 1, without gradient.
"""

from typing import Annotated, Literal

import torch
from torch import Tensor

from grpo.system.errors import UserError
from grpo.system.ranges import Positive, Range, Share

Level = Literal["token", "sequence"]


def weight(log_w: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return w of every token, or of its whole row (the product), [B, C]."""
    log_w = log_w * mask
    return (log_w if level == "token" else log_w.sum(1, keepdim=True).expand_as(log_w)).exp()


def check_bounds(low: float, high: float) -> None:
    """Refuse bounds that do not contain 1, or are negative."""
    if not 0 <= low <= 1 <= high:
        why = "the ratio is 1 when engine and trainer agree"
        raise UserError(f"low={low} high={high}, need 0 <= low <= 1 <= high: {why}")


def truncated(log_w: Tensor, mask: Tensor, level: Level = "token", high: Positive = 2.0) -> Tensor:
    """TIS: min(w, high)."""
    check_bounds(0, high)
    return weight(log_w, mask, level).clamp(max=high)


def masked(log_w: Tensor, mask: Tensor, level: Level = "sequence", low: Share = 0.0, high: Positive = 3.0) -> Tensor:
    """w if low <= w <= high, else 0: MIS by sequence (arXiv 2512.23075), IcePop by token (arXiv 2510.18855)."""
    check_bounds(low, high)
    w = weight(log_w, mask, level)
    return torch.where((w >= low) & (w <= high), w, 0.0)


def geometric(log_w: Tensor, mask: Tensor, low: Share = 0.99, high: Positive = 1.01, cap: Positive = 2.0) -> Tensor:
    """min(w, cap) of each token if low <= exp(mean_t log w) <= high over its row, else 0."""
    check_bounds(low, high)
    mean = (log_w * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    keep = (mean.exp() >= low) & (mean.exp() <= high)
    return torch.where(keep, truncated(log_w, mask, "token", cap), 0.0)


def low_error(log_w: Tensor, mask: Tensor, most: Annotated[float, Range(1)] = 2.0) -> Tensor:
    """1 if mean_t exp(|log w|) <= most over the row, else 0: NeMo-RL's filter of sequences by the error of their probabilities.
    In `geometric`, tokens that became likelier make up for others; here every difference counts, an infinite one for certain."""
    errors = torch.where(mask, log_w.abs().exp(), 0.0)
    return (errors.sum(1, keepdim=True) <= most * mask.sum(1, keepdim=True)).to(log_w.dtype).expand_as(log_w)


low_error.weighs = False
