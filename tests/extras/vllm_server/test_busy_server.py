"""Weights that arrive at a real vLLM server while three threads sample from it, and what its completions keep of older ones.

They run before the tests of test_server.py, which leave the servers with half of another model.
"""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import psutil
import pytest
from helpers.in_flight import segments
from helpers.models import PROMPTS, disturb, gap
from transformers import AutoModelForCausalLM

from grpo.engines.protocol import Sampling
from grpo.extras.vllm_server.engine import VLLMServerEngine

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

BOUND = 1e-4
LONG = Sampling(240, vllm={"ignore_eos": True})


@pytest.fixture
def served(pair, tmp_path):
    """An engine of one of the servers, and their model."""
    engine = VLLMServerEngine(pair.path, pair.urls[:1], folder=str(tmp_path / "weights"), timeout=20)
    yield engine, AutoModelForCausalLM.from_pretrained(pair.path)
    engine.close()


@pytest.mark.parametrize("recompute", [True, False])
def test_completions_of_three_threads_go_on_with_new_weights(served, recompute):
    engine, model = served
    [server] = engine._fleet.servers
    server.recompute = recompute
    prompt = [60 + i % 30 for i in range(200)]
    models, spanned = {}, []

    def load() -> None:
        models[version := len(models) + 1] = deepcopy(model)
        disturb(models[version], seed=version, size=0.03)
        engine.load_weights(models[version], version)

    def play(i: int):
        engine.sample(PROMPTS, Sampling(2), range(3))
        begun.set()
        return engine.sample(PROMPTS, LONG, [10 * i, 10 * i + 1, 10 * i + 2])

    while not spanned and len(models) < 15:  # on a busy machine the weights may arrive early or late: then once more
        load()
        begun = threading.Event()
        with ThreadPoolExecutor(4) as pool:
            cached = pool.submit(engine.sample, [prompt], LONG, [1])
            threads = [pool.submit(play, i) for i in range(3)]
            assert begun.wait(300)
            for _ in range(2):
                time.sleep(0.3)
                load()
            late = engine.sample([prompt] * 2, Sampling(8), [5, 6])
            pairs = [pair for thread in threads for pair in zip(PROMPTS, thread.result(), strict=True)]
            pairs.append((prompt, cached.result()[0]))
        spanned = [(p, done) for p, done in pairs if len({*done.versions}) > 1]

    newest = models[len(models)]
    assert {v for done in late for v in done.versions} == {len(models)} and gap(newest, [prompt] * 2, late) < BOUND
    assert spanned and all(len(done.ids) == 240 for _, done in pairs)
    for before, done in pairs:
        for n, (version, text, part) in enumerate(segments(before, done)):
            own = gap(models[version], [text], [part])
            if recompute or n == 0:
                assert own < BOUND
            elif len(part.ids) > 3:  # it reads the cache of older weights
                assert own > BOUND


def test_a_server_that_hangs_in_flight_is_named_and_found_again(served, pair, caplog):
    """All of its processes are stopped while two threads sample and new weights are sent; their requests are asked again."""
    engine, model = served
    [server] = engine._fleet.servers
    server.timeout = 3
    engine.load_weights(model, 1)
    disturb(new := deepcopy(model), seed=9)
    family = psutil.Process(pair._guards[pair.ports[0]].pid).children(recursive=True)

    def stop(*_) -> None:
        for process in family:
            process.send_signal(signal.SIGSTOP)

    threading.Timer(8, lambda: [process.send_signal(signal.SIGCONT) for process in family]).start()
    with ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(engine.sample, PROMPTS * 2, LONG, range(6)) for _ in range(2)]
        time.sleep(0.3)
        stop()
        load = pool.submit(engine.load_weights, new, 2)
        assert all(len(done.ids) == 240 for thread in threads for done in thread.result(60))
        load.result(60)
    assert engine.version == 2 and f"{server.url}/" in caplog.text and "ReadTimeout" in caplog.text
    assert gap(new, PROMPTS, engine.sample(PROMPTS, Sampling(16), [1, 2, 3])) < BOUND
