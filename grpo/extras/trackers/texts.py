"""Texts: sends a few samples to the loggers that show text."""

from collections.abc import Sequence
from itertools import islice

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from grpo.extras.trackers.trackers import Row, Tracker
from grpo.rollout.samples_table import records
from grpo.rollout.types import Group
from grpo.system.ranges import Whole
from grpo.training.batch import RolloutBatch


class Texts(L.Callback):
    """Logs the first `samples` samples of a rollout as rollout/samples, and of each evaluation as eval/samples.

    every: logs the first rollout, and each multiple of this number; 0: none. Evaluations show the same examples each time.
    """

    def __init__(self, samples: Whole = 4, every: Whole = 10) -> None:
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
        """Return the first samples as rows of a table of samples. columns: more columns, in the shape of groups."""
        return list(islice(records(groups, **columns), self.count))
