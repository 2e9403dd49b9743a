"""The temperature of each token: the run's, or that at which its sample was drawn."""

from dataclasses import replace

import torch
from torch import Tensor

from grpo.objectives.batch import TokenBatch
from grpo.system.memory import sent


def temperatures(batch: TokenBatch, temperature: float, packed: bool = False) -> float | Tensor:
    """Return what divides the logits before each token: a number if it is the run's `temperature` for all of
    them, else a tensor, [B, C]; if `packed`, only of sampled tokens, [n], ordered as `batch.mask`."""
    if batch.temperature is None:
        return temperature
    every = torch.where(batch.temperature > 0, batch.temperature, temperature)  # [B, C]
    if not packed:
        return every
    # of the host, which must not wait for a device
    sampled = (batch.host or batch).mask.cpu().flatten().nonzero()[:, 0]
    return every.flatten().index_select(0, sent(sampled, every.device))


def at_half_of_it(batch: TokenBatch, temperature: float) -> TokenBatch:
    """Return the same tokens with half of their temperature. temperature: the run's."""
    every = torch.full_like(batch.rollout_logprobs, temperature) if batch.temperature is None else batch.temperature
    return replace(batch, temperature=torch.where(every > 0, every, temperature) / 2)
