"""How the policy is optimized: the optimizer, its schedule, and what bounds the memory of an update."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grpo.models.logprobs import Layout
from grpo.system.errors import UserError, check_least, oneof


@dataclass(frozen=True)
class Optimization:
    """optimizer: named parameters to Optimizer. schedule: (optimizer=, num_training_steps=updates of the run) to LRScheduler.

    max_tokens_per_microbatch: how many go through the model at once, a matter of memory only; a row is never cut. layout: how
    they are laid out, see `grpo.models.logprobs`; the numbers are the same. max_grad_norm: 0 does not clip.
    gradient_checkpointing: see `recomputing`. offload: see `with_masters`.
    """

    optimizer: Callable[[Iterable[tuple[str, Tensor]]], Optimizer]
    schedule: Callable[..., LRScheduler]
    max_tokens_per_microbatch: int = 8192
    max_grad_norm: float = 1.0
    layout: Layout = "shared_prompt"
    gradient_checkpointing: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        check_least("optim.max_tokens_per_microbatch", self.max_tokens_per_microbatch, 1)
        oneof("optim.layout", self.layout, get_args(Layout))
        try:  # on two numbers, to find a wrong name or value before a model loads
            shapes = {"weight": (1, 1), "bias": (1,)}
            optimizer = self.optimizer([(name, torch.zeros(s, requires_grad=True)) for name, s in shapes.items()])
            schedule = self.schedule(optimizer=optimizer, num_training_steps=1)
            optimizer.step()
            schedule.step()
        except UserError:
            raise
        except Exception as error:  # whatever an optimizer of others raises
            raise UserError(f"optim: {error} (an optimizer is made of the parameters as (name, tensor))") from error
