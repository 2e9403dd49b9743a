"""Advantage estimators that see turns, tokens and examples. advantage.py says what an estimator gets and returns.

N prompts, G samples of each, K turns of the longest sample; B rows, C completion tokens. steps: [N, G, K], the reward of each
turn. They add up to the sample's reward, and are NaN where it has no such turn. rewards: [N, G]. Advantages: [N, G] or
[N, G, K].
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.objectives.advantage import has_signal, less_baseline
from grpo.system.errors import UserError
from grpo.system.ranges import NonNegative, Share, enforced


def returns(rewards: Tensor, steps: Tensor, gamma: float = 1.0) -> Tensor:
    """R_k = r_k + gamma R_{k+1}, the discounted rewards from turn k on, [N, G, K]; NaN where there is no turn or no reward."""
    to_go, later = [], torch.zeros_like(steps[..., 0])
    for reward in reversed(steps.unbind(2)):
        later = reward.nan_to_num(0.0) + gamma * later
        to_go.append(later.masked_fill(reward.isnan() | rewards.isnan(), torch.nan))
    return torch.stack(to_go[::-1], dim=2)


def turn_returns(rewards: Tensor, steps: Tensor, gamma: Share = 1.0, baseline: bool = True) -> Tensor:
    """A_k = R_k - mean(R_k), of `returns`: the mean is over the samples of the group that have a turn k, and a sample that is
    alone there has 0. baseline: False leaves the mean away, for advantages that are whitened afterwards."""
    to_go = returns(rewards, steps, gamma)
    if not baseline:
        return to_go
    of_turns = to_go.transpose(1, 2).flatten(0, 1)  # [N K, G]
    centred = less_baseline(of_turns, of_turns.nanmean(dim=1, keepdim=True))
    return centred.view(len(steps), -1, steps.shape[1]).transpose(1, 2)


def gigpo(
    rewards: Tensor,
    steps: Tensor,
    observations: Sequence[Sequence[Sequence[str]]],
    gamma: Share = 0.95,
    weight: NonNegative = 1.0,
) -> Tensor:
    """A_k = (r - mean(r)) + weight (R_k - mean(R)), GiGPO, arXiv 2505.10978. The second mean is over all turns of the group that
    begin with the same observation, and a turn without another like it has no second term. R: see `returns`.

    observations: of each turn, as text; clocks and counters in it make every turn unlike the others."""
    to_go = returns(rewards, steps, gamma)
    of_steps = 0 * to_go
    for n, group in enumerate(observations):
        alike = defaultdict(list)
        for g, texts in enumerate(group):
            for k, text in enumerate(texts[: steps.shape[2]]):
                alike[text].append((g, k))
        for places in alike.values():
            g, k = zip(*places, strict=True)
            values = to_go[n, g, k][None]
            of_steps[n, g, k] = less_baseline(values, values.nanmean())[0]
    return less_baseline(rewards, rewards.nanmean(dim=1, keepdim=True))[..., None] + weight * of_steps


def optimal_token(
    rewards: Tensor,
    steps: Tensor,
    mask: Tensor,
    sample: Tensor,
    turn: Tensor,
    old_logprobs: Tensor,
    prob_squares: Tensor,
) -> Tensor:
    """A_t = R_t - sum_i W_it R_it / sum_i W_it, the baseline of smallest variance at each place t, as in verl. R_t: the rewards
    of the token's turn and of later ones. W_t: the sum up to t of 1 - 2 p + sum_v p_v^2, the squared norm of a token's gradient
    by its logits. i: the samples of the group that have a token t; the baseline is 0 for one that is alone.

    mask, turn, old_logprobs, prob_squares: [B, C]; sample: [B]. t counts the sampled tokens of a sample, turn after turn. Returns
    [B, C]."""
    if not mask.any():
        return torch.zeros_like(prob_squares)
    owner, number = sample[:, None].expand(mask.shape)[mask], turn[mask]  # of each sampled token
    order = (owner * (number.max() + 1) + number).argsort(stable=True)
    counts, place = owner.bincount(minlength=rewards.numel()), torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[owner[order]]

    def dense(values: Tensor, missing: float) -> Tensor:
        """Return values [n] of the sampled tokens by sample and place, [N, G, T]."""
        empty = values.new_full((rewards.numel(), int(counts.max())), missing)
        return empty.index_put((owner, place), values).view(*rewards.shape, -1)

    R = dense(returns(rewards, steps).flatten(0, 1)[owner, number], torch.nan)
    W = dense((1 - 2 * old_logprobs.exp() + prob_squares)[mask].to(R.dtype), 0.0).cumsum(2)
    W = W.masked_fill(R.isnan(), 0.0)
    baseline = (W * R.nan_to_num(0.0)).sum(1, keepdim=True) / W.sum(1, keepdim=True).clamp(min=1e-8)  # [N, 1, T]
    several = (~R.isnan()).sum(1, keepdim=True) > 1
    R_of_places = R.transpose(1, 2).flatten(0, 1)  # [N T, G]
    centred = less_baseline(R_of_places, baseline.transpose(1, 2).flatten(0, 1)).view(len(R), -1, R.shape[1])
    A = torch.where(several, centred.transpose(1, 2), R).flatten(0, 1)
    return torch.zeros_like(prob_squares).masked_scatter(mask, A[owner, place].to(prob_squares.dtype))


def remax(rewards: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """A = r - the reward of the greedy answer to the same prompt, the part `greedy` of a reward, ReMax, arXiv 2310.10505."""
    try:
        greedy = parts["greedy"]
    except KeyError as error:
        line = f"parts has no {error}, the reward of a greedy answer; it has {', '.join(parts)}"
        raise UserError(f"{line}: set selection=greedy, which samples these answers") from error
    differs = has_signal(torch.stack([rewards, greedy], dim=2).flatten(0, 1)).view_as(rewards)
    return torch.where(differs | rewards.isnan(), rewards - greedy, 0.0)


# -- by columns of the examples


def column(examples: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Return a column of the N examples, one text each; "" for an empty example. Raises UserError if one has no such column."""
    for example in filter(None, examples):  # an empty one stands for a group without samples
        if name not in example:
            raise UserError(f"an example has no column {name!r}; it has {', '.join(map(str, example))}")
    return [str(example[name]) if example else "" for example in examples]


