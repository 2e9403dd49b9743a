"""Advantage estimators: from rewards to advantages. Pure functions of tensors; N prompts, G samples of each, S = N x G.

An advantage function returns [N, G], or [N, G, K] for K turns, or if it names `mask`, [B, C]. Its parameters name its arguments:
`rewards` [N, G], `lengths` [N, G] (sampled tokens), `parts` {name: [N, G]} (the numbers in a reward, `correct` among them),
`steps` [N, G, K] (rewards of turns; NaN where there is none), `examples` (N), `observations` (N, G, K texts), `progress`, and the
fields of `TokenBatch`. An unknown reward (the grader timed out) is NaN: the baseline ignores it, and nothing is learned from the
sample. With a baseline, rewards that are equal but for rounding (`has_signal`) have advantages of exactly 0.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from grpo.system.ranges import NonNegative

Scale = Literal["group", "batch", "none"]


def has_signal(rewards: Tensor) -> Tensor:
    """Return which groups have rewards, [N, G], that differ by over 1e-6 of the larger, [N] bool. Others teach nothing."""
    low = rewards.nan_to_num(torch.inf).amin(dim=1)
    high = rewards.nan_to_num(-torch.inf).amax(dim=1)
    return high - low > 1e-6 * torch.maximum(low.abs(), high.abs())


def less_baseline(rewards: Tensor, baseline: Tensor) -> Tensor:
    """Return rewards - baseline, exactly 0 if a group has no signal: a floating-point mean may differ from its rewards."""
    return torch.where(has_signal(rewards)[:, None] | rewards.isnan(), rewards - baseline, 0.0)


def std(values: Tensor, dim: int | None, ddof: int) -> Tensor:
    """Return the standard deviation of the values that are not NaN, with divisor n - ddof; 0 if that is not positive."""
    count = (~values.isnan()).sum(dim=dim, keepdim=dim is not None)
    # torch.std has no answer for unknown rewards, nor for a single one
    centred = values - values.nanmean(dim=dim, keepdim=dim is not None)
    squares = centred.nan_to_num(0.0).square().sum(dim=dim, keepdim=dim is not None)
    return torch.where(count > ddof, squares / (count - ddof).clamp(min=1), 0.0).sqrt()


def group_advantages(
    rewards: Tensor, scale: Scale = "group", ddof: Literal[0, 1] = 1, eps: NonNegative = 1e-4
) -> Tensor:
    """A_i = (r_i - mean_group(r)) / (std(r) + eps). scale: std over the group (GRPO, arXiv 2402.03300 sec. 4.1), over the batch
    (Lite PPO, arXiv 2508.08221), or no division (none: Dr.GRPO, arXiv 2503.20783). ddof: std divides by n - ddof."""
    centred = less_baseline(rewards, rewards.nanmean(dim=1, keepdim=True))
    if scale == "none":
        return centred
    return torch.where(centred == 0, 0.0, centred / (std(rewards, 1 if scale == "group" else None, ddof) + eps))


def leave_one_out(rewards: Tensor) -> Tensor:
    """A_i = r_i - mean_{j != i}(r_j) = G / (G-1) (r_i - mean(r)), RLOO, arXiv 2402.14740. 0 for a single sample."""
    count = (~rewards.isnan()).sum(dim=1, keepdim=True)
    centred = less_baseline(rewards, rewards.nanmean(dim=1, keepdim=True))
    return centred * count / (count - 1).clamp(min=1)


def no_baseline(rewards: Tensor) -> Tensor:
    """A_i = r_i: REINFORCE++ (arXiv 2501.03262) leaves the baseline to `whiten`. Works with groups of 1."""
    return rewards.clone()


# -- advantages of tokens; B rows, C completion tokens


def reward_to_go(values: Tensor, mask: Tensor, sample: Tensor) -> Tensor:
    """Return the sum of `values` from each token to the end of its sample, without discount, [B, C]. values: [B, C]. sample: [B],
    the sample of each row; a sample's rows are in order."""
    values = values * mask
    within = values.flip(1).cumsum(1).flip(1)
    order = torch.arange(len(sample), device=sample.device)
    later = (sample[:, None] == sample[None, :]) & (order[None, :] > order[:, None])  # [B, B]
    return (within + (later.to(values.dtype) @ values.sum(1))[:, None]) * mask


def whiten(
    advantages: Tensor, mask: Tensor, eps: float = 1e-8, concatenated: Callable[[list], list] = lambda items: items
) -> Tensor:
    """Scale advantages, [B, C], to mean 0 and standard deviation 1 over all tokens of the mask (REINFORCE++, arXiv 2501.03262); 0
    if all are equal. concatenated: joins the lists of all ranks, since each rank holds a part of the tokens."""
    values = advantages[mask].cpu().double()  # in float32 the sum of a million tokens depends on their order
    parts = [(len(values), values.sum(), values.min(), values.max())] if len(values) else []
    parts = concatenated(parts)
    count = sum(n for n, *_ in parts)
    if not parts or not has_signal(torch.stack([x for *_, low, high in parts for x in (low, high)])[None]):
        return torch.zeros_like(advantages)
    mean = float(sum(added for _, added, *_ in parts)) / count
    variance = float(sum(concatenated([(values - mean).square().sum()]))) / count
    return torch.where(mask, (advantages - mean) / (variance + eps) ** 0.5, 0.0)
