"""More advantage estimators, each a function of one paper. advantage.py has the first ones, and says what an estimator gets and
returns. Rewards, lengths in tokens, and advantages are [N, G]: N prompts with G samples each."""

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo.objectives.advantage import group_advantages, has_signal, less_baseline, std
from grpo.system.errors import UserError
from grpo.system.ranges import NonNegative


def less_mean(rewards: Tensor) -> Tensor:
    """Return the rewards less the mean of their group."""
    return less_baseline(rewards, rewards.nanmean(dim=1, keepdim=True))


def centred_std(rewards: Tensor, eps: NonNegative = 1e-4) -> Tensor:
    """A_i = (r_i - mean(r)) / (s + eps), where s is the standard deviation of all r_i - mean(r) of the batch, ScaleRL, arXiv
    2510.13786. In `batch_std` the means of the prompts add to the divisor."""
    centred = less_mean(rewards)
    return torch.where(centred == 0, 0.0, centred / (std(centred, None, 1) + eps))


def length_weighted(rewards: Tensor, lengths: Tensor) -> Tensor:
    """A_i = r_i - sum_j |o_j| r_j / sum_j |o_j|: the baseline of smallest variance, OPO, arXiv 2505.23585."""
    lengths = torch.where(rewards.isnan(), 0.0, lengths.to(rewards.dtype))
    baseline = (lengths * rewards.nan_to_num(0.0)).sum(dim=1, keepdim=True) / lengths.sum(dim=1, keepdim=True)
    return less_baseline(rewards, baseline)


def max_rl(rewards: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / mean(r): hard prompts have more weight, MaxRL, arXiv 2602.02710. Rewards must not be negative."""
    if (rewards < 0).any():
        raise UserError("rewards must not be negative, since they are divided by the mean of their group")
    mean = rewards.nanmean(dim=1, keepdim=True)
    return less_baseline(rewards, mean) / torch.where(mean > 0, mean, 1.0)


def gdpo(parts: Mapping[str, Tensor], weights: Mapping[str, float] | None = None, eps: NonNegative = 1e-4) -> Tensor:
    """GDPO, arXiv 2601.05242: normalises each part of the reward over its group, then the weighted sum over the batch. weights:
    {part: weight}; None is 1 for `correct` and `format`. A part that does not apply to a sample is NaN there and left out."""
    if weights is None:
        weights = {"correct": 1.0, "format": 1.0}
    if not weights:
        raise UserError("weights is empty: name parts of the reward, as in {correct: 1, format: 0.5}")
    try:
        scaled = torch.stack([weight * group_advantages(parts[name], eps=eps) for name, weight in weights.items()])
    except KeyError as error:
        raise UserError(f"weights: no part {error}; there are {', '.join(parts)}") from error
    summed = torch.where(scaled.isnan().all(dim=0), torch.nan, scaled.nansum(dim=0))
    centred = torch.where((scaled.nan_to_num(0.0) == 0).all(dim=0), summed, summed - summed.nanmean())
    return centred / (std(summed, None, 1) + eps)


def gpg(rewards: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) N / (groups whose rewards differ): groups that teach nothing do not make the step smaller, GPG, arXiv
    2504.02546. verl divides by the share of rewards that are not 0."""
    live = has_signal(rewards).sum().clamp(min=1)
    return less_mean(rewards) * len(rewards) / live


def best_only(rewards: Tensor) -> Tensor:
    """A_i = max(r) - max_{j != i}(r_j), what sample i adds to the best of its group, arXiv 2503.19595: 0 for all but the best
    sample, and for that one too if another is as good."""
    others = rewards.nan_to_num(-torch.inf)[:, None].expand(-1, rewards.shape[1], -1)  # [N, G, G]
    others = others.masked_fill(torch.eye(rewards.shape[1], dtype=torch.bool, device=rewards.device), -torch.inf)
    return less_baseline(rewards, others.amax(dim=2)).clamp(min=0)


def earned(rewards: Tensor) -> Tensor:
    """Return the rewards, [N, G], less the lowest of their group if that is negative: a share of them is a cost or nothing, where
    a share of a negative reward would be a bonus."""
    return rewards - rewards.nan_to_num(0.0).amin(dim=1, keepdim=True).clamp(max=0.0)


def alp(rewards: Tensor, lengths: Tensor, parts: Mapping[str, Tensor], beta: NonNegative = 1e-4) -> Tensor:
    """A_i = s_i - mean(s) with s_i = r_i - beta max(share of right samples, 1 / G) |o_i|, ALP, arXiv 2506.05256. Length costs the
    same whatever a wrong answer earns. There is no division by the standard deviation: where all are right, any beta would become
    the whole signal."""
    solved = parts["correct"].nanmean(dim=1, keepdim=True).nan_to_num(0.0).clamp(min=1 / rewards.shape[1])
    # 0 x NaN: an ungraded sample has no cost
    return less_mean(rewards) - less_mean(beta * solved * lengths + 0 * rewards)


def length_penalty(
    rewards: Tensor, lengths: Tensor, steps: Tensor, tokens: NonNegative = 0.25, turns: NonNegative = 0.1
) -> Tensor:
    """A_i = s_i - mean(s) with s_i = r_i - mean(e) (tokens |o_i| / max_j |o_j| + turns K_i / max_j K_j), in prime-rl with e = r.
    Here e is `earned`, which is r unless a reward is negative. K_i: the turns of a sample. An all-wrong group has advantages
    of 0. steps: [N, G, K], NaN where there is no turn."""
    is_graded, penalty = ~rewards.isnan(), 0.0
    for weight, size in ((tokens, lengths), (turns, (~steps.isnan()).sum(2))):
        penalty = penalty + weight * size / (size * is_graded).amax(dim=1, keepdim=True).clamp(min=1)
    return less_mean(rewards) - less_mean(earned(rewards).nanmean(dim=1, keepdim=True) * penalty + 0 * rewards)
