"""Parts of equation 1: the ratio, the surrogates, the weights of tokens. Pure functions of tensors; B rows, C completion tokens.

A surrogate returns the token loss [B, C], or that and a dict of [B, C] to log. Its parameters name its arguments: logprobs (with
gradient), old_logprobs, rollout_logprobs, log_ratio, ratio (at the level), advantages, mask, counted [B, C]; sample, group [B].
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from grpo.objectives.arguments import call
from grpo.system.ranges import FunctionName, Positive, SomeShare

Level = Literal["token", "sequence", "sequence_sum", "sequence_token", "none"] | FunctionName
Reduce = Literal["sequence", "token", "constant", "sum"] | FunctionName
LARGEST_LOG_RATIO = 20.0  # beyond e^20 the gradient would become inf times 0; such tokens count as clipped


def policy_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return log rho, of policy / old policy, for every token of the mask, 0 elsewhere, [B, C].

    token:          log pi(o_t) - log pi_old(o_t)                                          (PPO, arXiv 1707.06347)
    sequence:       s_i = the mean of these over the row, on each of its tokens            (GSPO, arXiv 2507.18071)
    sequence_sum:   their sum: the ratio of whole answers, unstable if they are long
    sequence_token: the value of s_i, with the gradient of the token's own log rho         (GSPO-token, same paper)
    a function:     of log_ratio, those of the tokens, and mask
    """
    log_ratio = (logprobs - old_logprobs) * mask
    if callable(level):
        log_ratio = call("level", level, {"log_ratio": log_ratio, "mask": mask}) * mask
    elif level != "token":
        count = 1 if level == "sequence_sum" else mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = log_ratio.sum(1, keepdim=True) / count * mask
    if level == "sequence_token":  # the value of the row; the gradient must not be divided by its length
        log_ratio = log_ratio.detach() + (logprobs - logprobs.detach()) * mask
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


# -- surrogates

Loss = tuple[Tensor, dict[str, Tensor]]


def clip(
    ratio: Tensor,
    advantages: Tensor,
    low: SomeShare | None = 0.2,
    high: Positive | None = 0.2,
    dual: Positive | None = None,
) -> Loss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), PPO's surrogate (arXiv 1707.06347) with DAPO's two bounds (2503.14476); null
    disables one. dual: c; if A < 0 the term is at least c A, so that no token dominates (arXiv 1912.09729; TRL's delta)."""
    least, most = 0.0 if low is None else 1 - low, torch.inf if high is None else 1 + high
    below, above = (advantages < 0) & (ratio < least), (advantages > 0) & (ratio > most)
    term = torch.minimum(ratio * advantages, ratio.clamp(least, most) * advantages)
    if dual is not None:
        above = above | ((advantages < 0) & (ratio > dual))
        term = torch.where(advantages < 0, torch.maximum(term, dual * advantages), term)
    return -term, {"clip_fraction_low": below, "clip_fraction_high": above}


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi, the policy gradient itself. Without a ratio it is right only for samples of the current policy."""
    return -advantages * logprobs


# -- which tokens count, and how much


def token_weights(
    mask: Tensor,
    reduce: Reduce,
    max_tokens: int,
    sample: Tensor | None = None,
    count: float | None = None,
    group: Tensor | None = None,
    total: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> Tensor:
    """Return w, each token's share in the loss of one update. B: samples with a token in the mask; |o_i|: their tokens.

    sequence: 1 / (B |o_i|), the mean over a sample and then over samples   (GRPO, arXiv 2402.03300)
    token:    1 / sum |o_i|, the mean over all tokens of the update         (DAPO, arXiv 2503.14476)
    constant: 1 / (S L_max), independent of lengths and masks: no length bias (Dr.GRPO, arXiv 2503.20783)
    sum:      1 / B, the sum over a sample, the mean over samples           (sequences' log-probabilities: RLOO, arXiv 2402.14740)

    mask: [rows, C], every row of the update, so that microbatches cannot change the loss; sample, group: [rows], of each row
    (None: one row each); max_tokens: L_max. total: sums a tensor over ranks. count: S, the samples of the update, masked or not
    (None: those with a row). reduce may be a function of these, lengths (|o_i|, [rows, 1]), tokens (their sum) and samples (B).
    Returns [rows, C] float32, 0 outside the mask.
    """
    mask = mask.float()
    sample = torch.arange(len(mask), device=mask.device) if sample is None else sample
    numbers, place = sample.unique(return_inverse=True)
    lengths = torch.zeros(len(numbers), device=mask.device).index_add(0, place, mask.sum(dim=1))
    counts = [(lengths > 0).sum().float(), lengths.sum(), lengths.new_full((), len(numbers))]
    samples, tokens, rows = total(torch.stack(counts))
    count, lengths = rows if count is None else rows.new_full((), count), lengths[place, None]
    offered = {"mask": mask, "sample": sample, "lengths": lengths, "samples": samples, "tokens": tokens, "count": count}
    shares = {"sequence": 1 / (samples * lengths), "token": 1 / tokens, "sum": 1 / samples}
    shares["constant"] = 1 / (count * max_tokens)
    offered |= {"max_tokens": max_tokens, "total": total, "group": sample if group is None else group}
    share = call("reduce", reduce, offered) if callable(reduce) else shares[reduce]
    return torch.where(mask > 0, share, 0.0)  # not mask * share: a share of no token is infinite


def off_policy_keep(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor, delta: float
) -> Tensor:
    """Return k [B, C] bool: False if A < 0 and the policy has moved too far from the row, mean_t log(rollout / policy) > delta
    (arXiv 2512.02556, eq. 9). It compares with the policy that sampled, so staleness and the engine's mismatch both count."""
    gap = ((rollout_logprobs - logprobs.detach()) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (gap <= delta)
