"""Turns groups into tensors: turns become rows of a TokenBatch, rewards become Scores."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from grpo.env.tokens import Row, rows_of_turns
from grpo.objectives.batch import Scores, TokenBatch
from grpo.rollout.rollout_metrics import rectangle
from grpo.rollout.types import Group, Sample

NOTHING = Row((0,), (0,), (-1,), (0.0,))  # a rank needs a row even if all its environments failed at once


def collate(groups: Sequence[Group], first: Sequence[int] = ()) -> TokenBatch:
    """Return the rows of all samples, in order. first: the index in the rollout of each group's first one; none: all are here."""
    first = first or list(accumulate(map(len, groups), initial=0))
    samples = [one for start, group in zip(first, groups, strict=False) for one in enumerate(group, start)]
    owned = [(s, sample, row) for s, sample in samples for row in rows_of_turns(sample.turns)]
    owned = owned or [(first[0], None, NOTHING)]
    prompt_width = max(len(row.prompt_ids) for *_, row in owned)
    width = max(len(row.ids) for *_, row in owned)
    ids = torch.zeros(len(owned), prompt_width + width, dtype=torch.int64)  # [B, P + C]
    attention_mask = torch.zeros_like(ids)
    turn = torch.full((len(owned), width), -1)  # [B, C], as the next two
    advantages = torch.full((len(owned), width), torch.nan)
    rollout_logprobs, own = torch.zeros(2, len(owned), width)  # padding: `mask` keeps it out of every sum
    for i, (_, sample, row) in enumerate(owned):
        start, end = prompt_width - len(row.prompt_ids), prompt_width + len(row.ids)
        ids[i, start:end] = torch.tensor(row.prompt_ids + row.ids)
        attention_mask[i, start:end] = 1
        turn[i, : len(row.ids)] = torch.tensor(row.turns)
        for k in {*row.turns} - {-1}:
            of_turn = sample.turns[k].advantages
            if temperature := sample.turns[k].completion.temperature:
                own[i, turn[i] == k] = temperature
            advantages[i, turn[i] == k] = torch.tensor(sample.reward.advantage if of_turn is None else of_turn)
        rollout_logprobs[i, : len(row.ids)] = torch.tensor(row.logprobs)
    fresh = torch.tensor([sample is None or not sample.age for _, sample, _ in owned])
    tensors = (ids, attention_mask, turn >= 0, rollout_logprobs, torch.tensor([s for s, *_ in owned]))
    return TokenBatch(*tensors, turn=turn, given=advantages, temperature=own if own.any() else None, fresh=fresh)


def scores(groups: Sequence[Group]) -> Scores:
    """Return rewards and lengths, [N, G] each. NaN: a part that a reward lacks, and a reward that a smaller group lacks."""

    def tensor(value, missing: float = torch.nan) -> Tensor:  # [N, G], as `part` and `step`
        return torch.tensor(rectangle(groups, value, missing))

    def part(name: str) -> Tensor:
        return tensor(lambda sample: {**sample.reward.parts, "correct": sample.reward.correct}.get(name, torch.nan))

    def last(sample: Sample) -> int:
        return len(sample.turns[-1].completion.ids) if sample.turns else 0

    def step(k: int) -> Tensor:
        def value(sample: Sample) -> float:
            if k + 1 < len(sample.trajectory.steps):
                return sample.trajectory.steps[k + 1].state.reward
            return 0.0 if k < len(sample.turns) else torch.nan

        return tensor(value)

    turns = max((len(sample.turns) for group in groups for sample in group), default=0)
    names = dict.fromkeys(["correct", *(name for group in groups for sample in group for name in sample.reward.parts)])
    rewards = tensor(lambda sample: sample.reward.value)
    return Scores(
        rewards=rewards,
        parts={name: part(name).masked_fill(rewards.isnan(), torch.nan) for name in names},
        lengths=tensor(lambda sample: sample.length, 0),
        last_lengths=tensor(last, 0),
        truncated=tensor(lambda sample: sample.trajectory.truncated, 0).bool(),
        steps=torch.stack([step(k) for k in range(max(turns, 1))], dim=2),  # [N, G, turns]
        examples=[group[0].example if group else {} for group in groups],
        observations=[[sample.observations for sample in group] for group in groups],
    )
