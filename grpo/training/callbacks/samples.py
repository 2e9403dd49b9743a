"""Samples: writes every rollout and every evaluation to a Parquet table, for people, notebooks and reports."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from grpo.evaluation.evaluator import Evaluation
from grpo.rollout.samples_table import golds, records, replayable, token_divergences, token_logprobs, write
from grpo.rollout.types import Group
from grpo.system.files import surviving
from grpo.system.ranges import Whole
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.trainer import callbacks_of


class Samples(L.Callback):
    """Writes rollouts/000001.parquet ... and evaluations/000000.parquet ... to `folder`, numbered by rollouts learned from, and
    discarded/000001.parquet ... with the groups that were played and not learned from.

    every: rollouts between two that are written; 0: none. Evaluations are always written. token_logprobs: also write every
    sampled token with the engine's log-probability, and with its divergence to a teacher, if this rank has it. A table that
    cannot be written is written with the next one.
    """

    def __init__(self, folder: str, every: Whole = 1, token_logprobs: bool = False) -> None:
        self.folder, self.every, self.token_logprobs = Path(folder), every, token_logprobs
        self.waiting: dict[Path, list[dict]] = {}  # tables that could not be written, because the disk was full

    @rank_zero_only
    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        rollout = batch.rollout + 1
        if self.every and rollout % self.every == 0:
            players = callbacks_of(trainer.callbacks, RolloutCallback)
            task = next((callback.rollouts.task for callback in players), None)
            columns = {"advantage": batch.advantages, **golds(task, batch.groups)}
            if "overlong" in batch.scores.parts:
                columns["overlong"] = batch.scores.parts["overlong"].tolist()
            if self.token_logprobs:
                columns |= replayable(batch.groups, batch.version)
                if batch.tokens.divergence is not None:
                    columns |= token_divergences(batch.groups, batch.scores.rewards.shape[1], batch.tokens)
            self.write("rollouts", rollout, batch.groups, columns)
            if batch.discarded:
                self.write("discarded", rollout, batch.discarded, golds(task, batch.discarded))
        self.write_evaluations(batch.evaluations)

    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for callback in callbacks_of(trainer.callbacks, EvaluationCallback):
            self.write_evaluations(callback.first)

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Write the tables of evaluations."""
        for evaluation in evaluations:
            self.write("evaluations", evaluation.rollout, evaluation.groups, evaluation.columns)

    def write(self, kind: str, rollout: int, groups: Sequence[Group], columns: Mapping[str, Any]) -> None:
        """Write one table. kind: rollouts or evaluations. columns: more columns, in the shape of groups."""
        columns = {**columns, **(token_logprobs(groups) if self.token_logprobs else {})}
        rows = [{"rollout": rollout, **row} for row in records(groups, **columns)]
        self.waiting[self.folder / kind / f"{rollout:06d}.parquet"] = rows
        for file, table in list(self.waiting.items()):
            with surviving(str(file)):
                write(file, table)
                del self.waiting[file]
