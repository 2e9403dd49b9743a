"""Timing: when each rollout began, and how long rewards were computed. The timeline of the report is made from it."""

import time

import lightning as L

from grpo.system.calls import SPENT
from grpo.training.batch import RolloutBatch

OTHERS = ("an environment of ", "claims of ")  # calls that compute no reward


def scoring() -> float:
    """Return the seconds in which any reward was computed, since the run began."""
    return sum(seconds for name, seconds in SPENT.items() if not name.startswith(OTHERS))


class Timing(L.Callback):
    """Adds time/started and time/score to the metrics of each rollout. It must be listed before RolloutCallback."""

    begun = started = scored = 0.0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.begun = time.perf_counter()

    def on_train_batch_start(self, trainer, module, batch: RolloutBatch, batch_idx: int) -> None:
        self.started, self.scored = time.perf_counter() - self.begun, scoring()

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        batch.metrics |= {"time/started": self.started, "time/score": scoring() - self.scored}
