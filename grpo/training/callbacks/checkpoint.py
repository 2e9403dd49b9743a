"""Checkpoint: writes checkpoints to resume from, and the policy as a folder that Hugging Face libraries load."""

import logging
import math
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo.engines.weights import checkpoint
from grpo.evaluation.intervals import Estimate
from grpo.system import distributed
from grpo.system.distributed import full, is_sharded
from grpo.system.errors import RolloutError, StopError, UserError, error_line, plural
from grpo.system.files import surviving, write_json
from grpo.system.loading import not_finite
from grpo.system.memory import in_pieces
from grpo.system.metrics import require_metric, written
from grpo.system.output.console import busy
from grpo.system.ranges import Count, Whole
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.ending import Ending, saves
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.checkpoints import by_rollouts, link, new_folder
from grpo.training.trainer import callbacks_of

log = logging.getLogger(__name__)

MONITOR = "callbacks.checkpoint.monitor"
PIECE = 4 << 30  # bytes of a sharded policy that the first rank's CPU holds at once


class UnsavedError(UserError):
    """The run has learned, and its last policy could not be written."""

    exit_code = 74  # EX_IOERR of sysexits.h
    saves = False


# not Lightning's ModelCheckpoint: its file is a pickle, and a crash may leave half of one
class Checkpoint(L.pytorch.callbacks.Checkpoint):  # Lightning calls it after all others, so that it has their states
    """Writes checkpoints, every `every` rollouts and at the end, whatever ends the run, unless it is an AlarmError.

    They go to `folder`:

        00020.ckpt     everything that resuming needs, after 20 rollouts: the newest `keep` of them
        policy_00020   the policy (with an adapter: only the adapter), its tokenizer and a model card
        last.ckpt      a link to the newest checkpoint
        last, best     links to the newest policy, and to the best one, also of the resumed run; the policy before training
                       counts, and a later one that scores the same replaces it
        step_000020    with `history`: a link to the policy after each multiple of so many rollouts, the newest `history_keep`

    monitor, mode: the metric that chooses `best`, and its direction. A metric of rollouts measures the policy before the update.
    only_model: checkpoints have no state of the optimizer, which begins anew in a resumed run.
    card: writes the model card of (folder, rollouts, held-out accuracy, monitor, mode, its value); None: there is none.

    Each is complete before it gets its name. If one cannot be written, because the disk is full or a weight is not finite, the
    run says so and goes on, and the one before stays. A run whose last policy the disk did not take ends with UnsavedError.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        folder: str,
        num_rollouts: Count,
        every: Whole = 10,
        keep: Count = 2,
        monitor: str = "eval/accuracy",
        mode: Literal["max", "min"] = "max",
        history: Whole = 0,
        history_keep: Count | None = None,
        only_model: bool = False,
        card: Callable[[Path, int, Estimate | None, str, str, float], None] | None = None,
    ) -> None:
        require_metric(MONITOR, monitor)
        self.folder, self.num_rollouts, self.every, self.keep = Path(folder), num_rollouts, every, keep
        self.history, self.history_keep, self.only_model = history, history_keep, only_model
        self.tokenizer, self.monitor, self.mode, self.card = tokenizer, monitor, mode, card
        self.sign = 1 if mode == "max" else -1
        self.best_value = -self.sign * math.inf  # of the monitored metric; infinite as long as none is known
        self.value = math.nan  # of the present policy
        self.seconds = 0.0  # spent in the training loop
        self.rollouts = 0  # rollouts learned from
        self.exported = self.saved = -1  # the rollouts of the newest policy and checkpoint that were written
        self.measured: Estimate | None = None  # held-out accuracy of the present policy, if it was evaluated
        self.lost: list[int] = []  # the rollouts of policies that the disk did not take

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for callback in callbacks_of(trainer.callbacks, EvaluationCallback):
            for evaluation in callback.first:
                self.measured = evaluation.estimates["accuracy"]
                self.compare(module, evaluation.metrics)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write what a run that ended before its last rollout has learned. A planned end is written by then."""
        if self.saved != self.rollouts:
            self.on_train_start(trainer, module)  # it was evaluated
            self.save(trainer, module)
        if self.rollouts and (self.folder / "best").resolve().name == "policy_00000":
            line = "nothing was better than before training (%s): `best` is the policy without training"
            log.warning(line, self.chosen)

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        self.rollouts, begun = batch.rollout + 1, time.perf_counter()
        measured = {evaluation.rollout: evaluation.estimates["accuracy"] for evaluation in batch.evaluations}
        self.measured = measured.get(self.rollouts)
        self.compare(module, batch.metrics)
        if self.history and self.rollouts % self.history == 0:
            self.export(module, f"step_{self.rollouts:06}")
        if self.rollouts == self.num_rollouts or (self.every and self.rollouts % self.every == 0):
            self.save(trainer, module)
        self.seconds += time.perf_counter() - begun

    def compare(self, module: L.LightningModule, metrics: Mapping[str, float]) -> None:
        """Note the metric of the present policy, and keep the best one. Raises UserError if there is no such metric."""
        if math.isinf(self.best_value):
            require_metric(MONITOR, self.monitor, metrics)
        self.value = metrics.get(self.monitor, math.nan)
        if self.monitor in metrics and math.isnan(self.value):
            log.warning("rollout %d: %s is unknown: this policy cannot be `best`", self.rollouts, self.monitor)
        self.keep_best(module)

    def keep_best(self, module: L.LightningModule) -> None:
        """Export the present policy as `best` if it is better than the one on the disk."""
        if self.sign * self.value > self.sign * self.best_value and self.export(module, "best"):
            # so that a policy equal to the one before training is better
            self.best_value = self.value if self.rollouts else math.nextafter(self.value, -self.sign * math.inf)

    @property
    def chosen(self) -> str | None:
        """The metric that chooses `best`, and its value there, as text; None if there is no `best`."""
        if not math.isfinite(self.best_value):
            return None
        return f"{self.mode} {self.monitor}, {written(self.monitor, self.best_value)}"

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """Write a checkpoint if the state is that after a rollout, and say how to continue."""
        for ending in callbacks_of(trainer.callbacks, Ending):
            if (
                ending.batch
                and saves(exception)
                and (ending.learned or isinstance(exception, RolloutError | StopError))
            ):
                self.save_ending(trainer, module, ending, exception)
        newest, asked = max(by_rollouts(self.folder), default=None), isinstance(exception, StopError)
        if newest is not None and not asked and trainer.is_global_zero and getattr(exception, "code", 1):
            resume = f"python train.py {shlex.quote(f'ckpt_path={self.folder.parent}')}"
            line = "stopped by %s; to resume after %s: %s"
            log.warning(line, type(exception).__name__, plural(newest, "rollout"), resume)

    def save_ending(
        self, trainer: L.Trainer, module: L.LightningModule, ending: Ending, exception: BaseException
    ) -> None:
        """Write the checkpoint of a run that an exception ends."""
        if not ending.whole(module):
            log.warning("rollout %d: no checkpoint in the middle of its updates", ending.learned + 1)
            return
        self.rollouts = ending.learned
        try:
            self.save(trainer, module)
        except Exception as error:  # of a GPU that is gone, of a file system
            if isinstance(exception, StopError):
                raise
            log.warning("rollout %d: no checkpoint was written: %s", ending.learned, error_line(error))

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Raise UnsavedError, after all callbacks have shown the end of the run, if its last policy is not on the disk."""
        if self.saved >= 0 and self.saved in self.lost:
            newest = max(by_rollouts(self.folder), default=None)
            again = "begins anew" if newest is None else f"trains on from the checkpoint after {newest} rollouts"
            line = f"the policy after {self.saved} rollouts was not written, because the disk of {self.folder} is full"
            raise UnsavedError(f"{line}: free space there; then the same command with resume=auto {again}")

    @busy("writing a checkpoint")
    def save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write a checkpoint and the policy, and remove checkpoints that are too many."""
        if broken := distributed.all_gather(not_finite(module.policy.named_parameters())):
            log.warning("rollout %d: %s is not finite, so no checkpoint is written", self.rollouts, broken[0])
            return
        self.saved = self.rollouts
        if self.export(module, "last"):
            self.keep_best(module)  # if the disk did not take it a moment ago
        path = self.folder / f"{self.rollouts:05}.ckpt"
        trainer.save_checkpoint(path)  # does nothing but a warning if the disk is full
        if trainer.is_global_zero and path.is_dir():
            link(self.folder / "last.ckpt", path)
            there = by_rollouts(self.folder)
            # later ones are from before the run was resumed at an earlier point
            kept = [number for number in there if number <= self.rollouts][: self.keep]
            remove(old for number, old in there.items() if number not in kept)

    def export(self, module: L.LightningModule, name: str) -> bool:
        """Write the policy, its tokenizer and a model card, and let `name` be a link to that folder. Returns whether the disk
        took them."""
        pieces = whole_pieces(module.policy) if is_sharded(module.policy) else iter([None])
        written = self.write(module, name, pieces)  # None on other ranks
        deque(pieces, maxlen=0)  # all ranks gather all weights together, even if the first one has failed
        taken = any(distributed.all_gather([bool(written)]))
        others = [rollouts for rollouts in self.lost if rollouts != self.rollouts]
        self.lost = others if taken else [*others, self.rollouts]
        return taken

    @rank_zero_only
    def write(self, module: L.LightningModule, name: str, pieces: Iterator[dict[str, Tensor] | None]) -> bool:
        """Write what `export` says. pieces: see `write_policy`."""
        policy = self.folder / f"policy_{self.rollouts:05}"
        with surviving(str(policy)):
            if self.exported != self.rollouts:
                with new_folder(policy) as folder:
                    write_policy(module.policy, folder, pieces)
                    self.tokenizer.save_pretrained(folder)
                    if sight := getattr(self.tokenizer, "sight", None):
                        sight.save(folder)
                    if self.card and (self.folder.parent / "config.yaml").exists():
                        self.card(folder, self.rollouts, self.measured, self.monitor, self.mode, self.value)
                self.exported = self.rollouts
            link(self.folder / name, policy)
            history = sorted(self.folder.glob("step_*[0-9]"))
            steps = [step for step in history if int(step.name.removeprefix("step_")) <= self.rollouts]
            steps = steps[-(self.history_keep or len(steps)) :]
            for old in set(history) - set(steps):  # too old, or later than the resumed run
                old.unlink()
            named = [path.resolve() for path in (self.folder / "last", self.folder / "best", *steps)]
            remove(old for old in self.folder.glob("policy_*") if old.resolve() not in named)
            return True
        return False

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.only_model:
            checkpoint["optimizer_states"] = []
        # to Lightning a run is one epoch: it is not over, even if this run is
        checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"] |= {"processed": 0, "completed": 0}

    def state_dict(self) -> dict:
        best = str((self.folder / "best").resolve())
        monitored = {"monitor": [self.monitor, self.mode], "best_value": self.best_value}
        return {"rollouts": self.rollouts, "best": best, "seconds": self.seconds, **monitored}

    def load_state_dict(self, state: dict) -> None:
        self.rollouts, self.seconds, best = state.get("rollouts", 0), state.get("seconds", 0.0), Path(state["best"])
        if not best.is_dir() or state.get("monitor", ["eval/accuracy", "max"]) != [self.monitor, self.mode]:
            return  # it was deleted, or is the best by another metric: the search for the best starts again
        self.best_value = state["best_value"] if "best_value" in state else state["best_accuracy"]
        if distributed.rank() == 0:
            policy = best
            if best.parent != self.folder.resolve():  # the run resumes in another folder
                policy = self.folder / (best.name if best.name.startswith("policy_") else "policy_resumed")
                with new_folder(policy) as folder:
                    shutil.copytree(best, folder, dirs_exist_ok=True)
            link(self.folder / "best", policy)  # in its own folder it may be a policy from after the checkpoint


def whole_pieces(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the whole weights of a sharded model on the first rank's CPU, at most PIECE bytes at a time; of an adapter all at
    once. Other ranks get empty tensors, and all take them together."""
    if hasattr(model, "peft_config"):
        trained = [(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad]
        yield {name: full(p).to(model.stored_in).cpu() for name, p in trained}
        return
    first = distributed.rank() == 0
    tensors = ((name, tensor.cpu() if first else tensor.new_empty(0)) for name, tensor in checkpoint(model))
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
