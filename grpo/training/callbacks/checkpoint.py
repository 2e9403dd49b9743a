"""Checkpoint: writes checkpoints to resume from, and the policy as a folder that Hugging Face libraries load."""

import os
import shutil
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from transformers import PreTrainedTokenizerBase

from grpo.evaluation.statistics import Estimate
from grpo.runs.model_card import write_card
from grpo.system.errors import RolloutError, StopError
from grpo.system.ranges import Count, Whole
from grpo.training.batch import RolloutBatch


class Checkpoint(L.Callback):
    """Writes checkpoints, every `every` rollouts, at the end, when a reward fails, and when the run is asked to stop.

    They go to `folder`:

        last.ckpt   everything that `ckpt_path=` needs; replaced in one move, so that a crash leaves the previous one
        last/       the policy (with an adapter: only the adapter), its tokenizer and a model card
        best/       the same, for the best held-out accuracy so far, including the run that was resumed
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, folder: str, num_rollouts: Count, every: Whole = 10) -> None:
        self.folder, self.num_rollouts, self.every = Path(folder), num_rollouts, every
        self.tokenizer = tokenizer
        self.best_accuracy = -1.0
        self.rollouts = 0  # rollouts learned from
        self.measured: Estimate | None = None  # held-out accuracy of the present policy, if it was evaluated

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        self.rollouts = batch.rollout + 1
        measured = {evaluation.rollout: evaluation.estimates["accuracy"] for evaluation in batch.evaluations}
        self.measured = measured.get(self.rollouts)
        if (accuracy := batch.metrics.get("eval/accuracy", -1.0)) > self.best_accuracy:
            self.best_accuracy = accuracy
            self.export(module, "best")
        if self.rollouts == self.num_rollouts or (self.every and self.rollouts % self.every == 0):
            self.save(trainer, module)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if (
            isinstance(exception, RolloutError | StopError) and self.rollouts
        ):  # raised between two updates, on every rank
            self.save(trainer, module)

    def save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write last.ckpt and last/."""
        self.export(module, "last")
        trainer.save_checkpoint(self.folder / "last.ckpt.new")
        if trainer.is_global_zero:
            os.replace(self.folder / "last.ckpt.new", self.folder / "last.ckpt")

    @rank_zero_only
    def export(self, module: L.LightningModule, name: str) -> None:
        """Write the policy, its tokenizer and a model card to the folder `name`."""
        module.policy.save_pretrained(self.folder / name)
        self.tokenizer.save_pretrained(self.folder / name)
        if (self.folder.parent / "config.yaml").exists():
            write_card(self.folder / name, self.rollouts, self.measured)

    def state_dict(self) -> dict:
        best = str((self.folder / "best").absolute())
        return {"rollouts": self.rollouts, "best_accuracy": self.best_accuracy, "best": best}

    @rank_zero_only
    def load_state_dict(self, state: dict) -> None:
        self.rollouts = state.get("rollouts", 0)
        if Path(state["best"]).is_dir():  # otherwise it was deleted, and the search for the best starts again
            self.best_accuracy = state["best_accuracy"]
            if Path(state["best"]) != (self.folder / "best").absolute():  # otherwise the run resumes in its own folder
                shutil.copytree(state["best"], self.folder / "best", dirs_exist_ok=True)
