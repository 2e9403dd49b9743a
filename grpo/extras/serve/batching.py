"""The one thread that owns an engine. It samples the prompts of simultaneous requests in one call.

Engines are not thread-safe, and they are fastest with many prompts at once. This module does not know HTTP, text or files.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from grpo.engines.protocol import Engine, Sampling
from grpo.env.tokens import Completion, CompletionLike, completion_of
from grpo.system.errors import UserError, error_line

PATIENCE = 1000  # tokens of a request that count as much as a second of waiting


class Unavailable(Exception):
    """The server cannot sample: it is starting, paused or stopping."""


class Abandoned(Exception):
    """Nobody waits for the completions of a batch any more."""


@dataclass(eq=False)
class SampleRequest:
    """The prompts of one request. Mutable: completions are added one by one; `future` gets the list when it is complete.

    Cancelling the future withdraws the request, even while it is sampled.
    due: requests are sampled in this order, so that a small one is not behind a queue of large ones, and a large one waits only
    for those that came soon after it.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    seeds: Sequence[int]
    future: Future = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.completions: list[Completion | None] = [None] * len(self.prompts)
        tokens = sum(map(len, self.prompts)) + len(self.prompts) * self.sampling.max_tokens
        self.due = time.monotonic() + tokens / PATIENCE

    def put(self, place: int, completion: CompletionLike) -> None:
        """Store the completion of the prompt at `place`."""
        self.completions[place] = completion_of(completion)
        if None not in self.completions:
            with suppress(InvalidStateError):  # it was withdrawn, or is complete
                self.future.set_result(self.completions)

    def fail(self, error: Exception) -> None:
        """Give the future an exception, unless it is done."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class Batching:
    """A queue of requests and calls before one engine, which runs in a thread of its own.

    make_engine: called first in that thread. If it raises, every later `call` raises the same.
    waiting, running: the requests that wait, and those that are sampled now. paused: nothing is sampled. asleep: the engine may
    have freed its weights; set by a function that `pause` calls.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self.paused = self.asleep = self.stopped = False
        self.waiting: list[SampleRequest] = []
        self.running: list[SampleRequest] = []
        self._calls: deque[Callable[[Engine], Any]] = deque()
        self._lock = threading.Lock()  # for both
        self._thread = ThreadPoolExecutor(1, "engine")
        self._made = self._thread.submit(make_engine)
        self._ended: Future | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine; None before it is created, and if that failed."""
        return self._made.result() if self._made.done() and not self._made.exception() else None

    @property
    def context(self) -> int | None:
        """The engine's context; None before it has weights."""
        return self.engine.context if self.engine and self.engine.version is not None else None

    def check_ready(self) -> None:
        """Raise Unavailable unless the engine has weights and is awake."""
        self._check_not_stopped()
        if self.asleep:
            raise Unavailable("the engine sleeps: POST /wake_up wakes it")
        if self.engine is None or self.engine.version is None:
            raise Unavailable("the engine has no weights yet: try again later")

    def sample(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> Future:
        """Queue prompts and return a Future of their Completions, in order.

        Waiting requests with equal sampling settings share one call of the engine. Cancelling the Future takes the prompts out of
        the queue, and out of the running batch if the engine has a set `unwanted`.
        """
        self._check_not_stopped()
        request = SampleRequest(prompts, sampling, seeds)
        with self._lock:
            self.waiting.append(request)
        request.future.add_done_callback(lambda _: self._forget(request))
        self._thread.submit(self._run, self._sample_next)
        return request.future

    def call(self, function: Callable[[Engine], Any]) -> Future:
        """Queue function(engine) and return a Future of its result. It runs between batches, before all waiting requests."""
        self._check_not_stopped()
        with self._lock:
            self._calls.append(function)
            return self._thread.submit(lambda: self._run(self._calls.popleft()))

    def pause(self, paused: bool, function: Callable[[Engine], Any] = lambda engine: None) -> Future:
        """Pause or resume sampling, after function(engine). The Future is done when no batch is running; then requests wait, and
        calls still run."""

        def switch(engine: Engine) -> None:
            function(engine)
            self.paused = paused
            for _ in self.waiting:
                self._thread.submit(self._run, self._sample_next)

        return self.call(switch)

    def stop(self) -> None:
        """Finish the running batch, refuse the waiting requests, and close the engine. Returns at once; see `alive`."""
        self.stopped = True
        self._ended = self._thread.submit(self._end)

    @property
    def alive(self) -> bool:
        """Whether the engine is not closed yet."""
        return self._ended is None or not self._ended.done()

    def _check_not_stopped(self) -> None:
        if self.stopped:
            raise Unavailable("the server is stopping")

    def _forget(self, request: SampleRequest) -> None:
        with self._lock, suppress(ValueError):  # it waits no longer
            self.waiting.remove(request)

    def _run(self, function: Callable[[Engine], Any]) -> Any:
        self._check_not_stopped()
        return function(self._made.result())

    def _end(self) -> None:
        for request in [*self.waiting]:
            request.fail(Unavailable("the server is stopping"))
        if self.engine is not None:
            self.engine.close()

    def _sample_next(self, engine: Engine) -> None:
        """Sample the request that is due first and all with equal sampling settings; an earlier batch may have left none."""
        if self._calls:
            self._thread.submit(self._run, self._sample_next)
            return
        with self._lock:
            if self.paused or self.asleep or not self.waiting:
                return
            sampling = min(self.waiting, key=lambda request: request.due).sampling
            batch = [request for request in self.waiting if request.sampling == sampling]
            self.waiting = [request for request in self.waiting if request.sampling != sampling]
        self._sample(batch)

    def _sample(self, batch: list[SampleRequest]) -> None:
        places = [(request, place) for request in batch for place in range(len(request.prompts))]
        unwanted: set[int] = set()
        with suppress(AttributeError):  # an engine may be frozen; it samples everything
            self.engine.unwanted = unwanted

        def ended(request: SampleRequest) -> None:
            if request.future.cancelled():
                unwanted.update(i for i, (other, _) in enumerate(places) if other is request)

        def done(i: int, completion: CompletionLike) -> None:
            request, place = places[i]
            if i not in unwanted:
                request.put(place, completion)
            elif all(request.future.done() for request in batch):
                raise Abandoned

        prompts = [prompt for request in batch for prompt in request.prompts]
        seeds = [seed for request in batch for seed in request.seeds]
        self.running = batch
        for request in batch:
            request.future.add_done_callback(lambda _, request=request: ended(request))
        try:
            for i, completion in enumerate(self.engine.sample(prompts, batch[0].sampling, seeds, done)):
                done(i, completion)
        except Abandoned:
            pass
        except Exception as error:
            left = [request for request in batch if not request.future.done()]
            if len(batch) > 1:  # sample them one by one, so that a bad request fails alone
                for request in left:
                    self._sample([request])
            elif left:
                refusal = isinstance(error, ValueError) and not isinstance(error, UserError)
                left[0].fail(UserError(f"the engine refuses: {error_line(error)}") if refusal else error)
        finally:
            self.running = []
