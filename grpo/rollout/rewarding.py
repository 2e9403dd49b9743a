"""Rewards, given in threads of their own: while other episodes still go on, and no call for longer than a limit."""

import math
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Self

from grpo.env.scoring import place_of, score_group, scores_groups
from grpo.env.types import Example, Reward, Task, Trajectory
from grpo.system.coroutines import leave_blocked_loop
from grpo.system.errors import RewardError, told

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
            with self.lock:
                first, self.since = len(self.rewards), time.monotonic()
            self.begun.set()
            given, error = [], None
            try:
                rest = self.trajectories[first:]
                given = score_group(self.task, self.example, rest if self.group else rest[:1])
            except RewardError as raised:
                error = raised
            except BaseException as raised:  # whatever a task of the user's does, sys.exit() too
                error = RewardError(f"{place_of(self.task)} raised {told(raised)}")
                error.__cause__ = raised
            with self.lock:
                if first != len(self.rewards):  # it took too long and was given up meanwhile
                    return
                self.rewards += given
                self.error = error
                if error is None and len(self.rewards) == len(self.trajectories):
                    self.done.set()
            if error is not None:
                if not self.group:
                    error.sample = first
                elif error.sample is None:
                    error.sample = self._culprit()  # which may hang in its turn: see give_up
                self.done.set()

    def _culprit(self) -> int | None:
        """Which sample it was, if it fails alone too."""
        for i, trajectory in enumerate(self.trajectories):
            try:
                score_group(self.task, self.example, [trajectory])
            except BaseException:
                return i
        return None

    def give_up(self, since: float) -> bool:
        """What the call that began then was for is unknown; all of its siblings, where it was for all of them. False if it
        has come after all."""
        with self.lock:
            if self.done.is_set() or self.since != since:
                return False
            if self.error is None:
                left = len(self.trajectories) - len(self.rewards)
                self.rewards += [NOBODY_KNOWS] * (left if self.group else 1)
            if self.error or len(self.rewards) == len(self.trajectories):
                self.done.set()
            return True


class Scoring:
    """Scores groups as they are handed in. One for each time that episodes are played.

    timeout: seconds for one call of the task's. A thread cannot be stopped, so one that hangs is left behind, and another one
    takes its place. When as many hang as there are threads and none has ever come back, the reward is broken: that is an
    error, not hours of waiting.
    """

    def __init__(self, task: Task, timeout: float) -> None:
        self.task, self.timeout = task, timeout
        self.jobs: dict[Hashable, _Job] = {}
        self.waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.threads = self.given_up = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(self.threads):
            self.waiting.put(None)

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
        left = list(self.jobs.values())
        while left := [job for job in left if not job.done.is_set()]:
            going_on = [(job, job.since) for job in left if job.begun.is_set()]
            ends = min([since for _, since in going_on], default=time.monotonic()) + self.timeout
            if left[0].done.wait(max(ends - time.monotonic(), 0)):
                continue
            for job, since in going_on:  # side by side: a call that hangs does not put off the end of another one
                if time.monotonic() >= since + self.timeout and job.give_up(since):
                    self.given_up += 1
                    leave_blocked_loop()
                    self._hire(self._work)
                    if not job.done.is_set():
                        job.begun.clear()
                        self._hire(job.run)
                        job.begun.wait()
            answered = any(reward is not NOBODY_KNOWS for job in self.jobs.values() for reward in job.rewards)
            if self.given_up >= THREADS and not answered:
                left[0].error = RewardError(
                    f"{place_of(self.task)} did not come back in {self.timeout:g} s, {self.given_up} times and never once: mend "
                    "it, or raise score_timeout"
                )
                for job in left:
                    job.done.set()
        jobs = self.jobs.items()
        return {place: job.rewards for place, job in jobs}, {place: job.error for place, job in jobs if job.error}
