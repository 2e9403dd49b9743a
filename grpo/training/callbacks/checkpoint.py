"""Checkpoint: writes checkpoints to resume from, and the policy as a folder that Hugging Face libraries load."""

import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo.engines.weights import checkpoint
from grpo.evaluation.statistics import Estimate
from grpo.runs.model_card import write_card
from grpo.system import distributed
from grpo.system.distributed import full, is_sharded
from grpo.system.errors import RolloutError, StopError
from grpo.system.files import surviving, write_json
from grpo.system.loading import not_finite
from grpo.system.pieces import in_pieces
from grpo.system.ranges import Count, Whole
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.checkpoints import by_rollouts, link, new_folder

log = logging.getLogger(__name__)

PIECE = 4 << 30  # bytes of a sharded policy that the first rank's CPU holds at once


class Checkpoint(L.Callback):
    """Writes checkpoints, every `every` rollouts, at the end, when a reward fails, and when the run is asked to stop.

    They go to `folder`:

        00020.ckpt     everything that resuming needs, after 20 rollouts: the newest `keep` of them
        policy_00020   the policy (with an adapter: only the adapter), its tokenizer and a model card
        last.ckpt      a link to the newest checkpoint
        last, best     links to the newest policy, and to the one with the best held-out accuracy, also of the resumed run; the
                       evaluation before training counts, and its policy gives way to an equal one

    Each is complete before it gets its name. If one cannot be written, because the disk is full or a weight is not finite, the
    run says so and goes on, and the one before stays.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, num_rollouts: Count, every: Whole = 10, keep: Count = 2
    ) -> None:
        self.folder, self.num_rollouts, self.every, self.keep = Path(folder), num_rollouts, every, keep
        self.tokenizer = tokenizer
        self.best_accuracy, self.seconds = -1.0, 0.0  # seconds: spent in the training loop
        self.rollouts = 0  # rollouts learned from
        self.exported = self.saved = -1  # the rollouts of the newest policy and checkpoint that were written
        self.measured: Estimate | None = None  # held-out accuracy of the present policy, if it was evaluated

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for callback in trainer.callbacks:
            for evaluation in callback.first if isinstance(callback, EvaluationCallback) else ():
                self.measured = evaluation.estimates["accuracy"]
                self.compare(module, self.measured.value)

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        self.rollouts, begun = batch.rollout + 1, time.perf_counter()
        measured = {evaluation.rollout: evaluation.estimates["accuracy"] for evaluation in batch.evaluations}
        self.measured = measured.get(self.rollouts)
        if "eval/accuracy" in batch.metrics:
            self.compare(module, batch.metrics["eval/accuracy"])
        if self.rollouts == self.num_rollouts and (self.folder / "best").resolve().name == "policy_00000":
            words = (
                "no evaluation was better than the one before training (%.1f %%): `best` is the policy without training"
            )
            log.warning(words, 100 * self.best_accuracy)
        if self.rollouts == self.num_rollouts or (self.every and self.rollouts % self.every == 0):
            self.save(trainer, module)
        self.seconds += time.perf_counter() - begun

    def compare(self, module: L.LightningModule, accuracy: float) -> None:
        """Export the present policy as `best` if its held-out accuracy is the best so far."""
        if math.isnan(accuracy):
            words = "rollout %d: the held-out accuracy is unknown, because no answer was graded: this policy cannot be `best`"
            log.warning(words, self.rollouts)
        elif accuracy > self.best_accuracy:
            self.best_accuracy = accuracy if self.rollouts else math.nextafter(accuracy, -1.0)  # an equal one is better
            self.export(module, "best")

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, RolloutError | StopError):  # raised between two updates, on every rank
            self.save(trainer, module)

    def save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write a checkpoint and the policy, and remove checkpoints that are too many."""
        if broken := distributed.all_gather(not_finite(module.policy.named_parameters())):
            log.warning("rollout %d: %s is not finite, so no checkpoint is written", self.rollouts, broken[0])
            return
        self.saved = self.rollouts
        self.export(module, "last")
        path = self.folder / f"{self.rollouts:05}.ckpt"
        trainer.save_checkpoint(path)  # does nothing but a warning if the disk is full
        if trainer.is_global_zero and path.is_dir():
            link(self.folder / "last.ckpt", path)
            there = by_rollouts(self.folder)
            # later ones are of a course that was abandoned
            kept = [number for number in there if number <= self.rollouts][: self.keep]
            remove(old for number, old in there.items() if number not in kept)

    def export(self, module: L.LightningModule, name: str) -> None:
        """Write the policy, its tokenizer and a model card, and let `name` be a link to that folder."""
        pieces = whole_pieces(module.policy) if is_sharded(module.policy) else iter([None])
        self.write(module, name, pieces)
        deque(pieces, maxlen=0)  # all ranks gather all weights together, even if the first one has failed

    @rank_zero_only
    def write(self, module: L.LightningModule, name: str, pieces: Iterator[dict[str, Tensor] | None]) -> None:
        """Write what `export` says. pieces: see `write_policy`."""
        policy = self.folder / f"policy_{self.rollouts:05}"
        with surviving(str(policy)):
            if self.exported != self.rollouts:
                with new_folder(policy) as folder:
                    write_policy(module.policy, folder, pieces)
                    self.tokenizer.save_pretrained(folder)
                    if (self.folder.parent / "config.yaml").exists():
                        write_card(folder, self.rollouts, self.measured)
                self.exported = self.rollouts
            link(self.folder / name, policy)
            kept = [(self.folder / each).resolve() for each in ("last", "best")]
            remove(old for old in self.folder.glob("policy_*") if old.resolve() not in kept)

    def state_dict(self) -> dict:
        best = str((self.folder / "best").resolve())
        return {"rollouts": self.rollouts, "best_accuracy": self.best_accuracy, "best": best}

    def load_state_dict(self, state: dict) -> None:
        self.rollouts, best = state.get("rollouts", 0), Path(state["best"])
        if not best.is_dir():  # it was deleted, and the search for the best starts again
            return
        self.best_accuracy = state["best_accuracy"]
        if best.parent != self.folder.resolve() and distributed.rank() == 0:  # the run resumes in another folder
            policy = self.folder / (best.name if best.name.startswith("policy_") else "policy_resumed")
            with new_folder(policy) as folder:
                shutil.copytree(best, folder, dirs_exist_ok=True)
            link(self.folder / "best", policy)


