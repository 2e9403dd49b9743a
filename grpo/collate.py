"""Layer 2 - what was played to tensors: turns to a TokenBatch, rewards to Scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo.rollout import Group, Sample
from grpo.tokens import Scores, TokenBatch


def collate(groups: Sequence[Group], first: int = 0) -> TokenBatch:
    """One row a turn, in order, samples one after the other; `first` is the place of the first sample in the rollout."""
    turns = [turn for group in groups for sample in group for turn in sample.turns]
    samples = [sample for group in groups for sample in group]
    prompt_width = max(len(turn.prompt_ids) for turn in turns)
    width = max(len(turn.completion.ids) for turn in turns)
    ids = torch.zeros(len(turns), prompt_width + width, dtype=torch.int64)
    attention_mask = torch.zeros_like(ids)
    mask = torch.zeros(len(turns), width, dtype=torch.bool)
    rollout_logprobs = torch.zeros(len(turns), width)  # padding: `mask` keeps it out of every sum
    for i, turn in enumerate(turns):
        start, end = prompt_width - len(turn.prompt_ids), prompt_width + len(turn.completion.ids)
        ids[i, start:end] = torch.tensor(turn.prompt_ids + turn.completion.ids)
        attention_mask[i, start:end] = 1
        mask[i, : len(turn.completion.ids)] = True
        rollout_logprobs[i, : len(turn.completion.ids)] = torch.tensor(turn.completion.logprobs)
    owner = torch.tensor([s for s, sample in enumerate(samples, first) for _ in sample.turns])
    return TokenBatch(ids, attention_mask, mask, rollout_logprobs, owner)


def scores(groups: Sequence[Group]) -> Scores:
    """What the samples earned, [N, G] each. A part is NaN where a reward does not have it, or nobody could give the reward."""

    def tensor(value) -> Tensor:
        return torch.tensor([[float(value(sample)) for sample in group] for group in groups])

    def part(name: str) -> Tensor:
        return tensor(lambda sample: {**sample.reward.parts, "correct": sample.reward.correct}.get(name, torch.nan))

    def last(sample: Sample) -> int:
        return len(sample.turns[-1].completion.ids)

    names = dict.fromkeys(["correct", *(name for group in groups for sample in group for name in sample.reward.parts)])
    rewards = tensor(lambda sample: sample.reward.value)
    return Scores(
        rewards=rewards,
        parts={name: part(name).masked_fill(rewards.isnan(), torch.nan) for name in names},
        lengths=tensor(lambda sample: sample.length),
        last_lengths=tensor(last),
        truncated=tensor(lambda sample: sample.trajectory.truncated).bool(),
    )
