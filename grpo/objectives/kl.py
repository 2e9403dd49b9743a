"""KL(policy || target) from samples of the policy: estimators (joschu.net/blog/kl-approx.html), and where they enter.

As a loss on fresh samples, the expected gradient of k1 is 0, that of k2 is the KL's, and that of k3 is KL(target || policy)'s.
k1 in the reward has the gradient of the KL, as have k1 and k3 in the loss times the ratio (arXiv 2510.01555, 2506.09477,
2512.02556).
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from grpo.objectives.loss import LARGEST_LOG_RATIO
from grpo.system.errors import UserError
from grpo.system.ranges import NonNegative, SomeShare, Whole, enforced


def k1(logprobs: Tensor, target_logprobs: Tensor) -> Tensor:
    """-log rho with rho = target / policy: unbiased, of either sign. All arguments and results here are [B, C]."""
    return logprobs - target_logprobs


def k2(logprobs: Tensor, target_logprobs: Tensor) -> Tensor:
    """(log rho)^2 / 2: biased, never negative. [B, C]."""
    return (logprobs - target_logprobs).square() / 2


def k3(logprobs: Tensor, target_logprobs: Tensor) -> Tensor:
    """rho - 1 - log rho: unbiased, never negative, exactly 0 where the two agree. log rho is at most LARGEST_LOG_RATIO, as that
    of the ratio: beyond it the estimate stays 4.9e8, without a gradient. [B, C]."""
    log_rho = (target_logprobs - logprobs).clamp(max=LARGEST_LOG_RATIO)
    return log_rho.expm1() - log_rho  # not exp() - 1: float32 would lose its digits where the two are close


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
Place = Literal["loss", "loss_with_ratio", "reward", "reward_to_go"]
Target = Literal["reference", "rollout"]


@enforced("KL")
@dataclass(frozen=True)
class KL:
    """coef times an estimate, in one of these places:

    loss             added to the loss of every token
    loss_with_ratio  the same, times policy / old policy, with the gradient through both (TRL's default; arXiv 2512.02556)
    reward           its sum over a sample is subtracted from the reward, before any baseline (RLOO, arXiv 2402.14740)
    reward_to_go     its sum from a token on is subtracted from that token's advantage (REINFORCE++, arXiv 2501.03262)

    target: the frozen reference, or the policy that sampled (rollout). sync_every: the number of updates after which the
    reference becomes sync_alpha policy + (1 - sync_alpha) reference; 0: never (TR-DPO, arXiv 2404.09656).
    """

    coef: NonNegative = 0.0
    estimator: Literal["k1", "k2", "k3"] = "k3"
    place: Place = "loss"
    target: Target = "reference"
    sync_every: Whole = 0
    sync_alpha: SomeShare = 0.6

    def __post_init__(self) -> None:
        if self.in_reward and self.target == "rollout":
            raise UserError(f"KL.place={self.place} with target=rollout: no KL to penalise; set target=reference")
        if self.sync_every and not self.needs_reference:
            fix = "set coef above 0 and target=reference, or sync_every=0"
            raise UserError(f"KL.sync_every moves a reference that nothing uses: {fix}")

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is loaded."""
        return self.coef > 0 and self.target == "reference"

    @property
    def in_reward(self) -> bool:
        """Whether the KL enters rewards or advantages, not the loss."""
        return self.coef > 0 and self.place.startswith("reward")

    @property
    def in_loss(self) -> bool:
        """Whether the KL is a term of the loss."""
        return self.coef > 0 and self.place.startswith("loss")

    def estimate(self, logprobs: Tensor, target_logprobs: Tensor) -> Tensor:
        """Return the estimate of KL(policy || target) at each token, [B, C]."""
        return ESTIMATORS[self.estimator](logprobs, target_logprobs)
