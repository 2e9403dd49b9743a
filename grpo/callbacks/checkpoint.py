"""Layer 3 - Checkpoint: the run as it can be resumed, and the policy as a folder that anything of Hugging Face loads."""

import os
import shutil
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from grpo.data import PromptBatch
from grpo.errors import RolloutError
from grpo.policy import Pretrained


class Checkpoint(L.Callback):
    """Every `every` rollouts, at the end, and when a reward fails, writes under `folder`:

    last.ckpt   all that `ckpt_path=` needs, replaced in one move, so that a crash leaves the one before it
    last/       the policy with its tokenizer (under an adapter: the adapter)
    best/       the same, at the best held-out accuracy so far, that of the run that was resumed included
    """

    def __init__(self, folder: str, model: Pretrained, num_rollouts: int, every: int = 10) -> None:
        self.folder, self.num_rollouts, self.every = Path(folder), num_rollouts, every
        self.tokenizer = model.tokenizer()
        self.best_accuracy = -1.0

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: dict, batch: PromptBatch, batch_idx: int
    ) -> None:
        rollouts = batch.rollout + 1
        if (accuracy := batch.metrics.get("eval/accuracy", -1.0)) > self.best_accuracy:
            self.best_accuracy = accuracy
            self.export(module, "best")
        if rollouts == self.num_rollouts or (self.every and rollouts % self.every == 0):
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

    def state_dict(self) -> dict:
        return {"best_accuracy": self.best_accuracy, "best": str((self.folder / "best").absolute())}

    @rank_zero_only
    def load_state_dict(self, state: dict) -> None:
        if Path(state["best"]).is_dir():  # else it has gone, and the best starts anew
            self.best_accuracy = state["best_accuracy"]
            if Path(state["best"]) != (self.folder / "best").absolute():  # else the run goes on in its own folder
                shutil.copytree(state["best"], self.folder / "best", dirs_exist_ok=True)
