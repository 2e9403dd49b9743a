"""More choices of the tokens that the surrogate counts, each of one paper. objectives/choice.py says what a choice gets."""

import torch
from torch import Tensor

from grpo.objectives.choice import top_entropy  # noqa: F401 - configurations name it here
from grpo.system.ranges import NonNegative, Positive, SomeShare


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
