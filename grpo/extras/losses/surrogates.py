"""More surrogates, each a function of one paper, and a correction. loss.py and importance.py have the first ones, and say what a
surrogate and a correction get and return: tensors of tokens, [B, C] each."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from grpo.objectives.loss import LARGEST_LOG_RATIO, Loss
from grpo.system.ranges import NonNegative, Positive, Range


def cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, bound: Annotated[float, Range(1)] = 5.0) -> Loss:
    """-sg(min(r, bound)) A log pi: bounds the weight, so that every token keeps a gradient (arXiv 2506.13585). bound: on
    the ratio itself, 5 in ScaleRL (arXiv 2510.13786)."""
    weight = ratio.detach().clamp(max=bound)
    return -weight * advantages * logprobs, {"clip_fraction_high": ratio > bound}


def sapo(ratio: Tensor, advantages: Tensor, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> Tensor:
    """-sigmoid(tau (r - 1)) 4 / tau A: a soft gate, steepest at r = 1, where it has PPO's gradient (arXiv 2511.20347)."""
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


def gmpo(log_ratio: Tensor, advantages: Tensor, mask: Tensor, low: Positive = 0.4, high: Positive = 0.4) -> Tensor:
    """-A exp(mean_t u_t), with u the log-ratio of a token, bounded by -low and high on the side that PPO's clip bounds: the
    geometric mean over the row of clipped ratios, GMPO, arXiv 2507.20673."""
    bounded = log_ratio.clamp(-low, high)
    u = torch.where(advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    mean = (u * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return -advantages * mean.exp()


def topr(ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi where A > 0, -sg(min(r, 1)) A log pi elsewhere: wrong answers fade as they become unlikely, TOPR, arXiv
    2503.14286."""
    return -torch.where(advantages > 0, 1.0, ratio.detach().clamp(max=1)) * advantages * logprobs


def vespo(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    k_positive: NonNegative = 2.0,
    lambda_positive: NonNegative = 3.0,
    k_negative: NonNegative = 3.0,
    lambda_negative: NonNegative = 2.0,
) -> Loss:
    """-sg(W^k exp(lambda (1 - W))) A log pi, VESPO, arXiv 2602.10693. W = policy / rollout policy, of the whole row. The factor
    is 1 at W = 1, and fades where W is far from 1. k, lambda: one pair where A >= 0, one where A < 0."""
    log_ratio = ((logprobs.detach() - rollout_logprobs) * mask).sum(1, keepdim=True)
    log_ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    k = torch.where(advantages >= 0, k_positive, k_negative)
    scale = torch.where(advantages >= 0, lambda_positive, lambda_negative)
    factor = (k * log_ratio + scale * (1 - log_ratio.exp())).clamp(max=LARGEST_LOG_RATIO).exp()
    return -factor * advantages * logprobs, {"factor": factor}


vespo.weighs_rollout = True


def kl_cov(ratio: Tensor, log_ratio: Tensor, advantages: Tensor, counted: Tensor, coef: NonNegative = 1.0) -> Tensor:
    """-r A, and coef |log r| more for the tokens that `algo/choice=kl_cov` does not count, KL-Cov, arXiv 2505.22617."""
    return -ratio * advantages + torch.where(counted, 0.0, coef * log_ratio.abs())


def bernoulli_kl(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return KL(p || q) of two coins, p ln(p / q) + (1-p) ln((1-p) / (1-q)), whose log-probabilities are given. Any shape."""
    p = logprobs.exp()
    rest, other_rest = ((-torch.expm1(values)).clamp(min=1e-8) for values in (logprobs, other))
    return p * (logprobs - other) + (1 - p) * (rest / other_rest).log()


def inside_region(ratio: Tensor, advantages: Tensor, above: Tensor, below: Tensor) -> Loss:
    """-r A, and 0 where a token is above or below its region: such a token adds no gradient, whatever the sign of A."""
    loss = torch.where(above | below, 0.0, -ratio * advantages)
    return loss, {"clip_fraction_high": above, "clip_fraction_low": below}


def dppo(
    ratio: Tensor,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    divergence: Literal["tv", "kl"] = "tv",
    delta: Positive = 0.2,
) -> Loss:
    """-r A, and 0 for a token whose probability has moved away from that under the rollout policy, in the direction of its
    advantage, by more than delta: a trust region in probabilities, not in ratios, DPPO, arXiv 2602.04879. divergence: tv is the
    difference of the two probabilities; kl is that of two coins, `bernoulli_kl`(rollout policy, policy)."""
    logprobs = logprobs.detach()
    gap = logprobs.exp() - rollout_logprobs.exp()
    far = (gap.abs() if divergence == "tv" else bernoulli_kl(rollout_logprobs, logprobs)) > delta
    above, below = far & (gap > 0) & (advantages > 0), far & (gap < 0) & (advantages < 0)
    return inside_region(ratio, advantages, above, below)


# -- corrections


def kpop(log_w: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, delta: Positive = 0.1) -> Tensor:
    """w, and 0 for a token on which trainer and engine disagree: max(KL(old || rollout), KL(rollout || old)) > delta, with
    `bernoulli_kl`: KPop, which follows IcePop. Its authors tried 0.1 to 2 for delta, AReaL has 2. w has no bound. The mean of the
    loss counts the token."""
    pair = old_logprobs, rollout_logprobs
    far = torch.maximum(bernoulli_kl(*pair), bernoulli_kl(*reversed(pair))) > delta
    return torch.where(far, 0.0, log_w.clamp(max=LARGEST_LOG_RATIO).exp())
