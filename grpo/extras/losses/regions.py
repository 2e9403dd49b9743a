"""Surrogates that bound how far the policy goes from the one that sampled, each a function of one paper or system. loss.py says
what a surrogate gets and returns: tensors of tokens, [B, C] each. mu is the policy that sampled (`rollout_logprobs`)."""

import math
from typing import Annotated

import torch
from torch import Tensor

from grpo.extras.losses.surrogates import inside_region
from grpo.objectives.kl import k3
from grpo.objectives.loss import Loss, clip
from grpo.system.ranges import Positive, Range, SomeShare


def ipo(ratio: Tensor, logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, eps: Positive = 0.3) -> Loss:
    """-r A, and 0 for a token with |pi - mu| > eps, IPO, the default of prime-rl. DPPO leaves a token out only where it moved in
    the direction of its advantage; here a token that samples of an older policy find far away is left out on both sides."""
    gap = logprobs.detach().exp() - rollout_logprobs.exp()
    return inside_region(ratio, advantages, gap > eps, gap < -eps)


def icepop(
    ratio: Tensor,
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    low: SomeShare = 0.2,
    high: Annotated[float, Range(1)] = 5.0,
) -> Loss:
    """-r A, and 0 for a token with pi / mu outside [low, high]: IcePop (arXiv 2510.18855) as a loss, with the bounds of prime-rl.
    `ipo` leaves a token out by the difference: it keeps one that goes from 0.01 to 0.06, but not from 0.5 to 0.9; here it is the
    other way round."""
    gap = logprobs.detach() - rollout_logprobs  # compared as logs: the exponential of a far one would be infinite
    return inside_region(ratio, advantages, gap > math.log(high), gap < math.log(low))


def up(
    ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    low: SomeShare = 0.2,
    dual: Annotated[float, Range(1, above=True)] | None = 3.0,
) -> Loss:
    """-A pi / sg(pi) where A > 0, so that the gradient is that of -A log pi, with no bound and no old policy; PPO's clip with
    `dual` elsewhere: UP-GRPO, arXiv 2607.06987. In `clip` a likely right token stops at 1 + high; here none ever does."""
    loss, logged = clip(ratio, advantages, low, None, dual)
    return torch.where(advantages > 0, -(logprobs - logprobs.detach()).exp() * advantages, loss), logged


def effective_share(weights: Tensor, mask: Tensor) -> Tensor:
    """Return (sum w)^2 / (n sum w^2) over the n tokens of each row, [B, 1]: 1 where all weights are equal, 1 / n where one token
    has all of it; 1 for an empty row."""
    weights, count = weights * mask, mask.sum(1, keepdim=True)
    share = weights.sum(1, keepdim=True).square() / (count * weights.square().sum(1, keepdim=True))
    return torch.where(count > 0, share, 1.0)


def p3o(ratio: Tensor, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Loss:
    """-sg(min(r, s)) A log pi + (1 - s) KL(pi, old policy), where s is the `effective_share` of the row's ratios: CISPO with a
    bound that the data set, arXiv 2605.12380. The paper has one s for a batch; a row's own does not depend on microbatches."""
    share = effective_share(ratio.detach(), mask)
    weight = torch.minimum(ratio.detach(), share)
    loss = -weight * advantages * logprobs + (1 - share) * k3(logprobs, old_logprobs)
    return loss, {"effective_share": share.expand_as(ratio)}


def squared_residual(log_ratio: Tensor, advantages: Tensor, mask: Tensor, tau: Positive = 0.01) -> Tensor:
    """(A - tau S)^2 / (2 tau n), where S is the sum of log-ratios over the n tokens of the row: policy mirror descent, arXiv
    2501.12599 and 2602.05933. Its gradient is that of -A log pi + tau S^2 / 2, over n: distance has a price, no bound. With
    algo.level=sequence_sum each token would have S, and the sum n S."""
    total, count = (log_ratio * mask).sum(1, keepdim=True), mask.sum(1, keepdim=True).clamp(min=1)
    return (advantages - tau * total).square() / (2 * tau * count)
