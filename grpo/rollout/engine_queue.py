"""The queue between episodes and the engine: prompts that wait are sampled together.

Two threads use it, under the lock `changed`. The thread of the episodes' event loop calls `sample` and `over`. The thread that
called `play` calls `serve`, which calls the engine. The threads of environments (system/calls.py) do not use it.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING
from weakref import WeakSet

from grpo.engines.context import check_context
from grpo.engines.logprobs import is_logprob
from grpo.engines.protocol import Engine, Sampling
from grpo.engines.stop_texts import StopTexts
from grpo.env.rendering import message_after
from grpo.env.tokens import Completion, CompletionLike, completion_of
from grpo.env.types import State
from grpo.system.calls import LOOK, PATIENCE, Calls, loop_threads
from grpo.system.errors import UserError
from grpo.system.threads import Background, stop_all

if TYPE_CHECKING:  # eval.py compare= must not import transformers
    from grpo.env.rendering import Renderer

Place = tuple[int, int]  # an episode: index of its example, index of its sample
TOGETHER = 0.005  # seconds in which prompts for an eager engine share a call


def received(engine: Engine, answer: CompletionLike) -> Completion:
    """Return a completion from the engine as a `Completion`. Raises UserError for log-probabilities that are none, or too few."""
    try:
        completion = completion_of(answer)
    except ValueError as error:
        raise UserError(f"the engine {type(engine).__name__} gave {error}: each token needs one") from error
    for i, value in enumerate(completion.logprobs):
        if not is_logprob(value):
            wrong = f"{value} as the log-probability of token {completion.ids[i]}"
            must = "it must be a finite number of at most 0, log softmax(logits / temperature)"
            raise UserError(f"the engine {type(engine).__name__} gave {wrong}: {must}")
    return completion


class EngineQueue:
    """The engine as episodes see it: `sample` returns the completion of one prompt, `serve` samples all waiting prompts together.

    Before it samples, it waits for every episode whose environment is working, unless that is slow (see `Calls.slow`). So the
    batches of quick environments, and with them the last bits of every number, do not depend on thread timing. For an engine that
    is `eager` it waits for none: each prompt is sampled at once, by a thread of its own, beside those that came before.
    """

    def __init__(self, engine: Engine, sampling: Sampling, environments: Calls, places: Sequence[Place]) -> None:
        self.mixes = "temperatures" in signature(engine.sample).parameters
        self.engine, self.sampling, self.environments = engine, sampling, environments
        self.longest_prompt = math.inf if engine.context is None else engine.context - sampling.max_tokens
        self.asked: dict[Place, tuple[tuple[int, ...], Sampling, int, asyncio.Future]] = {}
        self.working = set(places)  # episodes whose environment is working
        self.slow: set[Place] = set()  # working episodes that the engine does not wait for
        self.came = (0.0, 0.0)  # times of the first and the latest prompt in `asked`
        self.changed = threading.Condition()
        self.eager = getattr(engine, "eager", False)
        self.calls: list[Background] = []  # of an eager engine
        OPEN.add(self)

    def check(self, prompt: tuple[int, ...]) -> None:
        """Raise UserError for a prompt that leaves no room for an answer in the engine's context."""
        check_context(len(prompt), self.sampling.max_tokens, self.engine.context)

    def sampling_in(self, state: State, renderer: "Renderer") -> Sampling:
        """Return the sampling of the next message: the run's, with the limits of the state."""
        if not state.stop and state.max_tokens is None:
            return self.sampling
        stop = (
            StopTexts(state.stop, lambda ids: message_after(renderer, ids).content)
            if state.stop
            else self.sampling.stop
        )
        most = self.sampling.max_tokens
        return replace(self.sampling, max_tokens=min(state.max_tokens or most, most), stop=stop)

    async def sample(self, place: Place, prompt: tuple[int, ...], seed: int, sampling: Sampling) -> Completion:
        """Queue a prompt of the episode at `place`, and return its completion once the engine has sampled it."""
        if own := self.own_temperature(place):
            sampling = replace(sampling, temperature=own)
        future = asyncio.get_running_loop().create_future()
        with self.changed:
            now = time.monotonic()
            self.came = (self.came[0] if self.asked else now, now)
            self.asked[place] = (prompt, sampling, seed, future)
            self._rests(place)
        return await future

    def own_temperature(self, place: Place) -> float | None:
        """Return the temperature of an episode whose group has several; None if it has the sampling's, or is greedy."""
        several = self.sampling.temperatures if self.sampling.temperature else ()
        return several[place[1] % len(several)] if several else None

    def over(self, place: Place) -> None:
        """Note that the episode at `place` is over: the engine no longer waits for it."""
        with self.changed:
            self.asked.pop(place, None)  # it may still be there if the event loop failed
            self._rests(place)

    def _rests(self, place: Place) -> None:
        self.working.discard(place)
        self.slow.discard(place)
        if self.working <= self.slow:  # no episode to wait for
            self.changed.notify()

    def serve(self, episodes: threading.Thread) -> None:
        """Sample for the episodes until all are over. episodes: the thread of their event loop."""
        try:
            while self._wait(episodes):
                with self.changed:
                    places = sorted(self.asked)  # not in the order of arrival, which depends on threads
                    asked = [(place, *self.asked.pop(place)) for place in places]
                while asked:
                    alike = self._alike(asked[0][2])
                    these = partial(self._sample, [one for one in asked if self._alike(one[2]) == alike])
                    self.calls.append(Background(these, "engine")) if self.eager else these()
                    asked = [one for one in asked if self._alike(one[2]) != alike]
        finally:
            stop_all(self.calls)  # there are none, unless something failed
            OPEN.discard(self)

    def _alike(self, sampling: Sampling) -> Sampling:
        """Return what prompts of one call of the engine have in common."""
        return replace(sampling, temperature=1.0) if self.mixes and self.sampling.temperatures else sampling

    def _sample(self, asked: Sequence[tuple]) -> None:
        """Sample the prompts (place, prompt, sampling, seed, future) that have the same sampling, but for the temperature."""
        places, prompts, samplings, seeds, futures = zip(*asked, strict=True)
        waiting = dict(enumerate(zip(places, futures, strict=True)))
        give = partial(self._give, waiting)
        temperatures = [sampling.temperature for sampling in samplings]
        own = {"temperatures": temperatures} if len({*temperatures}) > 1 else {}
        sample: Callable[..., Sequence[CompletionLike]] = self.engine.sample
        completions = sample(prompts, samplings[0], seeds, give, **own)
        for i, completion in zip(range(len(places)), completions, strict=True):
            if i in waiting:  # the engine did not report it when it was finished
                give(i, completion)

    def _give(self, waiting: dict[int, tuple[Place, asyncio.Future]], i: int, completion: CompletionLike) -> None:
        place, future = waiting.pop(i)
        with self.changed:
            self.working.add(place)  # before its coroutine resumes, which may be at once
        learned = self.sampling.temperature > 0  # evaluations are greedy; the alarms find weights of NaN first there
        answer = received(self.engine, completion) if learned else completion_of(completion)
        if own := self.own_temperature(place):
            answer = replace(answer, temperature=own)
        with suppress(RuntimeError):  # the episodes have ended
            future.get_loop().call_soon_threadsafe(lambda: future.done() or future.set_result(answer))

    def _wait(self, episodes: threading.Thread) -> bool:
        """Wait until there are prompts to sample and no quick environment to wait for; False once all episodes are over."""
        with self.changed:
            while (self.asked or self.working or self.calls) and episodes.is_alive():
                if self.eager:
                    if failures := [call.failure for call in self.calls if call.failure]:
                        raise failures[0]
                    self.calls = [call for call in self.calls if not call.future.done()]
                    if self.asked and time.monotonic() - self.came[0] > TOGETHER:
                        return True
                    self.changed.wait(TOGETHER if self.asked else LOOK)
                    continue
                quick = self.working - self.slow
                if self.asked and not quick:
                    first, latest = self.came
                    # slow environments that answer shortly after each other share a batch
                    if not self.slow or time.monotonic() > min(first + PATIENCE, latest + LOOK):
                        return True
                came = self.changed.wait(LOOK)
                if self.asked and quick and not came:
                    self.slow |= self.environments.slow(quick & self.working, [episodes.native_id, *loop_threads()])
            return False


OPEN: "WeakSet[EngineQueue]" = WeakSet()


def where() -> str:
    """Return what the open episodes of this process wait for, for the message of a wait that was too long."""
    queues = list(OPEN)
    working = [place for queue in queues for place in [*queue.working]]
    asked = sum(len(queue.asked) for queue in queues) + sum(len(queue.calls) for queue in queues)
    first = f", the first is sample {working[0][1]} of prompt {working[0][0]}" if working else ""
    return f"{len(working)} episodes wait for an environment or a reward{first}; {asked} calls for the engine"
