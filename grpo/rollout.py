"""Layer 2 - what a rollout is: its size, its limits, its samples, what they say in the mean, its seeds. `play` makes one."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo.engine import Sampling
from grpo.errors import UserError
from grpo.rl import Example, Reward, Trajectory
from grpo.scoring import TIMEOUT
from grpo.tokens import Turn


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


def sample_means(samples: Sequence[Sample]) -> dict[str, float]:
    """length in tokens; shares: truncated, and where anything was graded no_answer, timeout and error; of conversations also
    what `conversation` says; and every part of the reward by name, over the samples that have it."""
    graded = ("no_answer", "timeout", "error") if any(sample.reward.outcome for sample in samples) else ()
    conversations = any(len(sample.turns) != 1 or sample.trajectory.steps[0].state.tools for sample in samples)
    values: dict[str, list[float]] = {}
    for sample in samples:
        ours = {"length": sample.length, "truncated": sample.trajectory.truncated}
        ours |= {name: sample.reward.outcome == name for name in graded}
        ours |= conversation(sample.trajectory) if conversations else {}
        for name, value in {**sample.reward.parts, **ours}.items():  # no part of a reward takes our names
            values.setdefault(name, []).append(value)
    ordered = [*ours, *sorted(values.keys() - ours.keys())]
    return {name: float(np.mean(values[name])) for name in ordered}


def conversation(trajectory: Trajectory) -> dict[str, float]:
    """Of one episode the turns, whether they ran out, whether the environment raised (env_error) or took too long (env_timeout),
    the calls of tools, those that failed, and messages whose call could not be read."""
    said = [step.action.message for step in trajectory.steps]
    return {
        "turns": len(said),
        **{end: float(trajectory.end == end) for end in ("out_of_turns", "env_error", "env_timeout")},
        "tool_calls": sum(len(message.tool_calls) for message in said),
        "tool_failures": sum(message.role == "tool" and bool(message.error) for message in trajectory.messages),
        "malformed_calls": sum(bool(message.error) for message in said),
    }


def share_right(samples: Sequence[Sample]) -> float:
    """Of those whose reward is known; NaN if none is."""
    known = [sample.reward.correct for sample in samples if sample.reward.known]
    return float(np.mean(known)) if known else math.nan


@dataclass(frozen=True)
class Limits:
    """Of one episode, whatever its task.

    max_turns: messages of the policy's. step_timeout, score_timeout: seconds for one call of the environment's, of the reward's;
    the reward of what takes longer is unknown, not 0.
    """

    max_turns: int = 16
    step_timeout: float = 60.0
    score_timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise UserError(f"max_turns={self.max_turns} must be at least 1")
        for name in ("step_timeout", "score_timeout"):
            if not 0 < (seconds := getattr(self, name)) <= threading.TIMEOUT_MAX:
                raise UserError(f"{name}={seconds} must be more than 0 seconds, and finite")


@dataclass(frozen=True)
class Plan:
    """A run is `num_rollouts` rollouts of `prompts` prompts with `group_size` samples each.

    ahead: 1 plays a rollout while the policy learns from the one before it, so with weights that have not.
    """

    prompts: int
    group_size: int
    num_rollouts: int
    sampling: Sampling
    limits: Limits = field(default_factory=Limits)
    ahead: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "group_size", "num_rollouts"):
            if getattr(self, name) < 1:
                raise UserError(f"rollout.{name}={getattr(self, name)} must be at least 1")
        if self.ahead not in (0, 1):
            raise UserError(
                f"rollout.ahead={self.ahead} must be 0, or 1: the next rollout during the update, and none further ahead"
            )
        if self.sampling.temperature == 0:
            raise UserError(
                "rollout.sampling.temperature=0: greedy samples of a prompt are equal, nothing can be learned"
            )


TRAIN, EVALUATION, SHUFFLE = range(3)  # second in the path of a seed: what the noise is for


def derive_seed(*path: int) -> int:
    """A 63-bit seed that depends on every number of the path, as (run, TRAIN, rollout, prompt, sample, turn)."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0] >> 1)
