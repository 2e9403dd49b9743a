"""The learning rate as a function of the update."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from grpo.system.ranges import Whole


def schedule(
    optimizer: Optimizer,
    name: str = "constant_with_warmup",
    num_warmup_steps: Whole = 0,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> LRScheduler:
    """Return the schedule of transformers with this name. Raises ValueError, or what that schedule raises.

    The default is made here: transformers' schedules come with peft and bitsandbytes, which take longer to import than torch.
    """
    if name != "constant_with_warmup" or scheduler_specific_kwargs:
        from transformers import get_scheduler

        return get_scheduler(name, optimizer, num_warmup_steps, num_training_steps, scheduler_specific_kwargs)
    return LambdaLR(optimizer, lambda step: step / num_warmup_steps if step < num_warmup_steps else 1.0)
