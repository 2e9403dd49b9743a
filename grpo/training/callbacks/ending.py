"""Ending: how a run ends, whatever ends it: at the end of a rollout, evaluated, on all devices, with a name."""

import logging
from collections.abc import Callable
from functools import partial

import lightning as L

from grpo.system import distributed
from grpo.system.errors import RolloutError, StopError, UserError
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.callbacks.measure import record
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.trainer import callbacks_of

log = logging.getLogger(__name__)

HOOK = "on_train_batch_end"


class Ending(L.Callback):
    """Comes first. An exception in one callback's `on_train_batch_end` ends the run after the other callbacks had theirs: the
    policy has changed by then, and what they note or write of the rollout would be lost.

    Mutable: error, the first one; batch, the rollout that is played or was learned from; stepped, whether an update of it has
    begun to change the policy; updates, the number before it.
    """

    def __init__(self, rollout: RolloutCallback) -> None:
        self.rollout = rollout
        self.error: BaseException | None = None
        self.ended_by: str | None = None  # who ended the run before its last rollout
        self.batch: RolloutBatch | None = None
        self.stepped, self.updates = False, 0
        self.own: list[tuple[L.Callback, Callable]] = []  # the callbacks, and their methods

    @property
    def learned(self) -> int:
        """The rollouts that were learned from."""
        return self.rollout.learned

    def facts(self) -> dict[str, str | None]:
        """Return who has ended the run, for the manifest."""
        return {"ended_by": self.ended_by}

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.own = [(callback, getattr(callback, HOOK)) for callback in trainer.callbacks]
        for callback, method in self.own:
            setattr(callback, HOOK, partial(self.turn, callback, method))

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """End a run that has nothing left to learn after the evaluation that it owes. Raises UserError if it owes none."""
        if self.learned >= self.rollout.plan.num_rollouts:
            if not any(callback.owed for callback in callbacks_of(trainer.callbacks, EvaluationCallback)):
                line = f"ckpt_path has learned from {self.learned} rollouts already"
                raise UserError(f"{line}: to continue, set a larger rollout.num_rollouts")
            trainer.should_stop = True

    def on_train_batch_start(self, trainer, module, batch: RolloutBatch, batch_idx: int) -> None:
        self.batch, self.stepped, self.updates = batch, False, getattr(module, "updates", 0)

    def on_before_optimizer_step(self, *_: object) -> None:
        self.stepped = True

    def on_train_batch_end(self, trainer, module, outputs, batch: RolloutBatch, batch_idx: int) -> None:
        self.stepped, self.updates = False, getattr(module, "updates", 0)

    def whole(self, module: L.LightningModule) -> bool:
        """Return whether the policy and its optimizer are as after a rollout: between its first and last update they are not."""
        return not self.stepped and getattr(module, "updates", 0) == self.updates

    def turn(self, callback: L.Callback, method: Callable, trainer: L.Trainer, *its: object) -> None:
        """Call a method of a callback. After the last one, raise what any has raised, and stop on all devices or none."""
        try:
            method(trainer, *its)
        except BaseException as error:
            if not saves(error):
                raise
            self.error = self.error or error
        if callback is not trainer.callbacks[-1]:
            return
        if isinstance(self.error, StopIteration):  # Lightning's loop would end without a word
            raise RuntimeError(f"a callback raised StopIteration({self.error})") from self.error
        if self.error:
            raise self.error
        trainer.should_stop = any(distributed.all_gather([trainer.should_stop]))

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Name who has ended the run early, and evaluate its last policy for the callbacks that come after this one."""
        if self.learned < self.rollout.plan.num_rollouts:
            if not trainer.should_stop:
                line = f"rollout {self.learned + 1}: a StopIteration, or a hook that returned -1, has ended Lightning's loop"
                raise UserError(f"{line}: mend it; what is to end a run sets trainer.should_stop = True")
            self.ended_by = trainer.stopped_by
            log.info(
                "ended by %s after %d of %d rollouts", trainer.stopped_by, self.learned, self.rollout.plan.num_rollouts
            )
        for callback in callbacks_of(trainer.callbacks, EvaluationCallback):
            done = self.batch is None or any(each.rollout == self.learned for each in self.batch.evaluations)
            if not done and callback.evaluator.due(self.learned, self.learned):
                callback.owed = self.batch.metrics
                callback.first = [callback.evaluate()]
                record(trainer, callback.first[0].metrics, self.learned)
            callback.owed = {}

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        for callback, method in self.own:  # a callback may be given to another run
            setattr(callback, HOOK, method)

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.on_exception(trainer, module, None)


def saves(error: BaseException) -> bool:
    """Return whether a checkpoint may be written after an exception. On several devices it must be one that all of them raise."""
    together = distributed.world_size() == 1 or isinstance(error, RolloutError | StopError)
    return together and getattr(error, "saves", True)
