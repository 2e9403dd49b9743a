"""Layer 1 - an algorithm is an advantage, a loss, and how often a rollout is used. conf/algo holds the named ones."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from grpo.errors import UserError
from grpo.loss import PolicyLoss


@dataclass(frozen=True)
class Algorithm:
    """advantage: [N, G] rewards to [N, G] advantages. Each of num_epochs passes over a rollout is num_minibatches updates."""

    advantage: Callable[[Tensor], Tensor]
    loss: PolicyLoss
    num_epochs: int = 1
    num_minibatches: int = 1

    def __post_init__(self) -> None:
        for name in ("num_epochs", "num_minibatches"):
            if getattr(self, name) < 1:
                raise UserError(f"algo.{name}={getattr(self, name)} must be at least 1")

    @property
    def updates_per_rollout(self) -> int:
        return self.num_epochs * self.num_minibatches

    def check(self, prompts: int, group_size: int) -> None:
        """Refuse a rollout that does not divide into minibatches. Raises UserError."""
        rows = prompts * group_size
        if rows % self.num_minibatches:
            valid = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
            raise UserError(
                f"algo.num_minibatches={self.num_minibatches} does not divide the {rows} rows of a rollout "
                f"({prompts} prompts x {group_size} samples); valid values: {valid}"
            )
