"""Several threads that sample from the same servers, which hang and come back. The servers have no vLLM."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from helpers.foreign_server import Foreign

from grpo.engines.protocol import Sampling
from grpo.extras.vllm_server import pool
from grpo.extras.vllm_server.engine import VLLMServerEngine
from grpo.system.errors import UserError

PROMPTS = [[5]] * 12


class Slow(Foreign):
    """Takes 20 ms for a completion, and counts those at a time. stops: the route in which its process stops itself, once.
    Completions wait for the event `full`, which is set when 3 are there at a time, for a minute at most."""

    def __init__(self, stops: str | None = None, **routes) -> None:
        super().__init__(**routes)
        self.open = self.most = 0
        self.full = threading.Event()
        self.full.set()
        self.lock = threading.Lock()
        self.served = self.routes["/inference/v1/generate"]
        self.routes["/inference/v1/generate"] = self.slowly
        if stops:
            self.routes[stops] = partial(self.stop, stops, self.routes[stops])

    def slowly(self, body):
        with self.lock:
            self.open += 1
            self.most = max(self.most, self.open)
        if self.most >= 3:
            self.full.set()
        self.full.wait(60)
        time.sleep(0.02)
        with self.lock:
            self.open -= 1
        return self.served(body)

    def stop(self, route, usual, body):
        self.routes[route] = usual
        os.kill(os.getpid(), signal.SIGSTOP)
        return usual(body) if callable(usual) else usual


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pool, "PAUSE", 0.1)


@pytest.fixture
def stopping():
    """route -> (url, process) of a server in a process of its own, which stops in the middle of its first answer there."""
    processes = []

    def make(route: str | None):
        def serve(pipe) -> None:
            with Slow(route) as server:
                pipe.send(server.url)
                signal.pause()

        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=serve, args=[there], daemon=True)
        process.start()
        processes.append(process)
        return here.recv(), process

    yield make
    for process in processes:
        process.kill()
        process.join()


def sampled(engine, threads: int, prompts=PROMPTS):
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda _: engine.sample(prompts, Sampling(1), range(len(prompts))), range(threads)))


def wait_for(condition, seconds: float = 10) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def test_the_limit_of_requests_holds_for_all_threads(toy, toy_model, tmp_path):
    with Slow() as one, Slow() as two:
        engine = VLLMServerEngine(str(toy), [one.url, two.url], folder=str(tmp_path / "weights"), concurrency=3)
        engine.load_weights(toy_model, 4)
        one.full.clear()  # the requests before were alone
        two.full.clear()
        for found in sampled(engine, threads=4):
            assert [done.versions for done in found] == [(4,)] * 12
        assert (one.most, two.most) == (3, 3)
        engine.close()


@pytest.mark.slow
def test_a_server_that_hangs_in_a_completion_holds_nobody_up_and_is_found_again(toy, toy_model, tmp_path, stopping):
    url, process = stopping(None)
    with Slow() as whole:
        folder = str(tmp_path / "weights")
        engine = VLLMServerEngine(str(toy), [url, whole.url], folder=folder, concurrency=2, timeout=1)
        engine.load_weights(toy_model, 0)
        os.kill(process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        assert [[done.ids for done in found] for found in sampled(engine, threads=3)] == [[(0,)] * 12] * 3
        assert time.monotonic() - begun < 60
        hung, other = engine._fleet.servers
        assert (hung.ready, other.ready) == (False, True)
        assert str(hung.fault).startswith(f"{url}/") and "ReadTimeout" in str(hung.fault)
        begun = time.monotonic()
        engine.load_weights(toy_model, 1)
        assert time.monotonic() - begun < 60 and engine.version == 1
        os.kill(process.pid, signal.SIGCONT)
        wait_for(lambda: sampled(engine, threads=3) and hung.ready)
        assert {done.versions for found in sampled(engine, threads=3) for done in found} == {(1,)}
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("route", ["/update_weights", "/resume"])
def test_a_server_that_hangs_in_an_update_holds_nobody_up_and_is_found_again(toy, toy_model, tmp_path, stopping, route):
    url, process = stopping(route)
    with Slow() as whole:
        folder = str(tmp_path / "weights")
        engine = VLLMServerEngine(str(toy), [whole.url, url], folder=folder, concurrency=2, timeout=0.5)
        begun = time.monotonic()
        engine.load_weights(toy_model, 0)
        assert time.monotonic() - begun < 60
        other, hung = engine._fleet.servers
        assert (hung.ready, other.ready) == (False, True) and str(hung.fault).startswith(f"{url}/")
        os.kill(process.pid, signal.SIGCONT)
        wait_for(lambda: sampled(engine, threads=2) and hung.ready)
        engine.close()


@pytest.mark.slow
def test_the_last_server_that_hangs_is_named_in_every_thread(toy, toy_model, tmp_path, stopping):
    url, process = stopping(None)
    engine = VLLMServerEngine(str(toy), [url], folder=str(tmp_path / "weights"), timeout=0.3, wait=1, concurrency=1)
    engine.load_weights(toy_model, 0)
    os.kill(process.pid, signal.SIGSTOP)

    def play(_) -> None:
        with pytest.raises(UserError, match=rf"no vLLM server for engine\.wait=1 s \({url}/health: ReadTimeout"):
            engine.sample(PROMPTS, Sampling(1), range(12))

    begun = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(play, range(3)))
    assert time.monotonic() - begun < 60
    engine.close()
