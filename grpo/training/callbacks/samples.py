"""Samples: every rollout and every evaluation as a table in a file, for people, notebooks and reports."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from grpo.rollout.samples_table import records, token_logprobs, write
from grpo.rollout.types import Group
from grpo.training.batch import RolloutBatch


class Samples(L.Callback):
    """folder: gets rollouts/000001.parquet and evaluations/000000.parquet ..., numbered by rollouts learned from.

    every: rollouts between two that are written, 0 for none; evaluations are all written. token_logprobs: also every token that
    was sampled, with the engine's log-probability of it.
    """

    def __init__(self, folder: str, every: int = 1, token_logprobs: bool = False) -> None:
        self.folder, self.every, self.token_logprobs = Path(folder), every, token_logprobs

    @rank_zero_only
    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        rollout = batch.rollout + 1
        if self.every and rollout % self.every == 0:
            columns = {"advantage": batch.advantages}
            if "overlong" in batch.scores.parts:
                columns["overlong"] = batch.scores.parts["overlong"].tolist()
            self.write("rollouts", rollout, batch.groups, columns)
        for evaluation in batch.evaluations:
            self.write("evaluations", evaluation.rollout, evaluation.groups, evaluation.columns)

    def write(self, kind: str, rollout: int, groups: Sequence[Group], columns: Mapping[str, Any]) -> None:
        columns = {**columns, **(token_logprobs(groups) if self.token_logprobs else {})}
        rows = ({"rollout": rollout, **row} for row in records(groups, **columns))
        write(self.folder / kind / f"{rollout:06d}.parquet", rows)
