"""An engine as rollouts ahead of the update see it: it counts the seconds in which no completion was wanted from it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from grpo.engines.protocol import Engine


class IdleClock:
    """Adds up the seconds with no open call of `sample`, and those in which samples waited for weights. Mutable."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open, self.since = 0, time.perf_counter()
        self.idle = self.weights = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Note an open call during a `with` block."""
        with self.lock:
            self.idle += 0.0 if self.open else time.perf_counter() - self.since
            self.open += 1
        try:
            yield
        finally:
            with self.lock:
                self.open, self.since = self.open - 1, time.perf_counter()

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Note that samples wait for weights during a `with` block."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.weights += time.perf_counter() - begun

    def read(self) -> dict[str, float]:
        """Return the seconds since the last reading."""
        with self.lock:
            now = time.perf_counter()
            idle = self.idle + (0.0 if self.open else now - self.since)
            read = {"time/engine_idle": idle, "time/weights": self.weights}
            self.idle, self.weights, self.since = 0.0, 0.0, now
        return read


class Clocked:
    """The engine with a clock. eager: prompts go to it at once, from several threads, see `EngineQueue`."""

    def __init__(self, engine: Engine, clock: IdleClock, eager: bool) -> None:
        self.engine, self.eager = engine, eager

        @wraps(engine.sample)
        def sample(*args: Any, **named: Any) -> Any:
            with clock.busy():
                return engine.sample(*args, **named)

        self.sample = sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in ("engine", "eager", "sample")
        super().__setattr__(name, value) if own else setattr(self.engine, name, value)
