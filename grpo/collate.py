"""Layer 2 - turns and advantages to a TokenBatch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo.rollout import Group
from grpo.tokens import TokenBatch, Turn


def collate(groups: Sequence[Group], advantages: Tensor) -> TokenBatch:
    """One row a turn, each with its episode's advantage.

    advantages: [N, G]; NaN, where no reward could be given, makes a row with nothing to learn from (mask all False).
    Rows are never dropped: every rank and every update must see the same number.
    """
    rows: list[tuple[Turn, float]] = []
    for group, group_advantages in zip(groups, advantages.tolist(), strict=True):
        for sample, advantage in zip(group, group_advantages, strict=True):
            rows += [(turn, advantage) for turn in sample.turns]

    prompt_width = max(len(turn.prompt_ids) for turn, _ in rows)
    width = max(len(turn.completion.ids) for turn, _ in rows)
    ids = torch.zeros(len(rows), prompt_width + width, dtype=torch.int64)
    attention_mask = torch.zeros_like(ids)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    rollout_logprobs = torch.zeros(len(rows), width)  # padding: `mask` keeps it out of every sum
    for i, (turn, advantage) in enumerate(rows):
        start, end = prompt_width - len(turn.prompt_ids), prompt_width + len(turn.completion.ids)
        ids[i, start:end] = torch.tensor(turn.prompt_ids + turn.completion.ids)
        attention_mask[i, start:end] = 1
        mask[i, : len(turn.completion.ids)] = advantage == advantage
        rollout_logprobs[i, : len(turn.completion.ids)] = torch.tensor(turn.completion.logprobs)
    return TokenBatch(
        ids, attention_mask, mask, rollout_logprobs, torch.tensor([advantage for _, advantage in rows]).nan_to_num(0.0)
    )
