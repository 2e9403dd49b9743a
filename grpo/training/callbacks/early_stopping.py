"""EarlyStopping: ends a run well when a metric of its evaluations no longer improves."""

import logging

import lightning as L
from lightning.pytorch.callbacks import early_stopping

from grpo.system.errors import UserError
from grpo.system.metrics import about
from grpo.system.ranges import Count, NonNegative
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.checkpoint import Checkpoint
from grpo.training.callbacks.evaluation import EvaluationCallback

log = logging.getLogger(__name__)


class EarlyStopping(early_stopping.EarlyStopping):
    """Ends the run, with a checkpoint, after `patience` evaluations that are not better than the best by more than `min_delta`.

    monitor: a metric of evaluations. mode: max if higher is better, min if lower is. kwargs: more arguments of Lightning's
    EarlyStopping, such as stopping_threshold. Raises UserError if the run has no such metric, or no evaluations.
    """

    def __init__(
        self,
        monitor: str = "eval/accuracy",
        mode: str = "max",
        patience: Count = 5,
        min_delta: NonNegative = 0.0,
        **kwargs,
    ) -> None:
        if about(monitor) is None:
            raise UserError(f"callbacks.early_stopping.monitor={monitor} is no metric: docs/algorithms.md lists them")
        super().__init__(monitor, min_delta, patience, mode=mode, check_on_train_epoch_end=False, **kwargs)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if any(isinstance(each, EvaluationCallback) and not each.evaluator.every for each in trainer.callbacks):
            raise UserError(
                "callbacks.early_stopping would never end this run, which evaluates nothing: set eval.every"
            )
        if self.wait_count >= self.patience:
            log.info("this run has ended early, there is nothing to continue")
            raise SystemExit(0)

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        if trainer.should_stop or not batch.evaluations:  # it ends anyway, or there is nothing new
            return
        if self.monitor not in trainer.callback_metrics:
            evaluated = ", ".join(name for name in trainer.callback_metrics if name.startswith("eval/"))
            raise UserError(f"callbacks.early_stopping.monitor={self.monitor} is not measured here: choose {evaluated}")
        self._run_early_stopping_check(trainer)
        if trainer.should_stop:
            log.info("the run ends early after rollout %d: %s has not improved", batch.rollout + 1, self.monitor)
            for callback in trainer.callbacks:
                if isinstance(callback, Checkpoint) and callback.saved != callback.rollouts:
                    callback.save(trainer, module)
