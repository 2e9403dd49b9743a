"""The shaped reward r', from which advantages are computed. Only this file derives it from a sample's reward r, in this order:

    r' = r + overlong - beta sum_t KL_t

overlong  DAPO's soft punishment. It needs no tokens, so it is added as soon as a sample is scored (`Algorithm.shaped`), and
          `rollout/reward` includes it.
KL        the estimate to the reference, if its place is the reward. It needs log-probabilities, so it is subtracted later
          (`Algorithm.credit`). With place: reward_to_go it stays with its token, r'_it = -beta KL_it.
"""

from dataclasses import replace

from torch import Tensor

from grpo.objectives.batch import Scores, TokenBatch
from grpo.objectives.kl import KL
from grpo.system.errors import UserError


def overlong_penalty(lengths: Tensor, max_tokens: int, share: float) -> Tensor:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13): 0 to L_max - L_c, then linearly to -1 at L_max, L_c = share x L_max."""
    cache = share * max_tokens
    return -((lengths - (max_tokens - cache)) / cache).clamp(0.0, 1.0)


def less_overlong(scores: Scores, max_tokens: int, share: float) -> Scores:
    """Step 1: add the penalty to the rewards, and as a part of its own to the parts. share 0: the scores are unchanged."""
    if not share:
        return scores
    if "overlong" in scores.parts:
        raise UserError("a part of the reward is called 'overlong': rename it, or set Algorithm.overlong_share=0")
    penalty = overlong_penalty(scores.last_lengths, max_tokens, share)
    return replace(scores, rewards=scores.rewards + penalty, parts={**scores.parts, "overlong": penalty})


def less_kl(rewards: Tensor, kl: KL, logprobs: Tensor | None, tokens: TokenBatch) -> tuple[Tensor, Tensor | None]:
    """Step 2: return the rewards of samples [N, G], and by reward_to_go of tokens [B, C]. logprobs: [B, C], old policy."""
    if not kl.in_reward:
        return rewards, None
    cost = kl.coef * kl.estimate(logprobs, tokens.reference_logprobs) * tokens.mask
    if kl.place == "reward_to_go":
        return rewards, -cost
    return rewards - tokens.by_sample(cost.sum(1), rewards.shape), None
