"""Gets the rewards of one example's samples from its task, and checks them."""

from collections.abc import Sequence
from typing import Any

from grpo.env.types import Example, Reward, Task, Trajectory
from grpo.system.calls import awaited
from grpo.system.errors import RewardError

LARGEST = 1e18  # of a reward: in float32 the variance of larger ones is infinite


def scores_groups(task: Task) -> bool:
    """Whether the task scores a group together. The most derived class decides; if it has both methods, the group's wins."""
    for owner in type(task).__mro__:
        if "score_group" in vars(owner) or "score" in vars(owner):
            return "score_group" in vars(owner)
    return False


def score_group(task: Task, example: Example, trajectories: Sequence[Trajectory]) -> list[Reward]:
    """A task's rewards for samples of one example, by `score_group` or one after the other by `score`. Raises RewardError where
    that is no `Reward` of numbers."""
    if scores_groups(task):
        given = list(awaited(task.score_group(example, trajectories)))
    else:
        given = [awaited(task.score(example, trajectory)) for trajectory in trajectories]
    if len(given) != len(trajectories):
        raise RewardError(f"{place_of(task)} gave {len(given)} rewards for {len(trajectories)} samples")
    return [_checked(task, i, reward) for i, reward in enumerate(given)]


def _checked(task: Task, i: int, reward: Any) -> Reward:
    """The same in Python's own numbers, which can be written as JSON; NaN is an unknown reward."""
    try:
        parts = {name: float(value) for name, value in reward.parts.items()}
        plain = Reward(float(reward.value), bool(reward.correct), parts, getattr(reward, "outcome", None))
    except (AttributeError, TypeError, ValueError):
        words = f"{place_of(task)} gave {reward!r}: it must give a grpo.env.types.Reward of numbers"
        raise RewardError(words, i) from None
    if abs(plain.value) > LARGEST:
        raise RewardError(f"{place_of(task)} gave a reward of {plain.value}: it must be at most {LARGEST:g} in size", i)
    return plain


def place_of(task: Task) -> str:
    """Names the place that the rewards come from."""
    return f"{type(task).__name__}.{'score_group' if scores_groups(task) else 'score'}"
