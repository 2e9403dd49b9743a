"""Rollouts beside the update on one GPU: every write and every read of two streams has an event between them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from grpo.engines.protocol import Sampling
from grpo.engines.vllm.engine import VLLMEngine
from grpo.engines.vllm.turns import Turns
from grpo.extras.ahead import chain as chains
from grpo.extras.ahead.chain import Chain
from grpo.extras.ahead.streams import Playing
from grpo.rollout.rollouts import Rollout
from grpo.rollout.types import Plan
from grpo.system.stopping.stop import Stop
from grpo.system.threads import Background


@dataclass(frozen=True)
class Access:
    """Work on a stream that reads or writes a place. number: of the stream's work; after: by stream, the work that has ended."""

    place: Any
    writes: bool
    stream: "Stream"
    number: int
    after: dict["Stream", int]
    thread: str

    def races(self, later: "Access") -> bool:
        return (
            self.place is later.place
            and (self.writes or later.writes)
            and self.stream is not later.stream
            and later.after.get(self.stream, 0) < self.number
        )


class Stream:
    """A queue of work. Mutable. after: by stream, the work for which what is queued next waits."""

    gpu: "Gpu"

    def __init__(self, priority: int = 0) -> None:
        self.number, self.after = 0, {}

    def record_event(self) -> dict["Stream", int]:
        return self.after | {self: self.number}

    def wait_event(self, event: dict["Stream", int]) -> None:
        self.after = merged(self.after, event)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.gpu.ended = merged(self.gpu.ended, self.record_event())


def merged(one: dict, other: dict) -> dict:
    return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in one | other}


class Gpu:
    """The queues of a machine without a GPU. ended: the work for which the host has waited."""

    def __init__(self) -> None:
        self.default, self.mine, self.lock = Stream(), threading.local(), threading.Lock()
        self.ended: dict[Stream, int] = {}
        self.done: list[Access] = []
        Stream.gpu = self

    def current_stream(self) -> Stream:
        return getattr(self.mine, "stream", self.default)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.mine.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self.mine.stream = before

    def use(self, place: Any, writes: bool = False) -> None:
        with self.lock:
            stream = self.current_stream()
            stream.number += 1
            after = merged(self.ended, stream.after)
            self.done.append(Access(place, writes, stream, stream.number, after, threading.current_thread().name))

    def races(self) -> list[tuple[Access, Access]]:
        return [(one, later) for one, later in combinations(self.done, 2) if one.races(later)]


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    named = {"is_initialized": lambda: True, "current_device": lambda: 0, "set_device": lambda device: None}
    streams = {"Stream": Stream, "stream": gpu.on, "current_stream": gpu.current_stream}
    for name, value in (named | streams).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("grpo.engines.vllm.turns._isolated", nullcontext)
    own = chains.copy_of

    def copy_of(policy: nn.Module, weights: Any = None) -> nn.Module:
        copy = own(policy, weights)
        gpu.use(policy)
        gpu.use(copy, writes=True)
        return copy

    monkeypatch.setattr(chains, "copy_of", copy_of)
    return gpu


