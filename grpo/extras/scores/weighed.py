"""From the products of queries and keys to weights, for layers with caps and sinks.

A cap bounds a score before the mask (Gemma 2, arXiv 2408.00118): c tanh(score / c). A sink is one more logit in the softmax of a
head, which has no value (gpt-oss, arXiv 2309.17453): the weights sum to less than 1. On a GPU both are in FlexAttention's kernel.
Elsewhere scores are made in float32, at most AT_ONCE at a time, and again in the backward pass, which so takes some 100 MiB.

Shapes: B rows, H heads, K key heads, Q queries, S keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils.checkpoint import checkpoint

LEAST = torch.finfo(torch.float32).min
AT_ONCE = 1 << 22  # scores that are in memory at once, 16 MiB


@dataclass(frozen=True)
class Weighed:
    """A `Weighing`. cap: of the scores, or None. sinks: the logit of each head, [H], or None."""

    cap: float | None = None
    sinks: Tensor | None = None

    def weights(self, scores: Tensor, mask: Tensor, scale: float) -> Tensor:
        scores = scores * scale
        if self.cap is not None:
            scores = (scores / self.cap).tanh() * self.cap
        scores = scores + mask
        weights = scores.softmax(-1)
        if self.sinks is None:
            return weights
        return weights * self.share(scores.logsumexp(-1))[..., None]

    def share(self, total: Tensor) -> Tensor:
        """Return the part of the softmax that the sink leaves. total: log of the sum of exp(scores), [B, H, ...]."""
        return (total - self.sinks.float().view(-1, *[1] * (total.ndim - 2))).sigmoid()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        (count, heads, length, width), keys = query.shape, key.shape[2]
        if mask is None:
            mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
        mask, scale = mask.expand(count, 1, length, keys), scale or width**-0.5
        rows = max(1, AT_ONCE // (heads * length * keys))
        queries = max(1, AT_ONCE // (rows * heads * keys))
        parts = []
        for i in range(0, count, rows):
            some = slice(i, i + rows)
            pieces = zip(query[some].split(queries, 2), mask[some].split(queries, 2), strict=True)
            parts.append(torch.cat([self.piece(q, key[some], value[some], sees, scale) for q, sees in pieces], 2))
        return torch.cat(parts)

    def piece(self, *arguments: Any) -> Tensor:
        """Return the output of some queries. Its backward pass makes the scores again."""
        if not torch.is_grad_enabled():
            return self.attended(*arguments)
        return checkpoint(self.attended, *arguments, use_reentrant=False, preserve_rng_state=False)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Return what `sdpa` does, from float32 scores of these rows alone. mask: [B or 1, 1, Q, S] bool."""
        with torch.autocast(query.device.type, enabled=False):
            by_key = query.float().reshape(*key.shape[:2], -1, query.shape[3])  # [B, K, H / K x Q, D]
            scores = (by_key @ key.float().mT).view(*query.shape[:3], -1)
            # not -inf: a query of padding may see nothing, and its values must be finite
            weights = self.weights(scores, torch.where(mask, 0.0, LEAST), scale)
            out = weights.view(*by_key.shape[:3], -1) @ value.float()
            return out.view(*query.shape[:3], -1).to(value.dtype)

    def fused(self, kernel: Callable[..., Any], *arguments: Tensor, **named: Any) -> Tensor:
        capped = None if self.cap is None else capping(self.cap, arguments[0].device)
        if self.sinks is None:
            return kernel(*arguments, score_mod=capped, **named)
        out, beside = kernel(*arguments, score_mod=capped, return_aux=AuxRequest(lse=True), **named)
        return out * self.share(beside.lse)[..., None].to(out.dtype)


@cache
def capping(cap: float, device: torch.device) -> Callable[..., Tensor]:
    """Return the cap as FlexAttention takes it, the same function for the same cap, so that it is compiled once."""
    with torch.inference_mode(False):  # of a number dynamo would make a symbol, which the backward pass does not take
        limit = torch.tensor(cap, device=device)

    def capped(score, _batch, _head, _query, _key):
        return torch.tanh(score / limit) * limit

    return capped
