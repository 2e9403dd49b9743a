"""Prompts with pictures, for the forecast of a policy that sees. The decoder makes them, since it knows its pictures."""

from dataclasses import replace

import torch
from torch import nn

from grpo.models.adapted import without_adapter
from grpo.objectives.batch import TokenBatch


def prompts_of(policy: nn.Module, tokens: int, count: int) -> list[list[int]]:
    """Return prompts of so many tokens, which have pictures if the policy sees: then its own code computes their features."""
    pictures = getattr(without_adapter(policy).get_decoder(), "imagined", None)
    return [[0] * tokens] * count if pictures is None else pictures(tokens, count)


def with_prompts_that_see(batch: TokenBatch, policy: nn.Module, group_size: int) -> TokenBatch:
    """Return a batch of groups whose prompts have pictures, if the policy sees."""
    if not hasattr(without_adapter(policy).get_decoder(), "imagined"):
        return batch
    prompts = torch.tensor(prompts_of(policy, batch.prompt_width, -(-len(batch) // group_size)))
    prompts = prompts.repeat_interleave(group_size, dim=0)[: len(batch)]
    return replace(batch, ids=torch.cat([prompts, batch.ids[:, batch.prompt_width :]], dim=1))
