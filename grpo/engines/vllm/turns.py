"""One vLLM for the threads of several calls: they take turns, and a step serves the requests of all of
them."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo.engines.vllm.errors import short_errors

# seconds after which a waiting thread looks again, and hears an exception that another thread has set in it
LOOK = 1.0

HandOver = Callable[[int, Any], None]  # index of a request, its finished RequestOutput


@dataclass(eq=False)
class Call:
    """The requests of one thread. Mutable. names: by index, those that vLLM works on; ended: those still to
    be handed over, with their output; error: the reason why vLLM dropped the others."""

    names: dict[int, str] = field(default_factory=dict)
    ended: deque[tuple[int, Any]] = field(default_factory=deque)
    error: Exception | None = None


# not AsyncLLM: its engine is in a process of its own, to which no tensor of the trainer can be passed
class Turns:
    """Threads use `llm`, a `vllm.LLM` in this process, one at a time, in the order in which they asked. A
    turn is new requests, one step, or new weights, so that none of these waits for more than one turn of
    every other thread. stream: of CUDA, for the turns of all threads; None: that of the thread."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.stream: torch.cuda.Stream | None = None
        self._queue: deque[object] = deque()  # the first one has its turn
        self._changed = threading.Condition()
        self._owners: dict[str, tuple[Call, int]] = {}  # by vLLM's external name of a request

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._owners)

    @contextmanager
    def turn(self, needed: Callable[[], bool] = lambda: True) -> Iterator[bool]:
        """Wait for a turn, or until it is no longer needed. Yields whether this thread has its turn."""
        mine = object()
        try:
            with self._changed:
                self._queue.append(mine)
                while needed() and self._queue[0] is not mine:
                    self._changed.wait(LOOK)
                came = needed()
            with torch.cuda.stream(self.stream) if self.stream else nullcontext():
                yield came
        finally:
            with self._changed:
                if mine in self._queue:
                    self._queue.remove(mine)
                self._changed.notify_all()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """A turn in which vLLM computes nothing, for new weights, which the stream of the thread that asks may
        still compute. An error in it ends all calls, which it may have spoiled."""
        asking = torch.cuda.current_stream() if self.stream else None
        with self.turn():
            try:
                self._drain()
                if asking:
                    self.stream.wait_stream(asking)
                yield
            except BaseException as error:
                self._fail(error)
                raise

    def run(self, enqueue: Callable[[], list[str]], unwanted: set[int], hand_over: HandOver) -> None:
        """Let vLLM work on the requests that `enqueue` adds, whose names it returns, until all have ended.

        hand_over: called in this thread as each one ends. unwanted: indices of requests that end now, without
        an output; it may grow meanwhile. An error of this thread drops its own requests. One in a step drops
        those of all threads, and is raised in each of them.
        """
        call = Call()
        try:
            with self.turn(), _isolated(), short_errors():
                call.names = dict(enumerate(enqueue()))
                self._owners |= {name.partition("-")[0]: (call, i) for i, name in call.names.items()}
            while call.names or call.ended:
                with self.turn(lambda: bool(call.names) and not call.ended) as mine:
                    if mine:
                        self._drop(call, unwanted & call.names.keys())
                        if call.names:
                            self._step()
                while call.ended:
                    hand_over(*call.ended.popleft())
            if call.error:
                raise call.error
        finally:
            if call.names:
                with self.turn():
                    self._drop(call, {*call.names})

    def _step(self) -> None:
        """Let vLLM draw the next token of each running request."""
        try:
            with _isolated(), short_errors():
                outputs = self.llm.llm_engine.step()
            for output in outputs:
                if output.finished and output.request_id in self._owners:
                    call, i = self._owners.pop(output.request_id)
                    call.ended.append((i, output))  # first, since its thread ends without either
                    del call.names[i]
        except BaseException as error:
            self._fail(error)
            raise

    def _drop(self, call: Call, indices: set[int]) -> None:
        """Abort requests of a call, by index."""
        if names := [call.names.pop(i) for i in indices]:
            self.llm.llm_engine.abort_request(names, internal=True)
            for name in names:  # without the suffix that vLLM adds
                del self._owners[name.partition("-")[0]]

    def _fail(self, error: BaseException) -> None:
        """Drop the requests of all calls, and let each of them raise the error."""
        why = error if isinstance(error, Exception) else RuntimeError(f"a thread ended in a step of vLLM: {error!r}")
        for call in {call for call, _ in self._owners.values()}:
            call.error = why
            self._drop(call, {*call.names})

    def _drain(self) -> None:
        """Finish the steps that vLLM has launched ahead, as it does with `async_scheduling`, its default on a
        GPU: it labels tokens with the weights of the moment at which it reads them."""
        core = self.llm.llm_engine.engine_core.engine_core
        if not core.batch_queue:
            return
        from vllm.v1.core.sched.interface import PauseState

        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                self._step()
        finally:
            core.scheduler.set_pause_state(PauseState.UNPAUSED)


def _isolated() -> Any:
    """Leave torch's generators alone: vLLM draws from them on a CPU, and with a draft, even for requests with
    a seed."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else [])
