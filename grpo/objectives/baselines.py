"""More advantage estimators, each a function of one paper. advantage.py has the first ones, and says what an estimator gets and
returns."""

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo.objectives.advantage import group_advantages, less_baseline, std
from grpo.system.errors import UserError
from grpo.system.ranges import NonNegative


def length_weighted(rewards: Tensor, lengths: Tensor) -> Tensor:
    """A_i = r_i - sum_j |o_j| r_j / sum_j |o_j|: the baseline of smallest variance, OPO, arXiv 2505.23585."""
    lengths = torch.where(rewards.isnan(), 0.0, lengths.to(rewards.dtype))
    baseline = (lengths * rewards.nan_to_num(0.0)).sum(dim=1, keepdim=True) / lengths.sum(dim=1, keepdim=True)
    return less_baseline(rewards, baseline)


def max_rl(rewards: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / mean(r): hard prompts have more weight, MaxRL, arXiv 2602.02710. Rewards must not be negative."""
    if (rewards < 0).any():
        raise UserError("algo/advantage=max_rl divides by the mean reward of a group: rewards must not be negative")
    mean = rewards.nanmean(dim=1, keepdim=True)
    return less_baseline(rewards, mean) / torch.where(mean > 0, mean, 1.0)


def gdpo(parts: Mapping[str, Tensor], weights: Mapping[str, float], eps: NonNegative = 1e-4) -> Tensor:
    """GDPO: normalises every part of the reward over its group, then the weighted sum over the batch. weights: {part: weight}.
    A part that does not apply to a sample is NaN there and is left out."""
    if not weights:
        raise UserError("algo.advantage.weights is empty: name parts of the reward, as in {correct: 1, format: 0.5}")
    try:
        scaled = torch.stack([weight * group_advantages(parts[name], eps=eps) for name, weight in weights.items()])
    except KeyError as error:
        raise UserError(f"algo.advantage.weights: no part {error}; there are {', '.join(parts)}") from error
    summed = torch.where(scaled.isnan().all(dim=0), torch.nan, scaled.nansum(dim=0))
    centred = torch.where((scaled.nan_to_num(0.0) == 0).all(dim=0), summed, summed - summed.nanmean())
    return centred / (std(summed, None, 1) + eps)
