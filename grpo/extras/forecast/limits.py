"""The memory that a run may fill: of its device, of the host, or of a card that is not here (`trainer.card`)."""

import lightning as L
import torch

from grpo.engines.protocol import Engine
from grpo.models import packing
from grpo.system import memory

CPU = torch.device("cpu")
# the kernels of FlexAttention want more shared memory than the 64 KB of an older card
FLEX_FROM = (8, 0)


def takes_flex(trainer: L.Trainer) -> bool:
    """Return whether FlexAttention computes attention on the GPU of a run: if that is known to be new enough, and nothing has
    failed."""
    if any(kernel.failed for kernel in packing.ON_GPU):
        return False
    if card := getattr(trainer, "card", None):
        return (card.capability or FLEX_FROM) >= FLEX_FROM
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= FLEX_FROM


def limit_of(trainer: L.Trainer) -> int:
    """Return the bytes of its device that a run may fill, among them those that this process holds already.

    On a GPU what is free and what is held, less a slack. CUDA's own memory is not free once it has started, and the forecast
    counts it again: a plan errs on the safe side.
    """
    if card := getattr(trainer, "card", None):
        return memory.with_slack(card.size)
    place = trainer.strategy.root_device
    if place.type == "cuda":
        return memory.with_slack(memory.free(place) + torch.cuda.memory_reserved(place))
    return memory.held(place) + memory.free(place) // (trainer.num_devices if place == CPU else 1)


def to_fill(engine: Engine, trainer: L.Trainer) -> int:
    """Return the bytes of its device by which a run chooses: those of `limit_of` without what it holds and will not give back.

    Several ranks choose each alone and must choose the same, so that theirs are of the whole GPU, whatever is free on each.
    """
    card, place = hasattr(trainer, "card"), trainer.strategy.root_device
    if place.type == "cuda" and trainer.world_size > 1 and not card:
        return memory.with_slack(memory.total(place))
    return limit_of(trainer) - (0 if card or getattr(engine, "sleeps", False) else memory.held(place))


def host_limit(trainer: L.Trainer) -> tuple[int, int | None]:
    """Return the bytes of the CPU's memory that a process of a GPU holds, and those that it may fill; None on another machine."""
    if hasattr(trainer, "card"):
        return 0, None
    return memory.held(CPU), memory.held(CPU) + memory.free(CPU) // trainer.num_devices
