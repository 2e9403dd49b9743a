"""Generalized advantage estimation with the values of a critic, and the critic's loss. Pure functions of tensors.

N prompts, G samples of each; B rows, C completion tokens. V_t is the value of the state before token t. An episode is the
sampled tokens of a sample, turn after turn, whatever rows they are in. Tokens of tools and of the user, outside of the mask, are
part of the next state, and pass V and A through. After the last token V is 0, also where a limit of tokens cut the answer short:
its reward is final, as in verl.
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

    rewards: [N, G]; steps: [N, G, K], the reward of each turn. A turn's last token gets the turn's reward, the sample's last
    token what is left of the sample's reward. values, mask: [B, C]; sample: [B]; turn: [B, C], of each sampled token.
    alpha: lam is 1 - 1 / (alpha l) for a sample of l tokens, and at least 0 (VAPO, arXiv 2504.05118).
    Returns A, [B, C]; 0 outside of the mask, NaN where the sample's reward is NaN.
    """
    advantages = torch.zeros_like(values)
    if not mask.any():
        return advantages
    # on the CPU, because tokens come one after the other, and in float64, because the sums are long
    rewards, steps, mask, sample, turn = (each.cpu() for each in (rewards, steps, mask, sample, turn))
    owner, number = sample[:, None].expand(mask.shape)[mask], turn[mask]  # of each sampled token
    order = (owner * (number.max() + 1) + number).argsort(stable=True)
    owner, number = owner[order], number[order]
    owners, episode, lengths = owner.unique_consecutive(return_inverse=True, return_counts=True)
    place = torch.arange(len(order)) - lengths.cumsum(0)[episode]  # -1 is the last token
    V = torch.zeros(len(owners), int(lengths.max()), dtype=torch.float64)
    V[episode, place] = values.cpu()[mask][order].double()
    ends = (number != number.roll(-1)) & (place < -1)
    r = torch.zeros_like(V)
    r[episode[ends], place[ends]] = steps.flatten(0, 1)[owner[ends], number[ends]].nan_to_num(0.0).double()
    r[:, -1] = rewards.flatten()[owners] - r.sum(1)
    keep = torch.full_like(r[:, 0], lam) if alpha is None else (1 - 1 / (alpha * lengths)).clamp(min=0)
    A, following, ahead = torch.zeros_like(V), torch.zeros_like(keep), torch.zeros_like(keep)
    for t in reversed(range(V.shape[1])):
        ahead = r[:, t] + gamma * following - V[:, t] + gamma * keep * ahead
        A[:, t], following = ahead, V[:, t]
    in_order = torch.empty(len(order), dtype=values.dtype)
    in_order[order] = A[episode, place].to(values.dtype)
    return advantages.masked_scatter(mask.to(values.device), in_order.to(values.device))


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
