"""Which finished groups an update learns from, so that none becomes older than the bound. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo.rollout.rollouts import Rollout
from grpo.rollout.versions import versions_of

Key = tuple[int, int]  # the rollout of the plan, and the place of a prompt in it


@dataclass(frozen=True)
class Waiting:
    """A group that was issued and not learned from. deadline: the last update that may learn from it; None: any may."""

    key: Key
    finished: bool
    deadline: int | None = None


def for_update(waiting: Sequence[Waiting], update: int, count: int) -> list[Key] | None:
    """Return the groups for an update, oldest first: `count` finished ones, or all if there are fewer; None if it must wait.

    Every later update takes `count` groups too. So of the groups that are due by update j, at most (j - update) x count may be
    left after this one; the others must be among the chosen ones, and the update waits until they are finished. This is the
    rule of earliest deadlines. Groups that are late already come first.
    """
    waiting = sorted(waiting, key=lambda one: one.key)
    finished = [one for one in waiting if one.finished]
    if not waiting or len(finished) < min(count, len(waiting)):
        return None
    picked: list[Waiting] = []
    for j in sorted({one.deadline for one in waiting if one.deadline is not None}):
        due = [one for one in waiting if one.deadline is not None and one.deadline <= j]
        needed = min(len(due) - max(0, j - update) * count, count) - len(picked)
        more = [one for one in due if one.finished and one not in picked][: max(0, needed)]
        if len(more) < needed:
            return None
        picked += more
    picked += [one for one in finished if one not in picked][: count - len(picked)]
    return sorted(one.key for one in picked)


def staleness_of(rollout: Rollout, update: int) -> dict[str, float]:
    """Return the age of the weights that sampled a token, in versions before `update`: the mean over tokens, and the largest."""
    versions = [version for group in rollout.groups for version in versions_of(group, rollout.version)] or [update]
    mean, oldest = update - sum(versions) / len(versions), float(update - min(versions))
    return {"rollout/staleness": mean, "rollout/staleness_max": oldest}