def whole_pieces(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the whole weights of a sharded model on the first rank's CPU, at most PIECE bytes at a time; of an adapter all at
    once. Other ranks get empty tensors, and all take them together."""
    if hasattr(model, "peft_config"):
        yield {
            name: full(p.detach()).to(model.stored_in).cpu() for name, p in model.named_parameters() if p.requires_grad
        }
        return
    first = distributed.rank() == 0
    tensors = ((name, each.cpu() if first else each.new_empty(0)) for name, each in checkpoint(model))
    yield from map(dict, in_pieces(tensors, lambda named: named[1].nbytes, PIECE))


def write_policy(policy: nn.Module, folder: Path, pieces: Iterable[dict[str, Tensor] | None]) -> None:
    """Write a policy as a Hugging Face folder, with a file for each piece of its weights; a piece None is all of them."""
    files: list[Path] = []
    for piece in pieces:
        policy.save_pretrained(folder, **({} if piece is None else {"state_dict": piece}))
        if piece is not None and (file := folder / "model.safetensors").exists():
            files.append(file.rename(folder / f"piece-{len(files)}"))
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for i, file in enumerate(files):
        name = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        with safe_open(file, "pt") as opened:
            where |= dict.fromkeys(opened.keys(), name)
        file.rename(folder / name)
    if files:
        size = sum((folder / name).stat().st_size for name in {*where.values()})
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})


def remove(folders: Iterable[Path]) -> None:
    """Remove folders with all they hold."""
    for folder in list(folders):
        shutil.rmtree(folder)
