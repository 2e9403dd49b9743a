"""Texts: a few samples to the loggers that show text."""

from collections.abc import Sequence
from itertools import islice

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from grpo.rollout.samples_table import records
from grpo.rollout.types import Group
from grpo.runs.trackers import Row, Tracker
from grpo.training.batch import RolloutBatch

SHOWN = ("prompt", "completion", "reward", "advantage", "tokens")


class Texts(L.Callback):
    """The first `samples` of a rollout as rollout/samples, after the first one and every `every` rollouts (0: never); and of each
    evaluation as eval/samples, of the same examples each time."""

    def __init__(self, samples: int = 4, every: int = 10) -> None:
        self.count, self.every = samples, every

    @rank_zero_only
    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        rollout = batch.rollout + 1
        due = self.every and (rollout == 1 or rollout % self.every == 0)
        for tracker in (logger for logger in trainer.loggers if isinstance(logger, Tracker)):
            if due:
                tracker.log_samples("rollout/samples", self.rows(batch.groups, advantage=batch.advantages), rollout)
            for evaluation in batch.evaluations:
                tracker.log_samples("eval/samples", self.rows(evaluation.groups), evaluation.rollout)

    def rows(self, groups: Sequence[Group], **columns: Sequence[Sequence[float]]) -> list[Row]:
        return [
            {name: row[name] for name in SHOWN if name in row} for row in islice(records(groups, **columns), self.count)
        ]
