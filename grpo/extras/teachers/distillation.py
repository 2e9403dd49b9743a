"""More divergences to a teacher, each a function of one paper. teaching.py has the first ones, and says what a divergence gets
and returns.

S policy, T teacher, mu the policy that sampled, y the sampled token; B rows, C completion tokens, n tokens, V vocabulary.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from grpo.extras.teachers.teaching import kl
from grpo.system.ranges import NonNegative, Range, Share

Inner = Annotated[float, Range(0, 1, above=True, below=True)]


def iw_opd(
    logprobs: Tensor, teacher_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, gamma: NonNegative = 0.5
) -> Tensor:
    """-A, [B, C], with the gradient of -A log S(y): A_t = a_t [1 + gamma (1 - sum_{s<t} |a_s| / sum_s |a_s|)], where a is
    log T(y) - log mu(y) and the sums are over the row. Early tokens weigh more (IW-OPD, arXiv 2606.22600)."""
    a = (teacher_logprobs - rollout_logprobs) * mask
    before = a.abs().cumsum(1) - a.abs()
    A = a * (1 + gamma * (1 - before / a.abs().sum(1, keepdim=True).clamp(min=1e-8)))
    return -A * (logprobs - logprobs.detach()).exp()


def vopd(student: Tensor, teacher: Tensor, logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(S || T), [n], with the gradient of -A log S(y), A = log T(y) - log S(y) + KL(S || T): the sampled divergence less a
    baseline, which leaves the expected gradient as it is and makes its variance small (vOPD, arXiv 2605.07865)."""
    baseline = kl(student.detach(), teacher)
    A = (teacher_logprobs - logprobs).detach() + baseline
    return baseline - A * (logprobs - logprobs.detach())


def discounted(teacher_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, gamma: Share = 0.9) -> Tensor:
    """Return A, [B, C]: A_t = sum_{s>=t} gamma^(s-t) [log T(y_s) - log mu(y_s)] over the tokens of the mask; those of the
    environment count as steps. The gradient of the whole row's KL(S || T) has gamma 1, that of each token's own has 0."""
    A, k = (teacher_logprobs - rollout_logprobs) * mask, 1
    while k < A.shape[1]:  # A has the next k tokens, then the next 2k
        A = torch.cat([A[:, :-k] + gamma**k * A[:, k:], A[:, -k:]], dim=1)
        k *= 2
    return A * mask


def topd(teacher_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, group: Tensor, alpha: Inner = 0.5) -> Tensor:
    """Return A, [B, C], of all rows of a rollout (TOP-D, arXiv 2607.04751). A token's reward is log(alpha T / mu + 1 - alpha), at
    least log(1 - alpha). Its return is that, plus the mean of the later rewards in its row; A is the z-score of the return among
    all tokens of the group."""
    mask = mask.to(teacher_logprobs.dtype)
    gap = teacher_logprobs - rollout_logprobs + math.log(alpha)
    reward = torch.logaddexp(gap, torch.full_like(gap, math.log1p(-alpha))) * mask
    later, left = (x.flip(1).cumsum(1).flip(1) - x for x in (reward, mask))
    returns = reward + later / left.clamp(min=1)
    numbers, place = group.unique(return_inverse=True)

    def mean(values: Tensor) -> Tensor:
        """Return the mean over the tokens of each row's group, [B, 1]."""
        total, count = (values.new_zeros(len(numbers)).index_add(0, place, (x * mask).sum(1)) for x in (values, mask))
        return (total / count.clamp(min=1))[place, None]

    centred = (returns - mean(returns)) * mask
    return centred / (mean(centred.square()).sqrt() + 1e-4)
