"""Checkpoint: the run as it can be resumed, and the policy as a folder that anything of Hugging Face loads."""

import os
import shutil
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from transformers import PreTrainedTokenizerBase

from grpo.evaluation.statistics import Estimate
from grpo.runs.model_card import write_card
from grpo.system.errors import RolloutError
from grpo.training.batch import RolloutBatch


class Checkpoint(L.Callback):
    """Every `every` rollouts, at the end, and when a reward fails, writes under `folder`:

    last.ckpt   all that `ckpt_path=` needs, replaced in one move, so that a crash leaves the one before it
    last/       the policy with its tokenizer (under an adapter: the adapter) and a model card
    best/       the same, at the best held-out accuracy so far, that of the run that was resumed included
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, folder: str, num_rollouts: int, every: int = 10) -> None:
        self.folder, self.num_rollouts, self.every = Path(folder), num_rollouts, every
        self.tokenizer = tokenizer
        self.best_accuracy = -1.0
        self.rollouts = 0  # learned from
        self.measured: Estimate | None = None  # held-out accuracy of the policy as it is, if it was evaluated

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
        if isinstance(exception, RolloutError):  # raised between two updates, on every rank alike
            self.save(trainer, module)

    def save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.export(module, "last")
        trainer.save_checkpoint(self.folder / "last.ckpt.new")
        if trainer.is_global_zero:
            os.replace(self.folder / "last.ckpt.new", self.folder / "last.ckpt")

    @rank_zero_only
    def export(self, module: L.LightningModule, name: str) -> None:
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
        if Path(state["best"]).is_dir():  # else it has gone, and the best starts anew
            self.best_accuracy = state["best_accuracy"]
            if Path(state["best"]) != (self.folder / "best").absolute():  # else the run goes on in its own folder
                shutil.copytree(state["best"], self.folder / "best", dirs_exist_ok=True)
