"""Health: warns once when a metric leaves the range in which runs are well, and says what to do."""

import logging

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from grpo.runs.health import Watch
from grpo.system.errors import UserError
from grpo.system.metrics import WATCHED
from grpo.training.batch import RolloutBatch

log = logging.getLogger(__name__)


class Health(L.Callback):
    """ignore: metrics without warnings. Comes after RolloutCallback, which collects the metrics."""

    def __init__(self, ignore: tuple[str, ...] = ()) -> None:
        known = [metric.name for metric in WATCHED]
        if isinstance(ignore, str) or not set(ignore) <= set(known):
            raise UserError(f"callbacks.health.ignore={ignore} must be a list of some of {', '.join(known)}")
        self.ignored, self.watch = frozenset(ignore), Watch()
        self.watch.silent |= self.ignored

    @rank_zero_only
    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        for found in self.watch.findings(batch.rollout + 1, batch.metrics):
            log.warning(f"rollout {found.rollout}: {found.metric} is {found.value:.3g}, {found.words}")

    def warned(self) -> list[str]:
        """The metrics that had a warning, also before a resume."""
        return sorted(self.watch.silent - self.ignored)

    def state_dict(self) -> dict:
        return {"silent": sorted(self.watch.silent)}

    def load_state_dict(self, state: dict) -> None:
        self.watch.silent |= set(state["silent"])
