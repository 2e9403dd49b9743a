"""The choice of what several devices share."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from grpo.extras.devices.watched import WatchedRanks
from grpo.system.ranges import enforced

log = logging.getLogger(__name__)


@enforced("strategy")
@dataclass(frozen=True)
class Strategy:
    """A choice of what several devices share.

    kind: ddp: every device has the whole policy. fsdp2: each has a part (extras/devices/sharding.py). auto: ddp where that fits.
    reshard: whether a layer is given up between its forward and its backward pass. checkpoint: sharded: each writes a part.
    """

    kind: Literal["auto", "ddp", "fsdp2"] = "auto"
    reshard: bool = True
    checkpoint: Literal["whole", "sharded"] = "whole"

    def chosen(self, needs: Callable[[], int], total: int) -> "Strategy":
        """Return ddp or fsdp2 in place of auto, and log why. needs: the bytes of one device with ddp. total: those that it may
        fill."""
        if self.kind != "auto":
            return self
        wanted = needs()
        kind, fits = ("ddp", "fits") if wanted <= total else ("fsdp2", "does not fit")
        log.info("strategy=%s: the whole policy needs %.1f GB, which %s %.1f GB", kind, wanted / 1e9, fits, total / 1e9)
        return replace(self, kind=kind)

    def of_lightning(
        self, needs: Callable[[], int], total: int, timeout: float, ranks: int, precision: str
    ) -> tuple[Any, str]:
        """Return Lightning's strategy for several ranks, and the precision that its Trainer gets."""
        if self.chosen(needs, total).kind == "ddp":
            return WatchedRanks(timeout), precision
        from grpo.extras.devices.sharding import Sharded

        # passes of a sharded model have a number type of their own
        return Sharded(timeout, ranks, self.reshard, self.checkpoint == "sharded", precision), "32-true"
