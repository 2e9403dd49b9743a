"""Generalized advantage estimation with the values of a critic, and the critic's loss. Pure functions of tensors.

N prompts, G samples of each; B rows, C completion tokens. V_t is the value of the state before token t. An episode is the sampled
tokens of a sample, over all its rows, which are in order: tokens of tools and of the user, outside of the mask, are part of the next
state, and pass V and A through. After the last token V is 0, also where a limit of tokens cut the answer short: its reward is final.
"""

import torch
from torch import Tensor

from grpo.system.ranges import Positive, Share


def gae(
    rewards: Tensor,
    steps: Tensor,
    values: Tensor,
    mask: Tensor,
    sample: Tensor,
    turn: Tensor,
    gamma: Share = 1.0,
    lam: Share = 0.95,
    alpha: Positive | None = None,
) -> Tensor:
    """d_t = r_t + gamma V_{t+1} - V_t and A_t = d_t + gamma lam A_{t+1}, GAE, arXiv 1506.02438.

    rewards: [N, G]; steps: [N, G, K], the reward of each turn, NaN if it has none. A turn's last token gets the turn's reward, the
    sample's last token what is left of the sample's reward. values: [B, C]; mask: [B, C]; sample: [B]; turn: [B, C].
    alpha: lam is 1 - 1 / (alpha l) for a sample of l tokens, and at least 0 (VAPO, arXiv 2504.05118).
    Returns A, [B, C]; 0 outside of the mask, NaN where the sample's reward is NaN.
    """
    advantages = torch.zeros_like(values)
    if not mask.any():
        return advantages
    rows, columns = mask.nonzero(as_tuple=True)
    # in float64, because the sums are long; on the CPU, because one token comes after the other
    order = sample[rows].argsort(stable=True)
    rows, columns = rows[order], columns[order]
    owners, episode, lengths = sample[rows].unique_consecutive(return_inverse=True, return_counts=True)
    place = torch.arange(len(rows), device=rows.device) - lengths.cumsum(0)[episode]  # -1 is the last token
    V = values.new_zeros(len(owners), int(lengths.max()))
    r, A = torch.zeros_like(V), torch.zeros_like(V)
    V[episode, place] = values[rows, columns]
    ends = turn[rows, columns] != turn[rows, columns].roll(-1)
    ends[place == -1] = False
    at = turn[rows, columns][ends]
    r[episode[ends], place[ends]] = steps.flatten(0, 1)[sample[rows][ends], at].nan_to_num(0.0).to(V)
    r[:, -1] = rewards.flatten()[owners] - r.sum(1)
    keep = torch.full_like(r[:, 0], lam) if alpha is None else (1 - 1 / (alpha * lengths)).clamp(min=0)
    following, ahead = torch.zeros_like(keep), torch.zeros_like(keep)  # V and A of the next token
    for t in reversed(range(V.shape[1])):
        ahead = r[:, t] + gamma * following - V[:, t] + gamma * keep * ahead
        A[:, t], following = ahead, V[:, t]
    advantages[rows, columns] = A[episode, place]
    return advantages


def value_targets(
    rewards: Tensor,
    steps: Tensor,
    values: Tensor,
    mask: Tensor,
    sample: Tensor,
    turn: Tensor,
    gamma: Share = 1.0,
    lam: Share = 1.0,
) -> Tensor:
    """R_t = A_t + V_t with the A of `gae`, [B, C]: what V_t should be. With lam 1 it is the discounted sum of the rewards."""
    return gae(rewards, steps, values, mask, sample, turn, gamma, lam) + values * mask


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: Positive | None = 0.5) -> Tensor:
    """max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2: no gain from a step of more than clip, as in the code
    published with PPO (arXiv 1707.06347). clip: None for (V - R)^2 / 2. All are [B, C]."""
    errors = (values - targets).square()
    if clip is not None:
        errors = torch.maximum(errors, (old_values + (values - old_values).clamp(-clip, clip) - targets).square())
    return errors / 2
