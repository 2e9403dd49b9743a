"""Measure: the times and tokens of a rollout. Recorder: what other callbacks note of it. `record` sends it to the loggers."""

import time
from collections import Counter

import lightning as L
import torch

from grpo.system.calls import SPENT
from grpo.system.errors import UserError
from grpo.training.batch import RolloutBatch

OTHERS = ("an environment of ", "claims of ")  # calls that compute no reward


def scoring() -> float:
    """Return the seconds in which any reward was computed, since the run began."""
    return sum(seconds for name, seconds in SPENT.items() if not name.startswith(OTHERS))


class Measure(L.Callback):
    """Adds time/started and time/score, from which the report makes the timeline, and data/tokens and data/tokens_learned, the
    counts since the run began, to the metrics of each rollout. It must be listed before RolloutCallback."""

    begun = started = scored = 0.0
    state_key = "Tokens"  # its name in checkpoints

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.begun = time.perf_counter()

    def on_train_batch_start(self, trainer, module, batch: RolloutBatch, batch_idx: int) -> None:
        self.started, self.scored = time.perf_counter() - self.begun, scoring()

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        learned = float(batch.scores.lengths.sum())
        self.counts.update({"data/tokens": batch.metrics["rollout/tokens"], "data/tokens_learned": learned})
        batch.metrics |= self.counts | {"time/started": self.started, "time/score": scoring() - self.scored}

    def state_dict(self) -> dict[str, float]:
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.counts = Counter(state)


class Recorder(L.Callback):
    """Sends the numbers of `module.note`, and those that callbacks have put into `batch.metrics` since EvaluationCallback sent
    the others. Only Checkpoint comes later. Numbers that are noted at the end of the run are sent then."""

    step = 0  # rollouts learned from

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

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
