"""Recorder: sends to the loggers what the user's callbacks have added to a rollout's metrics."""

import lightning as L
import torch

from grpo.system.errors import UserError
from grpo.training.batch import RolloutBatch


class Recorder(L.Callback):
    """Sends the numbers of `module.note`, and those that callbacks have put into `batch.metrics` since EvaluationCallback sent
    the others. Only Checkpoint comes later. Numbers that are noted at the end of the run are sent then."""

    step = 0

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        self.step = batch.rollout + 1
        changed = {name for name, value in batch.recorded.items() if batch.metrics.get(name) is not value}
        noted = getattr(module, "noted", {})
        if taken := changed | (batch.metrics.keys() & noted.keys()):
            raise UserError(f"the metric {min(taken)!r} is one of the run's own: give yours another name")
        batch.metrics |= noted
        self.send(trainer, {name: value for name, value in batch.metrics.items() if name not in batch.recorded})
        noted.clear()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.send(trainer, getattr(module, "noted", {}))

    def send(self, trainer: L.Trainer, metrics: dict[str, float]) -> None:
        """Send metrics to all loggers, if there are any."""
        if metrics:
            record(trainer, metrics, self.step)


def record(trainer: L.Trainer, metrics: dict[str, float], step: int) -> None:
    """Send metrics to all loggers. step: the number of rollouts learned from."""
    metrics = {name: float(value) for name, value in metrics.items()}
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step)
    # monitors (early stopping, a sweep's objective) read the latest values here
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
