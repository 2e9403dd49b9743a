"""Rewards, while other episodes still go on: a group at a time, no call for longer than a limit."""

import asyncio
import math
from collections.abc import Sequence

from grpo.env.scoring import place_of, score_group, scores_groups
from grpo.env.types import Example, Reward, Task, Trajectory
from grpo.system.calls import Calls
from grpo.system.errors import RewardError, told

THREADS = 16
UNKNOWN = Reward(math.nan, False)
TIMED_OUT = Reward(math.nan, False, outcome="timeout")


class Scorer:
    """Scores groups, up to THREADS calls of the task side by side. timeout: seconds of one call, after which its rewards are NaN.

    When as many calls hang as there are threads and none has ever come back, the reward is broken: that is an error, not hours of
    waiting.
    """

    def __init__(self, task: Task, timeout: float) -> None:
        self.task, self.timeout, self.calls = task, timeout, Calls(THREADS)
        self.hung, self.answered = 0, False

    async def __call__(
        self, example: Example, trajectories: Sequence[Trajectory]
    ) -> tuple[list[Reward], RewardError | None]:
        """A reward for each trajectory, UNKNOWN where its call failed, and the first failure; its `sample` is the place among the
        trajectories."""
        if not trajectories:
            return [], None
        if scores_groups(self.task):
            given = await self.call(example, trajectories)
            if not isinstance(given, RewardError):
                return given, None
            if given.sample is None:
                given.sample = await self.culprit(example, trajectories)
            return [UNKNOWN] * len(trajectories), given
        each = await asyncio.gather(*(self.call(example, [trajectory]) for trajectory in trajectories))
        rewards, failure = [], None
        for place, given in enumerate(each):
            failed = isinstance(given, RewardError)
            rewards.append(UNKNOWN if failed else given[0])
            if failed and failure is None:
                failure, failure.sample = given, place
        return rewards, failure

    async def call(self, example: Example, trajectories: Sequence[Trajectory]) -> list[Reward] | RewardError:
        """One call of the task's."""
        given = await self.calls(object(), self.timeout, score_group, self.task, example, trajectories)
        if isinstance(given, TimeoutError) and not self.calls.closed:
            self.hung += 1
            if self.hung >= THREADS and not self.answered:
                self.calls.close()
                return RewardError(
                    f"{place_of(self.task)} did not come back in {self.timeout:g} s, {self.hung} times and never once: mend "
                    "it, or raise score_timeout"
                )
        if isinstance(given, TimeoutError):
            return [TIMED_OUT] * len(trajectories)
        if isinstance(given, BaseException) and not isinstance(given, RewardError):
            error = RewardError(f"{place_of(self.task)} raised {told(given)}")
            error.__cause__ = given
            return error
        self.answered = True
        return given

    async def culprit(self, example: Example, trajectories: Sequence[Trajectory]) -> int | None:
        """The sample that fails alone too, if it is found in the time of one call."""
        try:
            async with asyncio.timeout(self.timeout):
                for place, trajectory in enumerate(trajectories):
                    if isinstance(await self.call(example, [trajectory]), RewardError):
                        return place
        except TimeoutError:
            pass
        return None