def peers(
    rewards: Tensor, examples: Sequence[Mapping[str, Any]], columns: Sequence[str] = ("role", "source")
) -> Tensor:
    """A_i = r_i - mean(r) over all samples of the rollout whose examples agree in these columns, 0 for one that is alone: the
    hierarchical baseline of prime-rl. Solvers of one proposed problem are peers, and so are proposers of one source task; a
    column with the role keeps the two apart."""
    keys = [*zip(*(column(examples, name) for name in columns), strict=True)]
    advantages = torch.zeros_like(rewards)
    for key in set(keys):
        rows = [n for n, other in enumerate(keys) if other == key]
        values = rewards[rows].flatten()[None]
        advantages[rows] = less_baseline(values, values.nanmean()).view(len(rows), -1)
    return advantages


@enforced("Algorithm.advantage")
class RoleBaseline:
    """A = r - b of the example's role, and then b becomes decay b + (1 - decay) r: one sample after the other, from rollout to
    rollout. Role-conditioned advantage estimation, arXiv 2506.24119. role: the column with the role. Every b is 0 at first, and
    is saved with the run."""

    def __init__(self, role: str = "role", decay: Share = 0.95) -> None:
        self.role, self.decay = role, decay
        self.baselines: dict[str, float] = {}

    def __call__(self, rewards: Tensor, examples: Sequence[Mapping[str, Any]]) -> Tensor:
        advantages = torch.full_like(rewards, torch.nan)
        for n, role in enumerate(column(examples, self.role)):
            for g, reward in enumerate(rewards[n].tolist()):
                if reward == reward:  # no NaN
                    baseline = self.baselines.get(role, 0.0)
                    advantages[n, g] = reward - baseline
                    self.baselines[role] = self.decay * baseline + (1 - self.decay) * reward
        return advantages

    def state_dict(self) -> dict[str, Any]:
        return {"baselines": dict(self.baselines)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.baselines = dict(state["baselines"])
