"""The door of rollouts beside the update (rollout.ahead): extras/ahead plays them."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from grpo.rollout.rollouts import Rollout

MIXED = (
    "ckpt_path has groups of several rollouts in flight: resume with rollout.order=ready, rollout.ahead of at least 1 and the "
    "settings under which several rollouts are played at once (docs/asynchronous.md)"
)


class Ahead(Protocol):
    """Plays rollouts beside the update (rollout.ahead). flying: groups that are being played. mixes: whether an update may learn
    from groups of several rollouts. sync, below, gives the engine the policy's weights."""

    flying: int
    mixes: bool

    def begin(self, policy: nn.Module) -> None:
        """Called once, when the policy is on its device. Raises UserError for a policy whose weights cannot be given."""

    def make(self, r: int, sync: Callable[[], None]) -> Rollout:
        """Return what update r learns from, and let later rollouts be played."""

    def learned(self, version: int, policy: nn.Module, sync: Callable[[], None]) -> None:
        """Take the weights after an update. version: rollouts that they have learned from."""

    def facts(self, rollout: Rollout, update: int) -> dict[str, float]:
        """Return the metrics of a rollout that `make` has returned."""

    def settle(self) -> None:
        """Let the engine be used by others: for an evaluation."""

    def stop(self, keeps: bool = False) -> None:
        """Stop, for good. keeps: what is being played may be finished, for a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the entry `ahead` of a checkpoint, and others that replace the callback's own."""

    def load_state_dict(self, state: dict[str, Any], learned: int) -> None:
        """Take what `state_dict` returned, after `learned` rollouts."""
