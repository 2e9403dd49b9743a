"""Ending: every callback sees a rollout to its end, whatever one of them raises, and all devices end together."""

from collections.abc import Callable
from functools import partial

import lightning as L

from grpo.system import distributed
from grpo.system.errors import RolloutError, StopError

HOOK = "on_train_batch_end"


class Ending(L.Callback):
    """Comes first. An exception in one callback's `on_train_batch_end` ends the run after the other callbacks had theirs: the
    policy has changed by then, and what they note or write of the rollout would be lost. Mutable: error, the first one."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.own: list[tuple[L.Callback, Callable]] = []  # the callbacks, and their methods

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.own = [(callback, getattr(callback, HOOK)) for callback in trainer.callbacks]
        for callback, method in self.own:
            setattr(callback, HOOK, partial(self.turn, callback, method))

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

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        for callback, method in self.own:  # a callback may be given to another run
            setattr(callback, HOOK, method)

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.on_exception(trainer, module, None)


def saves(error: BaseException) -> bool:
    """Return whether a checkpoint may be written after an exception. On several devices it must be one that all of them raise."""
    together = distributed.world_size() == 1 or isinstance(error, RolloutError | StopError)
    return together and getattr(error, "saves", True)
