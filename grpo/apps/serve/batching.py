"""One thread that owns an engine; what several ask for at the same time is sampled in one call.

Engines are not made for several threads, and are fastest with many prompts at once. Knows nothing of HTTP, text or files.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from grpo.engines.protocol import Engine, Sampling
from grpo.env.tokens import Completion, CompletionLike, completion_of
from grpo.system.errors import UserError, told


class Unavailable(Exception):
    """Nothing can be sampled: not yet, not now, or never again."""


@dataclass(eq=False)
class SampleRequest:
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
    """make_engine is called in the thread too, first of all; if it raises, so does every `call`."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self.paused = self.stopped = False
        self._waiting: list[SampleRequest] = []
        self._calls: deque[Callable[[Engine], Any]] = deque()
        self._lock = threading.Lock()  # of both
        self._thread = ThreadPoolExecutor(1, "engine")
        self._made = self._thread.submit(make_engine)
        self._ended: Future | None = None

    @property
    def engine(self) -> Engine | None:
        """None until it is made, and where that failed."""
        return self._made.result() if self._made.done() and not self._made.exception() else None

    def check_ready(self) -> None:
        """Raises Unavailable unless the engine has weights."""
        self._check_not_stopped()
        if self.engine is None or self.engine.version is None:
            raise Unavailable("the engine has no weights yet: ask again in a while")

    def sample(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> Future:
        """A list of Completions, in order. Equal samplings that wait at the same time share a call of the engine."""
        self._check_not_stopped()
        request = SampleRequest(prompts, sampling, seeds)
        with self._lock:
            self._waiting.append(request)
        self._thread.submit(self._run, self._sample_next)
        return request.future

    def call(self, function: Callable[[Engine], Any]) -> Future:
        """The result of function(engine). It runs between batches, before all requests that wait."""
        self._check_not_stopped()
        with self._lock:
            self._calls.append(function)
            return self._thread.submit(lambda: self._run(self._calls.popleft()))

    def pause(self, paused: bool) -> Future:
        """Done when no batch is running; from then on requests wait, and calls do not."""

        def switch(engine: Engine) -> None:
            self.paused = paused
            for _ in self._waiting:
                self._thread.submit(self._run, self._sample_next)

        return self.call(switch)

    def stop(self) -> None:
        """The running batch is finished, waiting requests are refused, the engine is closed."""
        self.stopped = True
        self._ended = self._thread.submit(self._end)

    @property
    def alive(self) -> bool:
        return self._ended is None or not self._ended.done()

    def _check_not_stopped(self) -> None:
        if self.stopped:
            raise Unavailable("the server is ending")

    def _run(self, function: Callable[[Engine], Any]) -> Any:
        self._check_not_stopped()
        return function(self._made.result())

    def _end(self) -> None:
        for request in self._waiting:
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(Unavailable("the server is ending"))
        if self.engine is not None:
            self.engine.close()

    def _sample_next(self, engine: Engine) -> None:
        """The oldest request that waits, and all with the same sampling; nothing if a batch before took it along."""
        if self._calls:
            self._thread.submit(self._run, self._sample_next)
            return
        with self._lock:
            if self.paused or not self._waiting:
                return
            sampling = self._waiting[0].sampling
            batch = [request for request in self._waiting if request.sampling == sampling]
            self._waiting = [request for request in self._waiting if request.sampling != sampling]
        if batch := [request for request in batch if request.future.set_running_or_notify_cancel()]:
            self._sample(batch)

    def _sample(self, batch: list[SampleRequest]) -> None:
        places = [(request, place) for request in batch for place in range(len(request.prompts))]

        def done(i: int, completion: CompletionLike) -> None:
            request, place = places[i]
            request.put(place, completion)

        prompts = [prompt for request in batch for prompt in request.prompts]
        seeds = [seed for request in batch for seed in request.seeds]
        try:
            for i, completion in enumerate(self.engine.sample(prompts, batch[0].sampling, seeds, done)):
                done(i, completion)
        except Exception as error:
            left = [request for request in batch if not request.future.done()]
            if len(batch) > 1:  # whoever is to blame harms nobody else
                for request in left:
                    self._sample([request])
            elif left:
                refusal = isinstance(error, ValueError) and not isinstance(error, UserError)
                left[0].future.set_exception(UserError(f"the engine refuses: {told(error)}") if refusal else error)
