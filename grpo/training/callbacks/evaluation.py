"""EvaluationCallback: how good the policy is on held-out examples, before training and every few rollouts."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lightning as L
import torch

from grpo.env.types import Example
from grpo.evaluation.evaluator import Evaluation, Evaluator
from grpo.rollout.samples_table import on_disk
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.rollout import RolloutCallback


class EvaluationCallback(L.Callback):
    """Behind RolloutCallback, whose engine, task and renderer it uses when no rollout is being played."""

    def __init__(self, rollout: RolloutCallback, evaluator: Evaluator, held_out: Sequence[Example]) -> None:
        self.rollout, self.evaluator, self.held_out = rollout, evaluator, held_out
        self.accuracy: float | None = None  # held out, the latest
        self.first: list[Evaluation] = []  # of the policy before training

    def progress(self) -> dict[str, float | None]:
        """For the manifest. accuracy: the latest on the held-out examples."""
        learned = {"rollouts": self.rollout.rollouts, "num_rollouts": self.rollout.plan.num_rollouts}
        return learned | {"accuracy": self.accuracy}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.rollout.rollouts == 0 and self.evaluator.on_start and self.evaluator.every:
            self.first = [self.evaluate()]
            record(trainer, self.first[0].metrics, step=0)

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: RolloutBatch, batch_idx: int
    ) -> None:
        batch.evaluations += self.first
        self.first = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: dict, batch: RolloutBatch, batch_idx: int
    ) -> None:
        rollouts, every = batch.rollout + 1, self.evaluator.every
        if every and (rollouts == self.rollout.plan.num_rollouts or rollouts % every == 0):
            batch.evaluations.append(self.evaluate())
            batch.metrics |= batch.evaluations[-1].metrics
        record(trainer, batch.metrics, rollouts)

    def evaluate(self) -> Evaluation:
        """Of the policy as it is now."""
        rollout, makes = self.rollout, self.rollout.makes
        if rollout.ahead:
            rollout.ahead.wait()
        begun = time.perf_counter()
        rollout.sync()
        failed = Path(makes.folder) / "evaluations" / f"{rollout.rollouts:06d}.failed.parquet"
        with makes.autocast(), on_disk(failed):
            evaluation = self.evaluator(
                makes.task, makes.engine, makes.renderer, makes.seed, rollout.rollouts, self.held_out
            )
        self.accuracy = evaluation.metrics["eval/accuracy"]
        return replace(evaluation, seconds=time.perf_counter() - begun)


def record(trainer: L.Trainer, metrics: dict[str, float], step: int) -> None:
    """To all loggers. step: rollouts learned from."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step)
    # where monitors (early stopping, a sweep's objective) look for the latest values
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
