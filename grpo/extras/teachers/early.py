"""A served teacher that is asked as each completion ends, while others are still being sampled (teacher.early).

A request that fails is made again with the rollout. Shapes: n tokens of a completion, k entries of each.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from functools import wraps
from typing import Any

import numpy as np

from grpo.engines.protocol import Engine, Prompts, Sampling
from grpo.env.tokens import CompletionLike
from grpo.rollout.episodes import Play
from grpo.system import distributed
from grpo.system.threads import GRACE

Key = tuple[int, ...]  # the tokens up to the end of a completion
Entries = tuple[np.ndarray, np.ndarray]  # ids [n, k] int64, and their log-probabilities [n, k] float32


class Beforehand:
    """The answers of a teacher about completions that nobody has learned from yet. Mutable; an event loop in its own thread asks.

    ask: from the tokens up to the end of a completion, and n, to the entries of its n tokens; None if that failed.
    """

    def __init__(self, ask: Callable[[Key, int], Coroutine[Any, Any, Entries | None]]) -> None:
        self.ask, self.rollout = ask, 0  # rollouts that were claimed
        self.asked: dict[Key, tuple[int, Future[Entries | None]]] = {}  # with the value of `rollout` at that time
        self.loop: asyncio.AbstractEventLoop | None = None

    def around(self, play: Play) -> Play:
        """Return a `play` that tells this object of each completion."""
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.answer, name="teacher", daemon=True)
        self.thread.start()

        @wraps(play)
        def playing(task, examples, group_size, engine, *settings, **named):
            return play(task, examples, group_size, Heard(engine, self.hear), *settings, **named)

        return playing

    def answer(self) -> None:
        """Run the loop until it is stopped, and give up what is still asked then."""
        loop = self.loop
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.get_loop().run_forever()

    def close(self) -> None:
        """End the thread: the run is over."""
        if loop := self.loop:
            self.loop, self.asked = None, {}  # a thread of rollouts ahead may still report
            loop.call_soon_threadsafe(loop.stop)
            self.thread.join(GRACE)

    def hear(self, prompt: Sequence[int], ids: Sequence[int]) -> None:
        """Ask for a completion, unless the same one was asked for already."""
        key, loop = (*prompt, *ids), self.loop
        if loop and len(ids) and key not in self.asked:
            self.asked[key] = self.rollout, asyncio.run_coroutine_threadsafe(self.ask(key, len(ids)), loop)

    def claim(self, keys: Iterable[Key], stale: int) -> dict[Key, Entries]:
        """Return the answers for a rollout's completions, of whichever rank heard of them. stale: rollouts for which a completion
        may wait; what has waited longer is dropped."""
        mine = [(key, self.asked.pop(key)[1].result()) for key in dict.fromkeys(keys) if key in self.asked]
        self.rollout += 1
        for key, (rollout, future) in [*self.asked.items()]:
            if rollout + stale < self.rollout:
                future.cancel()
                self.asked.pop(key, None)
        return {key: found for key, found in distributed.all_gather(mine) if found is not None}


class Heard:
    """An engine that reports each sampled completion, its prompt and its ids, as soon as it is finished."""

    def __init__(self, engine: Engine, hear: Callable[[Sequence[int], Sequence[int]], None]) -> None:
        self.engine = engine

        @wraps(engine.sample)
        def sample(prompts: Prompts, sampling: Sampling, seeds, done=None, **named: Any):
            heard = set()

            def noted(i: int, completion: CompletionLike) -> None:
                heard.add(i)
                if sampling.temperature:  # nobody learns from a greedy answer
                    hear(prompts[i], completion.ids)

            def finished(i: int, completion: CompletionLike) -> None:
                noted(i, completion)  # early
                if done is not None:
                    done(i, completion)

            completions = engine.sample(prompts, sampling, seeds, finished, **named)
            for i, completion in enumerate(completions):
                if i not in heard:  # the engine did not report it when it was finished
                    noted(i, completion)
            return completions

        self.sample = sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value) if name in ("engine", "sample") else setattr(self.engine, name, value)
