"""Scores groups while other episodes still run, each group at once, with a time limit for every call."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from grpo.env.scoring import UNKNOWN, place_of, score_group, scores_groups
from grpo.env.types import Example, Reward, Task, Trajectory
from grpo.system.calls import Calls
from grpo.system.errors import RewardError, error_line

THREADS = 16
TIMED_OUT = Reward(math.nan, False, outcome="timeout")  # not 0, which would teach against the answer


class Scorer:
    """Scores groups, with up to `threads` calls of the task at a time; None: THREADS.

    timeout: seconds of one call, after which its rewards are NaN. If THREADS calls hang and none has ever returned, the reward is
    considered broken, which is an error.
    """

    def __init__(self, task: Task, timeout: float, threads: int | None = None) -> None:
        self.task, self.timeout, self.calls = task, timeout, Calls(threads or THREADS, place_of(task))
        self.hung, self.answered = 0, False

    async def __call__(
        self, example: Example, trajectories: Sequence[Trajectory], envs: Sequence[Any] = ()
    ) -> tuple[list[Reward], RewardError | None]:
        """Return a reward for each trajectory, UNKNOWN if its call failed, and the first failure, whose `sample` is the index of
        its trajectory. envs: their environments."""
        if not trajectories:
            return [], None
        together = scores_groups(self.task)
        envs = envs or [None] * len(trajectories)
        alone = [([trajectory], [env]) for trajectory, env in zip(trajectories, envs, strict=True)]
        requests = [(trajectories, envs)] if together else alone
        answers = await asyncio.gather(*(self.call(example, *some) for some in requests))
        rewards, failure = [], None
        for place, ((some, _), answer) in enumerate(zip(requests, answers, strict=True)):
            failed = isinstance(answer, RewardError)
            rewards += [UNKNOWN] * len(some) if failed else answer
            if failed and failure is None:
                failure, first = answer, place
        if failure and not together:
            failure.sample = first
        elif failure and failure.sample is None:
            failure.sample = await self.culprit(example, alone)
        return rewards, failure

    async def call(
        self, example: Example, trajectories: Sequence[Trajectory], envs: Sequence[Any]
    ) -> list[Reward] | RewardError:
        """Make one call of the task's reward. Returns the rewards, or the error."""
        answer = await self.calls.run(object(), self.timeout, score_group, self.task, example, trajectories, envs)
        if isinstance(answer, TimeoutError):
            self.hung += 1
            if self.answered or self.hung < THREADS or self.calls.closed:
                return [TIMED_OUT] * len(trajectories)
            self.calls.close()
            never = f"did not return within {self.timeout:g} s in any of {self.hung} calls"
            return RewardError(f"{place_of(self.task)} {never}: fix it, or raise score_timeout")
        if isinstance(answer, BaseException) and not isinstance(answer, RewardError):
            error = RewardError(f"{place_of(self.task)} raised {error_line(answer)}")
            error.__cause__ = answer
            return error
        self.answered = True
        return answer

    async def culprit(self, example: Example, alone: Sequence[tuple[list[Trajectory], list[Any]]]) -> int | None:
        """Return the index of a sample that also fails when scored alone; None if none is found within the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                for place, pair in enumerate(alone):
                    if isinstance(await self.call(example, *pair), RewardError):
                        return place
        return None
