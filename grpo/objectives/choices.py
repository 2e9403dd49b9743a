"""Which tokens the surrogate counts. Pure functions over the n tokens of a rollout, those of all ranks, in one order.

A choice returns [n] bool. Its parameters name its arguments: `logprobs` and `entropy` of the policy before the first update, and
`advantages`, [n] each; `rng`, a generator with the same state on all ranks.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from grpo.objectives.arguments import call
from grpo.objectives.batch import TokenBatch
from grpo.system import distributed
from grpo.system.ranges import NonNegative, Positive, SomeShare


def chosen_tokens(choice: Callable[..., Tensor], tokens: TokenBatch, rng: torch.Generator) -> Tensor:
    """Return the tokens that count, [B, C] bool. tokens: this rank's, with old_logprobs, old_entropy and advantages. The order in
    which the choice sees them depends on their samples alone, not on ranks, microbatches or the order of rows."""
    mask, sample = tokens.mask, tokens.sample[:, None].expand(tokens.mask.shape)
    own = [values[mask].cpu() for values in (sample, tokens.old_logprobs, tokens.old_entropy, tokens.advantages)]
    pieces = distributed.all_gather([own])
    samples, *values = (torch.cat(of_ranks) for of_ranks in zip(*pieces, strict=True))
    order = samples.argsort(stable=True)
    given = dict(zip(("logprobs", "entropy", "advantages"), (one[order] for one in values), strict=True))
    kept = torch.zeros(len(order), dtype=torch.bool).scatter(0, order, call(choice, given | {"rng": rng}))
    start = sum(len(piece[0]) for piece in pieces[: distributed.rank()])
    found = torch.zeros_like(mask)
    found[mask] = kept[start : start + len(own[0])].to(mask.device)
    return found


def top_entropy(entropy: Tensor, share: SomeShare) -> Tensor:
    """The tokens of highest entropy, [n]: this share of all. There the policy decides (arXiv 2506.01939)."""
    threshold = float(np.quantile(entropy.double().numpy(), 1 - share)) if len(entropy) else 0.0
    return entropy >= threshold


def covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return (A - mean A) (log pi - mean log pi) of each token, [n]: where it is high, an update lowers the entropy most (arXiv
    2505.22617)."""
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def clip_cov(
    logprobs: Tensor,
    advantages: Tensor,
    rng: torch.Generator,
    share: SomeShare = 2e-4,
    low: NonNegative = 1.0,
    high: Positive = 5.0,
) -> Tensor:
    """All tokens but some of those with low < covariance < high, drawn at random: this share of all tokens, one at least.
    Clip-Cov, arXiv 2505.22617."""
    cov = covariance(logprobs, advantages)
    able = ((cov > low) & (cov < high)).nonzero()[:, 0]
    drawn = able[torch.randperm(len(able), generator=rng)[: max(1, int(share * len(cov)))]]
    return torch.ones_like(cov, dtype=torch.bool).index_fill(0, drawn, False)


def without_top_cov(logprobs: Tensor, advantages: Tensor, share: SomeShare = 2e-4) -> Tensor:
    """All tokens but those of highest covariance: this share of all tokens, one at least. KL-Cov, arXiv 2505.22617."""
    cov = covariance(logprobs, advantages)
    top = cov.argsort(descending=True, stable=True)[: max(1, int(share * len(cov)))]
    return torch.ones_like(cov, dtype=torch.bool).index_fill(0, top, False)
