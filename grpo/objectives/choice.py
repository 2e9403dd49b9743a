"""Which tokens the surrogate counts. Pure functions over the n tokens of a rollout, those of all ranks, in one order.

A choice returns [n] bool. Its parameters name its arguments: `logprobs` and `entropy` of the policy before the first update, and
`advantages`, [n] each; `rng`, a generator with the same state on all ranks.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from grpo.objectives.arguments import call
from grpo.objectives.batch import TokenBatch
from grpo.system import distributed
from grpo.system.errors import UserError
from grpo.system.ranges import SomeShare


def chosen_tokens(choice: Callable[..., Tensor], tokens: TokenBatch, rng: torch.Generator) -> Tensor:
    """Return the tokens that count, [B, C] bool. tokens: this rank's, with old_logprobs, old_entropy and advantages. The order in
    which the choice sees them depends on their samples alone, not on ranks, microbatches or the order of rows."""
    mask, sample = tokens.mask, tokens.sample[:, None].expand(tokens.mask.shape)
    fields = (sample, tokens.old_logprobs, tokens.old_entropy, tokens.advantages)
    of_rank = [values[mask].cpu() for values in fields]  # [n of this rank] each
    of_ranks = distributed.all_gather([of_rank])
    samples, logprobs, entropy, advantages = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))  # [n] each
    order = samples.argsort(stable=True)
    offered = {"logprobs": logprobs[order], "entropy": entropy[order], "advantages": advantages[order], "rng": rng}
    counted = torch.zeros(len(order), dtype=torch.bool).scatter(0, order, call("choice", choice, offered))
    start = sum(len(samples) for samples, *_ in of_ranks[: distributed.rank()])
    here = counted[start : start + len(of_rank[0])].to(mask.device)
    return torch.zeros_like(mask).masked_scatter(mask, here)


def top_entropy(entropy: Tensor, share: SomeShare) -> Tensor:
    """The tokens of highest entropy, [n]: this share of all. There the policy decides (arXiv 2506.01939)."""
    # not torch.quantile: it refuses more than 2^24 numbers, and a rollout may have more tokens
    threshold = float(np.quantile(entropy.double().numpy(), 1 - share)) if len(entropy) else 0.0
    return entropy >= threshold


def with_top_entropy(choice: Callable[..., Tensor] | None, share: float) -> Callable[..., Tensor] | None:
    """Return the choice of an algorithm: `top_entropy` if its share is below 1, else `choice`."""
    if share == 1:
        return choice
    if (choice and getattr(choice, "func", None)) not in (None, top_entropy):
        line = "Algorithm.top_entropy below 1 is a choice of tokens of its own"
        raise UserError(f"{line}: set it to 1, or Algorithm.choice=none")
    return partial(top_entropy, share=share)
