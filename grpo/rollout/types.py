"""Data of a rollout: its plan, its limits, its samples. `Rollouts` makes rollouts."""

from dataclasses import dataclass, field
from typing import Literal, Self

from grpo.engines.protocol import Sampling
from grpo.env.intake import observation
from grpo.env.tokens import Turn
from grpo.env.types import Example, Reward, Trajectory
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Positive, Seconds, Whole, enforced

TIMEOUT = 120.0  # default limit of one call of a reward, in seconds


@dataclass(frozen=True)
class Sample:
    """One episode: as messages (`trajectory`), as tokens (`turns`, one per step), and its reward."""

    example: Example
    trajectory: Trajectory
    turns: tuple[Turn, ...]
    reward: Reward
    age: int = 0  # rollouts since it was played, if it is learned from again

    def __deepcopy__(self, memo: dict) -> Self:
        return self  # nothing in it changes

    @property
    def length(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(len(turn.completion.ids) for turn in self.turns)

    @property
    def observations(self) -> list[str]:
        """The texts that the policy read before its turns, see `observation`."""
        return [observation(step.state) for step in self.trajectory.steps]


Group = list[Sample]  # the G samples of one example


@enforced("")
@dataclass(frozen=True)
class Limits:
    """Limits of one episode.

    max_turns: messages of the policy at most. step_timeout, score_timeout: seconds for one call of the environment or of the
    reward; if a call takes longer, the sample's reward is unknown, not 0.
    """

    max_turns: Count = 16
    step_timeout: Seconds = 60.0
    score_timeout: Seconds = TIMEOUT


@enforced("Plan")
@dataclass(frozen=True)
class Plan:
    """The size of a run: `num_rollouts` rollouts of `prompts` prompts with `group_size` samples each.

    ahead: rollouts that are played, or wait, while the policy learns from one, see extras/ahead. max_staleness: versions between
    the weights that sampled a token and those that learn from it; None: see `most_stale`. patience: seconds without a finished
    group. epochs: passes over the training examples, from which train.py computes num_rollouts; None: it is as given.
    """

    prompts: Count
    group_size: Count
    num_rollouts: Count
    sampling: Sampling
    limits: Limits = field(default_factory=Limits)
    ahead: Whole = 0
    order: Literal["exact", "ready"] = "exact"
    max_staleness: Whole | None = None
    stale: Literal["wait", "drop", "correct"] = "wait"
    patience: Seconds = 1800.0
    epochs: Positive | None = None

    def __post_init__(self) -> None:
        if self.sampling.temperature == 0:
            raise UserError("Plan.sampling.temperature=0: greedy samples are equal and teach nothing: raise it")
        if self.max_staleness is not None and self.max_staleness < self.ahead:
            line = f"Plan.max_staleness={self.max_staleness} is below Plan.ahead={self.ahead}"
            raise UserError(f"{line}, by which samples are old in any case: raise it, or lower Plan.ahead")

    @property
    def most_stale(self) -> int:
        """The largest staleness of a token that is learned from, in versions."""
        usual = self.ahead * (2 if self.order == "ready" else 1)
        return usual if self.max_staleness is None else self.max_staleness
