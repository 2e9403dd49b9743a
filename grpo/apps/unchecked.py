"""In place of the preflight and of kernels, in a tree without them: no check, no forecast of memory, torch's kernels."""

from dataclasses import dataclass, replace
from typing import Any

import lightning as L

from grpo.training.optimization import Optimization


class NoCallback(L.Callback):
    """In place of PreflightCallback and KernelsCallback."""

    def __init__(self, *_: Any) -> None:
        """Takes what they take."""

    def facts(self) -> dict[str, Any]:
        """Return what the manifest gets: nothing."""
        return {}


@dataclass
class NoSizes:
    """In place of Sizes: the memory that a run needs is unknown, so layers are not recomputed unless the settings say so."""

    make_module: Any
    pretrained: Any
    plan: Any
    engine: Any
    longest: Any

    def needed(self, *_: Any) -> int:
        """Return 0: unknown."""
        return 0

    def fitted(self, optim: Optimization, trainer: L.Trainer) -> tuple[Optimization, None]:
        """Return the settings with a choice, and no parts of memory."""
        again, size = bool(optim.gradient_checkpointing), optim.tokens_at_once(trainer.strategy.root_device.type)
        return replace(optim, gradient_checkpointing=again, max_tokens_per_microbatch=size), None


def no_forecast(*_: Any, **__: Any) -> list:
    """In place of `forecast`."""
    return []
