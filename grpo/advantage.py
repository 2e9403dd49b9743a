"""Layer 1 - from rewards to advantages. Pure functions; N prompts, G samples of each.

A reward nobody could give (a grader that timed out) is NaN: it stays out of its group's baseline and has advantage NaN,
which `collate` turns into a row that nothing is learned from.
"""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, scale_by_std: bool = True, eps: float = 1e-4) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + eps), without the division for Dr.GRPO (arXiv 2402.03300 sec. 4.1, 2503.20783).

    rewards: [N, G], one row per prompt; the standard deviation is the unbiased one, over G-1. Returns [N, G]. A group
    whose rewards are all equal gets exactly 0.
    """
    known = ~rewards.isnan()
    count = known.sum(dim=1, keepdim=True)
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    low = rewards.nan_to_num(torch.inf).amin(dim=1, keepdim=True)
    high = rewards.nan_to_num(-torch.inf).amax(dim=1, keepdim=True)
    centred = torch.where(known & (low == high), 0.0, centred)  # a mean in floating point can miss equal rewards
    if not scale_by_std:
        return centred
    std = (centred.nan_to_num(0.0).square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / (std + eps)
