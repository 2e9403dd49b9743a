"""The batch that Lightning passes from hook to hook: one rollout, filled in step by step."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Self

from grpo.evaluation.evaluator import Evaluation
from grpo.objectives.batch import Scores, TokenBatch
from grpo.rollout.types import Group
from grpo.system.progress import BEGIN, Progress


@dataclass
class RolloutBatch:
    """One Lightning batch, which is one rollout. Mutable: Lightning passes the same object to every hook, and each adds its part.

    rollout: its number, 0 for the first one of the run. advantages: in the shape of groups, the mean over each sample's tokens.
    """

    rollout: int
    progress: Progress = BEGIN
    groups: list[Group] = field(default_factory=list)
    discarded: list[Group] = field(default_factory=list)  # played, and not learned from
    version: int = 0  # of the engine when the rollout began, see `versions_of_turns`
    tokens: TokenBatch | None = None
    scores: Scores | None = None
    advantages: list[list[float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    recorded: dict[str, float] = field(default_factory=dict)  # what the loggers have of them
    evaluations: list[Evaluation] = field(default_factory=list)

    def to(self, *args, **kwargs) -> Self:
        """Return itself: Lightning calls this before any hook, when there are no tensors yet."""
        return self


class RolloutBatches:
    """Endless empty batches, numbered from `start` on. Lightning may fetch some ahead, so nothing is drawn here."""

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[RolloutBatch]:
        return map(RolloutBatch, count(self.start))
