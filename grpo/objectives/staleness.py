"""Tokens of older policies. Pure functions; B rows, C completion tokens.

Three policies: mu sampled the token, p is the one before the update, pi the one that learns. A version is the number of rollouts
that weights have learned from; d, the staleness of a token, is the version of p less that of mu. Each token has its own mu: its
log-probability is the one with which it was sampled, also in a row that newer weights went on with.
"""

import torch
from torch import Tensor

from grpo.objectives.batch import TokenBatch


def ages(batch: TokenBatch) -> Tensor:
    """Return d, [B, C] float32; 0 outside the mask, and where the batch has none."""
    return torch.zeros_like(batch.rollout_logprobs) if batch.staleness is None else batch.staleness


def policy_between(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Return log p = log mu + (1 - 1/d) (log pi - log mu), [B, C], without gradient: a guess at the policy one version ago, as if
    log pi moved evenly from version to version (A-3PO, arXiv 2512.06547; AReaL's `loglinear`). The ratio pi / p, which is
    clipped, is the d-th root of pi / mu, its change in one version; p / mu times it is pi / mu. Where d is 0 or 1, p is mu."""
    mu = batch.rollout_logprobs
    return mu + (1 - 1 / ages(batch).clamp(min=1)) * (logprobs.detach() - mu)
