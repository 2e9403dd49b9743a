"""Rewards, while other episodes still go on: a group at a time, no call for longer than a limit."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

from grpo.env.scoring import place_of, score_group, scores_groups
from grpo.env.types import Example, Reward, Task, Trajectory
from grpo.system.calls import Calls
from grpo.system.errors import RewardError, told

THREADS = 16
UNKNOWN = Reward(math.nan, False)
TIMED_OUT = Reward(math.nan, False, outcome="timeout")


class Scorer:
    """Scores groups, up to THREADS calls of the task side by side. timeout: seconds of one call, after which its rewards are NaN.
    It is an error when as many calls hang as there are threads, and none has ever come back: the reward is broken."""

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
        together = scores_groups(self.task)
        asked = [trajectories] if together else [[trajectory] for trajectory in trajectories]
        each = await asyncio.gather(*(self.call(example, some) for some in asked))
        failed = {place: given for place, given in enumerate(each) if isinstance(given, RewardError)}
        given = [[UNKNOWN] * len(some) if place in failed else each[place] for place, some in enumerate(asked)]
        failure = None
        if failed:
            place, failure = next(iter(failed.items()))
            if not together:
                failure.sample = place
            elif failure.sample is None:
                failure.sample = await self.culprit(example, trajectories)
        return list(chain.from_iterable(given)), failure

    async def call(self, example: Example, trajectories: Sequence[Trajectory]) -> list[Reward] | RewardError:
        """One call of the task's."""
        given = await self.calls.run(object(), self.timeout, score_group, self.task, example, trajectories)
        if isinstance(given, TimeoutError):
            self.hung += 1
            if self.answered or self.hung < THREADS or self.calls.closed:
                return [TIMED_OUT] * len(trajectories)
            self.calls.close()
            never = f"did not come back in {self.timeout:g} s, {self.hung} times and never once"
            return RewardError(f"{place_of(self.task)} {never}: mend it, or raise score_timeout")
        if isinstance(given, BaseException) and not isinstance(given, RewardError):
            error = RewardError(f"{place_of(self.task)} raised {told(given)}")
            error.__cause__ = given
            return error
        self.answered = True
        return given

    async def culprit(self, example: Example, trajectories: Sequence[Trajectory]) -> int | None:
        """The sample that fails alone too, if it is found in the time of one call."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                for place, trajectory in enumerate(trajectories):
                    if isinstance(await self.call(example, [trajectory]), RewardError):
                        return place
        return None