class LLM:
    """vLLM's part: each request takes two steps, and a step reads the weights and the tokens of the step before."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.model, self.weights, self.tokens = gpu, None, object(), object()
        self.llm_engine, self.names, self.left = self, count(), {}
        self.model_config = SimpleNamespace(head_dtype=None)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=None))

    def enqueue(self, inputs, params, **_) -> list[str]:
        names = [str(next(self.names)) for _ in inputs]
        self.left |= dict.fromkeys(names, 2)
        return [f"{name}-of-vllm" for name in names]

    def step(self) -> list[Any]:
        self.gpu.use(self.weights)
        self.gpu.use(self.tokens)
        self.gpu.use(self.tokens, writes=True)
        self.left = {name: left - 1 for name, left in self.left.items()}
        ended = [name for name, left in self.left.items() if not left]
        self.left = {name: left for name, left in self.left.items() if left}
        return [SimpleNamespace(finished=True, request_id=name) for name in ended]

    def update_weights(self, request: Any) -> None:
        self.gpu.use(self.model)
        self.gpu.use(self.weights, writes=True)

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self) -> None: ...

    def update_weight_version(self, version: str) -> None: ...

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return True


class Engine(VLLMEngine):
    """The real one around a vLLM that only says what it reads and writes."""

    def __init__(self, gpu: Gpu) -> None:
        self.version, self.sleeps, self._asleep, self.recompute, self.dtype = None, False, False, True, None
        self._lora_request, self.unwanted = None, set()
        self._llm = LLM(gpu)
        self._turns = Turns(self._llm)

    def _take(self, model: nn.Module) -> None:
        self._llm.model = model
        self._copy(model.named_parameters())

    def sample(self, prompts, *_) -> list:
        self._turns.run(partial(self._enqueue, prompts, None), self.unwanted, lambda i, output: None)
        return []


@dataclass
class Played:
    """As `Rollouts`: a rollout is one call of the engine."""

    plan: Plan
    engine: Engine
    objects: dict = field(default_factory=dict)
    recipe: str = ""
    play: Any = len

    def make(self, r: int) -> Rollout:
        self.engine.sample([[1], [2]])
        return Rollout([], None, [], None, 1, self.engine.version, 0.0)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("order", ["exact", "ready"])
def test_nothing_is_read_before_it_is_written(gpu, ahead, order):
    """Six rollouts, an evaluation before and one between them. With exact and ahead=2 rollouts 3 to 5 have the copies of versions
    1 to 3, with ahead=1 the trainer's thread gives the weights; with ready completions under way take them up."""
    engine, policy = Engine(gpu), nn.Linear(1, 1)
    plan = Plan(2, 4, 6, Sampling(4), ahead=ahead, order=order)
    engine.load_weights(policy, 0)
    engine.sample([[1]])
    chain, learned, versions = Chain(Played(plan, engine), Stop()), 0, []

    def sync() -> None:
        if engine.version != learned:
            engine.load_weights(policy, learned)

    chain.begin(policy)
    for r in range(6):
        versions.append(chain.make(r, sync).version)
        gpu.use(policy, writes=True)
        learned = r + 1
        chain.learned(learned, policy, sync)
        if r == 2:
            chain.settle()
            engine.sample([[1]])
    assert not gpu.races()
    if order == "exact":
        assert versions == [max(0, r - ahead) for r in range(6)]
    begun = next(i for i, one in enumerate(gpu.done) if one.stream is chain.playing.stream)
    by_vllm = [one for one in gpu.done[begun:] if one.place in (engine._llm.weights, engine._llm.tokens)]
    assert {one.stream for one in by_vllm} == {chain.playing.stream} and len({one.thread for one in by_vllm}) >= 2
    assert {one.stream for one in gpu.done if one.place is policy and one.writes} == {gpu.default}


def test_threads_that_alternate_have_one_stream(gpu):
    """Each of a pool's threads asks for steps in turn; none was given the engine's stream by itself."""
    engine = Engine(gpu)
    engine.load_weights(nn.Linear(1, 1), 0)
    Playing(engine).begin()
    threads = [Background(partial(engine.sample, [[1]] * 3)) for _ in range(3)]
    for thread in threads:
        thread.future.result(60)
    engine.sample([[1]])
    assert not gpu.races()
    assert len({one.stream for one in gpu.done if one.place is engine._llm.tokens}) == 1


def test_without_a_gpu_an_engine_is_left_alone():
    playing = Playing(SimpleNamespace(play_on=pytest.fail))
    playing.begin()
    done = []
    playing.run(partial(done.append, 1))
    copy = nn.Linear(1, 1)
    assert playing.noted(copy) is copy and playing.stream is playing.copied is None and done == [1]
    playing.follow()
