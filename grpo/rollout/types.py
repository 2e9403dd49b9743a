"""A rollout as data: its size, its limits, its samples. `Rollouts` makes one."""

import threading
from dataclasses import dataclass, field

from grpo.engines.protocol import Sampling
from grpo.env.tokens import Turn
from grpo.env.types import Example, Reward, Trajectory
from grpo.system.errors import UserError, check_least

TIMEOUT = 120.0  # seconds of one call of a reward, where nobody says otherwise


@dataclass(frozen=True)
class Sample:
    """One episode in both views: the trajectory (messages), the turns (tokens), one a step; and what it earned."""

    example: Example
    trajectory: Trajectory
    turns: tuple[Turn, ...]
    reward: Reward

    @property
    def length(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(turn.completion.ids) for turn in self.turns)


Group = list[Sample]  # the G samples of one example


@dataclass(frozen=True)
class Limits:
    """Of one episode. max_turns: messages of the policy's. step_timeout, score_timeout: seconds for one call of the environment,
    of the reward; the reward of what takes longer is unknown, not 0."""

    max_turns: int = 16
    step_timeout: float = 60.0
    score_timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        check_least("max_turns", self.max_turns, 1)
        for name in ("step_timeout", "score_timeout"):
            if not 0 < (seconds := getattr(self, name)) <= threading.TIMEOUT_MAX:
                raise UserError(f"{name}={seconds} must be more than 0 seconds, and finite")


@dataclass(frozen=True)
class Plan:
    """A run is `num_rollouts` rollouts of `prompts` prompts with `group_size` samples each. ahead: 1 plays a rollout while the
    policy learns from the one before it, so with older weights."""

    prompts: int
    group_size: int
    num_rollouts: int
    sampling: Sampling
    limits: Limits = field(default_factory=Limits)
    ahead: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "group_size", "num_rollouts"):
            check_least(f"rollout.{name}", getattr(self, name), 1)
        if self.ahead not in (0, 1):
            raise UserError(f"rollout.ahead={self.ahead} must be 0, or 1: the next rollout is played during the update")
        if self.sampling.temperature == 0:
            raise UserError("rollout.sampling.temperature=0: greedy samples are equal, nothing can be learned")
