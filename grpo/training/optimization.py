"""Settings of the optimization: the optimizer, its schedule, and limits of the update's memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grpo.models.logprobs import Layout
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Positive, enforced


@enforced("optim")
@dataclass(frozen=True)
class Optimization:
    """How the policy is optimized.

    optimizer: from named parameters to an Optimizer.
    schedule: called with optimizer and num_training_steps (the updates of the run); returns an LRScheduler.
    max_tokens_per_microbatch: tokens that go through the model at once, which affects memory only; a row is never cut.
    max_grad_norm: larger gradients are scaled down to it; None: no clipping.
    layout: how tokens are packed, see `grpo.models.logprobs`; results are the same.
    gradient_checkpointing: see `recomputing`. offload: see `with_masters`.
    max_skipped: the run ends if so many updates in a row are skipped, because their gradient is not finite. skipped: the folder
    where they are written.
    """

    optimizer: Callable[[Iterable[tuple[str, Tensor]]], Optimizer]
    schedule: Callable[..., LRScheduler]
    max_tokens_per_microbatch: Count = 8192
    max_grad_norm: Positive | None = 1.0
    layout: Layout = "shared_prompt"
    gradient_checkpointing: bool = False
    offload: bool = False
    max_skipped: Count = 3
    skipped: str = "skipped"

    def __post_init__(self) -> None:
        try:  # two small tensors, to find a wrong name or value before a model is loaded
            shapes = {"weight": (1, 1), "bias": (1,)}
            optimizer = self.optimizer([(name, torch.zeros(s, requires_grad=True)) for name, s in shapes.items()])
            schedule = self.schedule(optimizer=optimizer, num_training_steps=1)
            optimizer.step()
            schedule.step()
        except UserError:
            raise
        except Exception as error:  # an optimizer's code may raise anything
            raise UserError(f"optim: {error} (an optimizer is built from the parameters as (name, tensor))") from error
