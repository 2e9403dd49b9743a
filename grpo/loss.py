"""Layer 1 - the objective: log-probabilities and advantages to a loss. Pure functions of tensors; B rows, C tokens.

A loss is sum(weights * token_loss). The weights are computed once for a whole update and sum over all of its rows, so how
an update is cut into microbatches cannot change it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from grpo.errors import UserError
from grpo.kl import k3
from grpo.tokens import TokenBatch

Reduce = Literal["sequence", "token", "constant"]


def token_weights(mask: Tensor, reduce: Reduce, max_tokens: int) -> Tensor:
    """Each token's share in the loss of one update.

    sequence: 1 / (B |o_i|), the mean over a row and then over rows     (GRPO, arXiv 2402.03300)
    token:    1 / sum |o_i|, the mean over all tokens of the update     (DAPO, arXiv 2503.14476)
    constant: 1 / (B L_max), no length in it and so no bias by length   (Dr.GRPO, arXiv 2503.20783)

    mask: [B, C], every row of the update, B counts the rows with at least one sampled token; max_tokens is L_max.
    Returns [B, C] float32, 0 outside the mask.
    """
    mask = mask.float()
    lengths = mask.sum(dim=1, keepdim=True)
    rows = (lengths > 0).sum()
    share = {
        "sequence": 1 / (rows * lengths),
        "token": 1 / lengths.sum(),
        "constant": 1 / (rows * max_tokens),
    }[reduce]
    return torch.where(mask > 0, share, 0.0)


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = policy / old policy, token by token.

    PPO's surrogate (arXiv 1707.06347) with DAPO's two bounds (arXiv 2503.14476). logprobs, old_logprobs: [B, C];
    advantages: [B]. Returns the loss [B, C], and where the bound is what counts (gradient 0), [B, C] bool.
    """
    advantages = advantages[:, None]
    ratio = (logprobs - old_logprobs).exp()
    free, bounded = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, bounded), bounded < free


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped surrogate plus kl_coef times the k3 estimate of the KL to the reference.

    max_tokens is L_max, the run's limit of new tokens: only `reduce: constant` looks at it.
    """

    max_tokens: int
    clip_low: float = 0.2
    clip_high: float = 0.2
    reduce: Reduce = "sequence"
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.reduce not in get_args(Reduce):
            raise UserError(f"algo.loss.reduce={self.reduce} is not one of {', '.join(get_args(Reduce))}")
        if not 0 < self.clip_low <= 1 or self.clip_high <= 0:
            raise UserError(
                f"algo.loss.clip_low={self.clip_low} clip_high={self.clip_high}: they are distances from 1, "
                "0 < clip_low <= 1 and clip_high > 0, as in 0.2 and 0.28"
            )
        if self.kl_coef < 0:
            raise UserError(
                f"algo.loss.kl_coef={self.kl_coef} is negative: 0 is off (no reference is loaded), 0.04 usual"
            )

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def weights(self, mask: Tensor) -> Tensor:
        return token_weights(mask, self.reduce, self.max_tokens)

    def __call__(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a microbatch (a scalar, to be summed), and per-token numbers to log, each [B, C].

        logprobs: [B, C], with gradient. The batch brings old_logprobs, advantages, weights, and where
        `needs_reference` reference_logprobs.
        """
        surrogate, clipped = clipped_surrogate(
            logprobs, batch.old_logprobs, batch.advantages, self.clip_low, self.clip_high
        )
        loss = (batch.weights * surrogate).sum()
        stats = {
            "loss/policy": surrogate.detach(),
            "loss/clip_fraction": clipped.float(),
            "loss/approx_kl": k3(batch.old_logprobs, logprobs.detach()),
        }
        if self.needs_reference:
            kl = k3(logprobs, batch.reference_logprobs)
            loss = loss + self.kl_coef * (batch.weights * kl).sum()
            stats["loss/kl"] = kl.detach()
        return loss, stats
