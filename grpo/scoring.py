"""Layer 2 - rewards, given in threads of their own: while other episodes still go on, and no call for longer than a limit."""

import asyncio
import inspect
import math
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from grpo.errors import RewardError, UserError, told
from grpo.rl import Example, Reward, Task, Trajectory

THREADS = 16
NOBODY_KNOWS = Reward(math.nan, False, outcome="timeout")


class _Job:
    """The rewards of one group; those of the siblings before a call that hangs are kept, and those after it still come."""

    def __init__(self, task: Task, example: Example, trajectories: Sequence[Trajectory]) -> None:
        self.task, self.example, self.trajectories = task, example, trajectories
        self.rewards: list[Reward] = []
        self.error: RewardError | None = None
        self.begun, self.done, self.lock = threading.Event(), threading.Event(), threading.Lock()
        self.since = 0.0  # when the call that is going on began
        self.group = scores_groups(task)

    def run(self) -> None:
        while not self.done.is_set():
            first = len(self.rewards)
            self.since = time.monotonic()
            self.begun.set()
            try:
                rest = self.trajectories[first:]
                given = score_group(self.task, self.example, rest if self.group else rest[:1])
            except RewardError as error:
                self.error = error if error.sample is not None else RewardError(str(error), self._culprit(first))
            except Exception as error:  # whatever a task of the user's does
                place = f"{type(self.task).__name__}.{'score_group' if self.group else 'score'}"
                self.error = RewardError(f"{place} raised {told(error)}", self._culprit(first))
                self.error.__cause__ = error
            with self.lock:
                if first != len(self.rewards):  # it took too long and was given up meanwhile
                    return
                if self.error is None:
                    self.rewards += given
                if self.error or len(self.rewards) == len(self.trajectories):
                    self.done.set()

    def _culprit(self, first: int) -> int | None:
        """Which sample it was, if it fails alone too."""
        if not self.group:
            return first
        for i, trajectory in enumerate(self.trajectories):
            try:
                score_group(self.task, self.example, [trajectory])
            except Exception:
                return i
        return None

    def give_up(self) -> None:
        """What the hanging call was for is unknown; all of its siblings, where it was for all of them."""
        with self.lock:
            left = len(self.trajectories) - len(self.rewards)
            self.rewards += [NOBODY_KNOWS] * (left if self.group else 1)
            if len(self.rewards) == len(self.trajectories):
                self.done.set()


def scores_groups(task: Task) -> bool:
    """Whether it scores siblings together: the class that comes last in its ancestry decides, and in one class the group."""
    for owner in type(task).__mro__:
        if "score_group" in vars(owner) or "score" in vars(owner):
            return "score_group" in vars(owner)
    return False


def score_group(task: Task, example: Example, trajectories: Sequence[Trajectory]) -> list[Reward]:
    """What a task gives samples of one example, by `score_group` or one after the other by `score`."""
    if not scores_groups(task):
        return [_waited(task.score(example, trajectory)) for trajectory in trajectories]
    given = list(_waited(task.score_group(example, trajectories)))
    if len(given) != len(trajectories):
        raise RewardError(
            f"{type(task).__name__}.score_group gave {len(given)} rewards for {len(trajectories)} samples"
        )
    return given


def _waited(value: Any) -> Any:
    """A task may score with a coroutine."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


class Scoring:
    """Scores groups as they are handed in. One for each time that episodes are played.

    timeout: seconds for one call of the task's. A thread cannot be stopped, so one that hangs is left behind, and another one
    takes its place.
    """

    def __init__(self, task: Task, timeout: float) -> None:
        self.task, self.timeout = task, timeout
        self.jobs: dict[Hashable, _Job] = {}
        self.waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.threads = 0

    def _work(self) -> None:
        while (job := self.waiting.get()) is not None:
            job.run()

    def _hire(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="reward", daemon=True).start()
        self.threads += work == self._work

    def start(self, place: Hashable, example: Example, trajectories: Sequence[Trajectory]) -> None:
        self.jobs[place] = job = _Job(self.task, example, trajectories)
        if self.threads < THREADS:
            self._hire(self._work)
        self.waiting.put(job)

    def finish(self) -> tuple[dict[Hashable, list[Reward]], dict[Hashable, RewardError]]:
        """The rewards by place, and what went wrong by place."""
        for (
            job
        ) in self.jobs.values():  # they begin in this order, so those that hang come up before those that wait for them
            job.begun.wait()
            while not job.done.wait(max(job.since + self.timeout - time.monotonic(), 0)):
                if time.monotonic() < job.since + self.timeout:
                    continue  # it has gone on to the next sample
                job.give_up()
                self._hire(self._work)
                if not job.done.is_set():
                    job.begun.clear()
                    self._hire(job.run)
                    job.begun.wait()
        for _ in range(self.threads):
            self.waiting.put(None)
        jobs = self.jobs.items()
        return {place: job.rewards for place, job in jobs}, {place: job.error for place, job in jobs if job.error}


def check_timeout(name: str, seconds: float) -> None:
    if not seconds > 0:
        raise UserError(f"{name}={seconds} must be more than 0 seconds")
