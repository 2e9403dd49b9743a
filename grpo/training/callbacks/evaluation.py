"""EvaluationCallback: evaluates the policy on held-out examples, before training and every few rollouts."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import lightning as L
import torch

from grpo.evaluation.evaluator import Evaluation, Evaluator
from grpo.rollout.samples_table import on_disk
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.rollout import RolloutCallback


class EvaluationCallback(L.Callback):
    """Evaluates the policy, and sends all metrics to the loggers.

    It comes after RolloutCallback, and uses its engine, task and renderer while no rollout is being played. examples: the
    held-out examples by the names of `Evaluator.sources`; examples of other names are ignored.
    """

    def __init__(self, rollout: RolloutCallback, evaluator: Evaluator, examples: Mapping[str, Sequence]) -> None:
        self.rollout, self.evaluator, self.examples = rollout, evaluator, examples
        self.accuracy: float | None = None  # the latest held-out accuracy
        self.first: list[Evaluation] = []  # the evaluation before training

    def progress(self) -> dict[str, float | None]:
        """Return the run's progress for the manifest; accuracy is the latest held-out accuracy."""
        total, learned = self.rollout.plan.num_rollouts, self.rollout.rollouts
        return {"rollouts": learned, "num_rollouts": total, "accuracy": self.accuracy}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.rollout.rollouts == 0 and self.evaluator.due(0, self.rollout.plan.num_rollouts):
            self.first = [self.evaluate()]
            record(trainer, self.first[0].metrics, step=0)

    def on_train_batch_start(self, trainer, module, batch: RolloutBatch, batch_idx: int) -> None:
        batch.evaluations += self.first
        self.first = []

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        rollouts = batch.rollout + 1
        if self.evaluator.due(rollouts, self.rollout.plan.num_rollouts):
            batch.evaluations.append(self.evaluate())
            batch.metrics |= batch.evaluations[-1].metrics
        batch.recorded = dict(batch.metrics)
        record(trainer, batch.recorded, rollouts)

    def evaluate(self) -> Evaluation:
        """Evaluate the present policy."""
        rollout, makes = self.rollout, self.rollout.makes
        if rollout.ahead:
            rollout.ahead.wait()
        begun = time.perf_counter()
        rollout.sync()
        failed = Path(makes.folder) / "evaluations" / f"{rollout.rollouts:06d}.failed.parquet"
        with makes.sampling(), on_disk(failed):
            evaluation = self.evaluator(
                makes.task, makes.engine, makes.renderer, makes.seed, rollout.rollouts, self.examples
            )
        self.accuracy = evaluation.metrics["eval/accuracy"]
        return replace(evaluation, seconds=time.perf_counter() - begun)


def record(trainer: L.Trainer, metrics: dict[str, float], step: int) -> None:
    """Send metrics to all loggers. step: the number of rollouts learned from."""
    metrics = {name: float(value) for name, value in metrics.items()}
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step)
    # monitors (early stopping, a sweep's objective) read the latest values here
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
