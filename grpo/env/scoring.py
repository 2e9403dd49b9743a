"""Gets the rewards of one example's samples from its task, and checks them."""

import math
from collections.abc import Sequence
from typing import Any

from grpo.env.intake import asked_for, reward_of
from grpo.env.types import Example, Reward, Task, Trajectory
from grpo.system.calls import awaited
from grpo.system.errors import RewardError, plural

LARGEST = 1e18  # of a reward: in float32 the variance of larger ones is infinite
UNKNOWN = Reward(math.nan, False)


def scores_groups(task: Task) -> bool:
    """Whether the task scores a group together. The most derived class decides; if it has both methods, the
    group's wins."""
    for owner in type(task).__mro__:
        if "score_group" in vars(owner) or "score" in vars(owner):
            return "score_group" in vars(owner)
    return not hasattr(task, "score")


def score_group(
    task: Task, example: Example, trajectories: Sequence[Trajectory], envs: Sequence[Any] = ()
) -> list[Reward]:
    """Return the rewards of one example's samples: those of `task.score_group`, else of `task.score`, else of
    the environments.

    envs: the environments, for a method that names them. Raises RewardError if a method returns no `Reward`.
    """
    envs = envs or [None] * len(trajectories)
    if not scores_groups(task):
        pairs = zip(trajectories, envs, strict=True)
        rewards = [
            awaited(task.score(example, trajectory, **asked_for(task.score, env=env))) for trajectory, env in pairs
        ]
    elif hasattr(task, "score_group"):
        rewards = list(awaited(task.score_group(example, trajectories, **asked_for(task.score_group, envs=envs))))
    else:
        rewards = [trajectory.reward or UNKNOWN for trajectory in trajectories]
    if len(rewards) != len(trajectories):
        raise RewardError(
            f"{place_of(task)} gave {plural(len(rewards), 'reward')} for {plural(len(trajectories), 'sample')}"
        )
    return [_checked(task, i, reward) for i, reward in enumerate(rewards)]


def _checked(task: Task, i: int, reward: Any) -> Reward:
    try:
        plain = reward_of(reward)
    except (AttributeError, TypeError, ValueError):
        words = f"{place_of(task)} gave {reward!r}: it must give a grpo.env.types.Reward of numbers"
        raise RewardError(words, i) from None
    if abs(plain.value) > LARGEST:
        raise RewardError(f"{place_of(task)} gave a reward of {plain.value}: it must be at most {LARGEST:g} in size", i)
    return plain


def place_of(task: Task) -> str:
    """Return the method that gives the rewards, as `Class.method`."""
    return f"{type(task).__name__}.{'score_group' if scores_groups(task) else 'score'}"
