"""Layer 1 - estimators of KL(policy || reference) from samples of the policy (joschu.net/blog/kl-approx.html)."""

from torch import Tensor


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """rho - 1 - log rho with rho = reference / policy: unbiased, never negative, exactly 0 where the two agree.

    As a loss its expected gradient is that of the forward KL, not of the reverse one whose value it estimates
    (arXiv 2512.02556). logprobs, reference_logprobs: [B, C]. Returns [B, C].
    """
    log_rho = reference_logprobs - logprobs
    return log_rho.expm1() - log_rho
