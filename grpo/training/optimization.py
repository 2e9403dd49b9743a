"""Settings of the optimization: the optimizer, its schedule, and limits of the update's memory."""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grpo.models.logprobs import Layout
from grpo.system import distributed
from grpo.system.distributed import full
from grpo.system.errors import UserError
from grpo.system.output.words import plural
from grpo.system.ranges import Count, Positive, Share, enforced
from grpo.training.loss_scale import LossScale, LossScaling
from grpo.training.meter import Means

log = logging.getLogger(__name__)

T = TypeVar("T")
LONG = 1 << 20  # updates of a run in which every warm-up ends
MOST = 10_000  # steps of a schedule that are tried, in a tenth of a second


@enforced("optim")
@dataclass(frozen=True)
class Optimization:
    """How the policy is optimized.

    optimizer: from named parameters to an Optimizer.
    schedule: called with optimizer and num_training_steps (the updates of the run); returns an LRScheduler.
    warmup_ratio: the share of the updates in which the learning rate rises; None: the schedule's num_warmup_steps.
    max_tokens_per_microbatch: tokens that go through the model at once, which affects memory only; a row is never cut. None:
    8192 on a machine with a GPU, else 2048, which is as fast on a CPU.
    max_grad_norm: larger gradients are scaled down to it; None: no clipping.
    layout: how tokens are packed, see `grpo.models.logprobs`; results are the same.
    gradient_checkpointing: see `recomputing`; None: where the forecast says that an update does not fit without it. offload: see
    `with_masters`.
    max_skipped: the run ends if so many updates in a row are skipped, because their gradient is not finite. skipped: the folder
    where they are written. loss_scale: of the loss, where passes compute in float16.
    """

    optimizer: Callable[[Iterable[tuple[str, Tensor]]], Optimizer]
    schedule: Callable[..., LRScheduler]
    max_tokens_per_microbatch: Count | None = None
    max_grad_norm: Positive | None = 1.0
    layout: Layout = "shared_prompt"
    gradient_checkpointing: bool | None = False
    offload: bool = False
    max_skipped: Count = 3
    skipped: str = "skipped"
    warmup_ratio: Share | None = None
    loss_scale: LossScaling = field(default_factory=LossScaling)

    def __post_init__(self) -> None:
        if self.max_tokens_per_microbatch is None:
            object.__setattr__(self, "max_tokens_per_microbatch", 8192 if torch.accelerator.is_available() else 2048)
        self.tried(LONG)  # finds a wrong name or value before a model is loaded

    def tried(self, num_updates: int, steps: int = 1) -> None:
        """Make `steps` steps of a run of num_updates on two small tensors. Raises UserError if they fail."""
        part, hint = "optimizer", "it is built from the parameters as (name, tensor)"
        try:
            shapes = {"weight": (1, 1), "bias": (1,)}
            optimizer = self.optimizer([(name, torch.zeros(s, requires_grad=True)) for name, s in shapes.items()])
            optimizer.step()
            part, hint = "schedule", f"in a run of {plural(num_updates, 'update')}, after each of which it steps"
            schedule = self.built(optimizer, num_updates)
            optimizer.step()  # again, because the schedule wants a step after its own start
            for _ in range(steps):
                schedule.step()
        except UserError:
            raise
        except Exception as error:  # an optimizer's code may raise anything
            raise UserError(f"optim.{part}: {error} ({hint})") from error

    def scheduled(self, optimizer: Optimizer, num_updates: int) -> LRScheduler:
        """Return the schedule of a run, which has been tried to its end. Raises UserError."""
        self.tried(num_updates, min(num_updates, MOST))
        return self.built(optimizer, num_updates)

    def built(self, optimizer: Optimizer, num_updates: int) -> LRScheduler:
        """Return the schedule of a run."""
        warmup = {}
        if self.warmup_ratio is not None:
            warmup["num_warmup_steps"] = math.ceil(self.warmup_ratio * num_updates)
        return self.schedule(optimizer=optimizer, num_training_steps=num_updates, **warmup)


def learned_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def average_over_ranks(learned: Iterable[Tensor], device: torch.device) -> None:
    """Replace each gradient by its mean over all ranks. device: where messages between ranks are."""
    for p in learned if distributed.world_size() > 1 else ():
        if p.grad is not None:
            p.grad = (distributed.all_sum(p.grad.to(device)) / distributed.world_size()).to(p.device)


def clipped(optimizer: Optimizer, most: float | None, means: Means, scale: LossScale) -> bool:
    """Scale the gradient of each part of the parameters down to the norm `most`; None: not at all. Notes the norms before as
    PART/grad_norm, and returns whether all are finite. A group of parameters has its part as a key, else it is of `loss`.

    scale: of the loss; it is taken out of the gradient first, and then changes by whether that is finite.
    """
    scale.unscale(learned_by(optimizer))
    if scale.used:
        means.add("loss/scale", scale.value)
    parts: dict[str, list[Tensor]] = {}
    for group in optimizer.param_groups:
        parts.setdefault(group.get("part", "loss"), []).extend(group["params"])
    norms = {part: full(nn.utils.clip_grad_norm_(learned, most or torch.inf)) for part, learned in parts.items()}
    finite = all(norm.isfinite() for norm in norms.values())
    scale.note(finite)
    if scale.used:
        means.add("loss/overflowed", scale.halved)
    for part, norm in () if scale.halved else norms.items():
        means.add(f"{part}/grad_norm", norm)
    return finite


@dataclass
class TokensAtOnce:
    """The limit of tokens that go through the model at once. Mutable: `most` is halved when memory runs out."""

    most: int

    def fitting(self, gradients: Callable[[], T], zero_grad: Callable[[], None], longest: int) -> T:
        """Return gradients(). If memory runs out, drop what it added and call it again, with half as many tokens at once.

        longest: tokens of the longest row, which is never cut. Raises torch.OutOfMemoryError if less does not help, and with
        several devices, where the others have gone on.
        """
        while True:
            try:
                return gradients()
            except torch.OutOfMemoryError:
                if self.most <= longest or distributed.world_size() > 1:
                    raise
            zero_grad()
            torch.cuda.empty_cache()
            self.most = max(longest, self.most // 2)
            log.warning("out of memory: from now on optim.max_tokens_per_microbatch=%d", self.most)
