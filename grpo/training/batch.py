"""The batch that Lightning hands from hook to hook: one rollout, filled in on its way."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from grpo.evaluation.evaluator import Evaluation
from grpo.objectives.batch import Scores, TokenBatch
from grpo.rollout.types import Group


@dataclass
class RolloutBatch:
    """One Lightning batch is one rollout. Mutable: Lightning hands the same object to every hook, and each adds what it made."""

    rollout: int  # 0 for the first of the run
    groups: list[Group] = field(default_factory=list)
    tokens: TokenBatch | None = None
    scores: Scores | None = None
    advantages: list[list[float]] = field(default_factory=list)  # as groups; the mean over a sample's tokens
    metrics: dict[str, float] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)

    def to(self, *args, **kwargs) -> Self:
        """Lightning calls this before any hook, when there are no tensors yet."""
        return self


class RolloutBatches:
    """Empty batches without end, numbered from `start` on. Lightning may fetch some ahead: nothing is drawn here."""

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[RolloutBatch]:
        rollout = self.start
        while True:
            yield RolloutBatch(rollout)
            rollout += 1
