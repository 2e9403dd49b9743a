"""EarlyStopping: ends a run well when a metric of its evaluations no longer improves."""

import logging
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import early_stopping

from grpo.system.errors import UserError
from grpo.system.metrics import require_metric
from grpo.system.ranges import Count, NonNegative
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.trainer import callbacks_of

log = logging.getLogger(__name__)

MONITOR = "callbacks.early_stopping.monitor"


class EarlyStopping(early_stopping.EarlyStopping):
    """Ends the run, with a checkpoint, after `patience` evaluations that are not better than the best by more than `min_delta`.

    monitor: a metric of evaluations; for another metric, patience counts rollouts. mode: max if higher is better, min if lower
    is. kwargs: more arguments of Lightning's EarlyStopping, such as stopping_threshold. Raises UserError if the run has no such
    metric, or no evaluations.
    """

    def __init__(
        self,
        monitor: str = "eval/accuracy",
        mode: Literal["max", "min"] = "max",
        patience: Count = 5,
        min_delta: NonNegative = 0.0,
        **kwargs,
    ) -> None:
        require_metric(MONITOR, monitor)
        self.of_evaluations = monitor.startswith("eval/")
        super().__init__(monitor, min_delta, patience, mode=mode, check_on_train_epoch_end=False, **kwargs)

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state | {"patience": self.patience})

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        evaluations = callbacks_of(trainer.callbacks, EvaluationCallback)
        if self.of_evaluations and any(not callback.evaluator.every for callback in evaluations):
            line = "callbacks.early_stopping would never end this run, which evaluates nothing"
            raise UserError(f"{line}: set eval.every")
        require_metric(MONITOR, self.monitor, trainer.callback_metrics)
        if self.wait_count >= self.patience:
            log.info("this run has ended early, there is nothing to continue")
            raise SystemExit(0)

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        nothing_new = self.of_evaluations and not batch.evaluations
        if trainer.should_stop or nothing_new:
            return
        require_metric(MONITOR, self.monitor, trainer.callback_metrics)
        for earlier in batch.evaluations[:-1] if self.of_evaluations else ():  # the one before training
            trainer.should_stop |= self._evaluate_stopping_criteria(torch.tensor(earlier.metrics[self.monitor]))[0]
        self._run_early_stopping_check(trainer)
        if trainer.should_stop:
            log.info("the run ends early after rollout %d: %s has not improved", batch.rollout + 1, self.monitor)
