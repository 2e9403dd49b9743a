"""Weights that arrive at a real vLLM server while three threads sample from it, and what its completions keep of older ones."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import psutil
import pytest
import torch
from helpers.in_flight import segments
from helpers.models import CONTEXT, PROMPTS, disturb, gap, model_folder
from transformers import AutoModelForCausalLM

from grpo.engines.protocol import Sampling
from grpo.extras.vllm_server.engine import VLLMServerEngine

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

BOUND = 1e-4
ARGS = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": CONTEXT}
LONG = Sampling(240, vllm={"ignore_eos": True})


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("llama")
    path = model_folder("llama", folder)
    more = {"launch": True, "args": ARGS, "logs": str(folder), "timeout": 20}
    engine = VLLMServerEngine(path, folder=str(folder / "weights"), **more)
    yield engine, AutoModelForCausalLM.from_pretrained(path)
    engine.close()


@pytest.mark.parametrize("recompute", [True, False])
def test_completions_of_three_threads_go_on_with_new_weights(served, recompute):
    engine, model = served
    [server] = engine._fleet.servers
    server.recompute = recompute
    first = (engine.version or 0) + 1
    models = {first: deepcopy(model)}
    engine.load_weights(model, first)
    prompt = [60 + i % 30 for i in range(200)]
    begun = threading.Event()

    def play(i: int):
        engine.sample(PROMPTS, Sampling(2), range(3))
        begun.set()
        return engine.sample(PROMPTS, LONG, [10 * i, 10 * i + 1, 10 * i + 2])

    with ThreadPoolExecutor(4) as pool:
        cached = pool.submit(engine.sample, [prompt], LONG, [1])
        threads = [pool.submit(play, i) for i in range(3)]
        assert begun.wait(60)
        for version in (first + 1, first + 2):
            time.sleep(0.3)
            models[version] = deepcopy(model)
            disturb(models[version], seed=version, size=0.03)
            engine.load_weights(models[version], version)
        late = engine.sample([prompt] * 2, Sampling(8), [5, 6])
        pairs = [pair for thread in threads for pair in zip(PROMPTS, thread.result(), strict=True)]
        pairs.append((prompt, cached.result()[0]))

    newest = models[first + 2]
    assert {v for done in late for v in done.versions} == {first + 2} and gap(newest, [prompt] * 2, late) < BOUND
    spanned = [(p, done) for p, done in pairs if len({*done.versions}) > 1]
    assert spanned and all(len(done.ids) == 240 for _, done in pairs)
    for before, done in pairs:
        for n, (version, text, part) in enumerate(segments(before, done)):
            own = gap(models[version], [text], [part])
            if recompute or n == 0:
                assert own < BOUND
            elif len(part.ids) > 3:  # it reads the cache of older weights
                assert own > BOUND


def test_a_server_that_hangs_in_flight_is_named_and_found_again(served, caplog):
    """All of its processes are stopped while two threads sample and new weights are sent; their requests are asked again."""
    engine, model = served
    [server] = engine._fleet.servers
    server.timeout = 3
    version = engine.version + 1
    disturb(new := deepcopy(model), seed=9)
    family = psutil.Process(engine._launched._guards[engine._launched.ports[0]].pid).children(recursive=True)

    def stop(*_) -> None:
        for process in family:
            process.send_signal(signal.SIGSTOP)

    threading.Timer(8, lambda: [process.send_signal(signal.SIGCONT) for process in family]).start()
    with ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(engine.sample, PROMPTS * 2, LONG, range(6)) for _ in range(2)]
        time.sleep(0.3)
        stop()
        load = pool.submit(engine.load_weights, new, version)
        assert all(len(done.ids) == 240 for thread in threads for done in thread.result(60))
        load.result(60)
    assert engine.version == version and f"{server.url}/" in caplog.text and "ReadTimeout" in caplog.text
    assert gap(new, PROMPTS, engine.sample(PROMPTS, Sampling(16), [1, 2, 3])) < BOUND
