"""One thread that owns an engine; what several ask for at the same time is sampled in one call.

Engines are not made for several threads, and are fastest with many prompts at once. Knows nothing of HTTP, text or files.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo.engines.protocol import Engine, Sampling
from grpo.env.tokens import Completion, CompletionLike, completion_of
from grpo.system.errors import UserError, told


class Unavailable(Exception):
    """Nothing can be sampled: not yet, not now, or never again."""


@dataclass(eq=False)
class Job:
    """The prompts of one request. Changes: its completions come one by one, and `future` has them when all are there."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    seeds: Sequence[int]
    future: Future = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.completions: list[Completion | None] = [None] * len(self.prompts)

    def put(self, place: int, completion: CompletionLike) -> None:
        self.completions[place] = completion_of(completion)
        if not self.future.done() and None not in self.completions:
            self.future.set_result(self.completions)


class Batching:
    """make_engine is called in the thread too, first of all; if it raises, so does every future."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self.engine: Engine | None = None
        self.paused = self.stopped = self._over = False
        self._failure: Exception = Unavailable("the server is ending")
        self._make_engine = make_engine
        self._jobs: deque[Job] = deque()
        self._calls: deque[tuple[Callable[[Engine], Any], Future]] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def check_ready(self) -> None:
        """Raises Unavailable unless the engine has weights."""
        if self.stopped:
            raise Unavailable("the server is ending")
        if self.engine is None or self.engine.version is None:
            raise Unavailable("the engine has no weights yet: ask again in a while")

    def sample(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> Future:
        """A list of Completions, in order. Equal samplings that wait at the same time share a call of the engine."""
        job = Job(prompts, sampling, seeds)
        return self._put(self._jobs, job, job.future)

    def call(self, function: Callable[[Engine], Any]) -> Future:
        """What function(engine) returns. It runs between batches, before all that waits to be sampled."""
        future: Future = Future()
        return self._put(self._calls, (function, future), future)

    def pause(self, paused: bool) -> Future:
        """Done when no batch is running; from then on requests wait, and calls do not."""
        return self.call(lambda engine: setattr(self, "paused", paused))

    def stop(self) -> None:
        """What is being sampled is finished, what waits is refused, the engine is closed."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _put(self, queue: deque, item: Any, future: Future) -> Future:
        with self._changed:
            queue.append(item)
            self._changed.notify_all()
            if self._over:
                self._refuse()
        return future

    def _refuse(self) -> None:
        futures = [job.future for job in self._jobs] + [future for _, future in self._calls]
        self._jobs.clear()
        self._calls.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._failure)

    def _run(self) -> None:
        try:
            self.engine = self._make_engine()
            while self._work():
                pass
        except Exception as error:
            self._failure = error
        with self._changed:
            self.stopped = self._over = True
            self._refuse()
        if self.engine is not None:
            self.engine.close()

    def _work(self) -> bool:
        """One call, or one batch. False when there is nothing more to do."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or self._calls or (self._jobs and not self.paused))
            if self.stopped:
                return False
            call = self._calls.popleft() if self._calls else None
            jobs = [] if call else self._batch()
        if jobs:
            self._sample(jobs)
        elif call and call[1].set_running_or_notify_cancel():
            function, future = call
            try:
                future.set_result(function(self.engine))
            except Exception as error:
                future.set_exception(error)
        return True

    def _batch(self) -> list[Job]:
        """The oldest job, and all that are sampled as it is."""
        sampling = self._jobs[0].sampling
        jobs = [job for job in self._jobs if job.sampling == sampling]
        self._jobs = deque(job for job in self._jobs if job.sampling != sampling)
        return [job for job in jobs if job.future.set_running_or_notify_cancel()]

    def _sample(self, jobs: list[Job]) -> None:
        places = [(job, place) for job in jobs for place in range(len(job.prompts))]

        def done(i: int, completion: CompletionLike) -> None:
            job, place = places[i]
            job.put(place, completion)

        prompts = [prompt for job in jobs for prompt in job.prompts]
        seeds = [seed for job in jobs for seed in job.seeds]
        try:
            for i, completion in enumerate(self.engine.sample(prompts, jobs[0].sampling, seeds, done)):
                done(i, completion)
        except Exception as error:
            left = [job for job in jobs if not job.future.done()]
            if len(jobs) > 1:  # whoever is to blame harms nobody else
                for job in left:
                    self._sample([job])
            elif left:
                refusal = isinstance(error, ValueError) and not isinstance(error, UserError)
                left[0].future.set_exception(UserError(f"the engine refuses: {told(error)}") if refusal else error)
