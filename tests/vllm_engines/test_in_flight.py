"""Weights that arrive while vLLM in this process samples for several threads: who drew each token, and from which cache."""

import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from helpers.in_flight import at, segments
from helpers.models import CONTEXT, PROMPTS, disturb, gap, model_folder
from transformers import AutoModelForCausalLM

from grpo.engines.protocol import Sampling
from grpo.engines.vllm.engine import VLLMEngine, import_vllm

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

ARGS = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": CONTEXT}
LONG = Sampling(60, vllm={"ignore_eos": True})
SEEDS = [1, 2, 3]
BOUND = 1e-4


@pytest.fixture(scope="module", params=[False, True], ids=["a step at a time", "a step ahead"])
def llama(request, tmp_path_factory):
    """An engine, its folder, and whether vLLM launches a step ahead, as on a GPU; its CPU build can, but switches that off."""
    torch.set_num_threads(1)
    import_vllm()
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def ahead(config) -> None:
        check(config)
        config.scheduler_config.async_scheduling = request.param

    folder = model_folder("llama", tmp_path_factory.mktemp("llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(ahead))
        engine = VLLMEngine(folder, args=ARGS)
    assert (engine._llm.llm_engine.engine_core.engine_core.batch_queue is not None) == request.param
    yield engine, folder, request.param
    engine.close()


@pytest.fixture
def engine(llama):
    """The engine with version 0 of the weights. They change by steps of the engine, not by the clock: `at` counts them."""
    engine, folder, _ = llama
    engine.version, engine.recompute = None, True
    engine.load_weights(AutoModelForCausalLM.from_pretrained(folder), 0)
    return engine


@pytest.fixture
def model(llama):
    return AutoModelForCausalLM.from_pretrained(llama[1])


def test_threads_share_steps_and_get_what_each_gets_alone(engine):
    calls = [(PROMPTS, Sampling(20), [1, 2, 3]), (PROMPTS[:2] * 4, Sampling(30), range(8)), (PROMPTS, LONG, SEEDS)]
    alone = [engine.sample(*call) for call in calls]
    heard: list[list[int]] = [[], [], []]
    inside = threading.current_thread()

    def play(i: int):
        def done(k, completion):
            assert threading.current_thread() is not inside and completion == alone[i][k]
            heard[i].append(k)

        return engine.sample(*calls[i], done)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(play, range(3))) == alone
    assert [sorted(one) for one in heard] == [[0, 1, 2], [*range(8)], [0, 1, 2]]
    assert {v for found in alone for done in found for v in done.versions} == {0}


@pytest.mark.parametrize("recompute", [True, False])
def test_a_completion_over_three_versions_names_the_weights_of_every_token(
    llama, engine, model, monkeypatch, recompute
):
    engine.recompute = recompute
    engine.version = None  # again, with the salt of this version
    engine.load_weights(model, 0)
    models = [deepcopy(model) for _ in range(3)]
    for version in (1, 2):
        disturb(models[version], seed=version, size=0.02 * version)
    at(engine, monkeypatch, {n: lambda v=v: engine.load_weights(models[v], v) for n, v in [(19, 1), (39, 2)]})
    for prompt, done in zip(PROMPTS, engine.sample(PROMPTS, LONG, SEEDS), strict=True):
        # the step that is launched ahead belongs to the weights before
        assert done.versions == (0,) * 20 + (1,) * (19 if llama[2] else 20) + (2,) * (21 if llama[2] else 20)
        for version, before, part in segments(prompt, done):
            own = gap(models[version], [before], [part])
            assert min(gap(other, [before], [part]) for other in models if other is not models[version]) > 0.05
            assert own < BOUND if recompute or version == 0 else own > BOUND  # it reads a cache of older weights


def test_new_completions_read_no_cache_of_older_weights(engine, model, monkeypatch):
    """Their prompts begin with cached ones, which a completion under way still uses."""
    engine.recompute, engine.version = False, None
    engine.load_weights(model, 0)
    prompt = [60 + i % 30 for i in range(200)]
    new, found = deepcopy(model), []
    disturb(new, seed=1)

    def load() -> None:
        engine.load_weights(new, 1)
        found.extend(engine.sample([prompt, prompt], Sampling(8, vllm={"ignore_eos": True}), [5, 6]))

    at(engine, monkeypatch, {9: load})
    [old] = engine.sample([prompt], LONG, [1])
    assert {*old.versions} == {0, 1} and len(old.ids) == 60 and len(found) == 2
    assert {v for done in found for v in done.versions} == {1}
    assert (
        gap(new, [prompt] * 2, found)
        < BOUND
        < gap(new, *zip(*[s[1:] for s in [*segments(prompt, old)][1:]], strict=True))
    )
    # the next turn of the completion that kept its cache begins with its tokens
    after = [*prompt, *old.ids]
    assert gap(new, [after], engine.sample([after], Sampling(8), [7])) < BOUND


def test_an_error_in_one_thread_drops_its_requests_alone(engine, monkeypatch):
    alone = engine.sample(PROMPTS, LONG, SEEDS)

    def fail(*_) -> None:
        raise ValueError("a renderer failed")

    def failing() -> None:
        with pytest.raises(ValueError, match="a renderer failed"):
            engine.sample(PROMPTS[:2] * 2, Sampling(5, vllm={"ignore_eos": True}), range(4), fail)

    at(engine, monkeypatch, {9: failing})
    assert engine.sample(PROMPTS, LONG, SEEDS) == alone
    assert not engine._turns.busy and not engine._llm.llm_engine.has_unfinished_requests()


def test_an_error_of_a_step_reaches_every_thread(engine, model, monkeypatch):
    step, steps = engine._llm.llm_engine.step, iter(range(100))

    def broken():
        if next(steps) == 30:
            raise RuntimeError("the device is lost")
        return step()

    def play(seed: int) -> None:
        with pytest.raises(RuntimeError, match="the device is lost"):
            engine.sample(PROMPTS, LONG, [seed] * 3)

    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(engine._llm.llm_engine, "step", broken)
        list(pool.map(play, range(3)))
    assert gap(model, PROMPTS, engine.sample(PROMPTS, LONG, SEEDS)) < BOUND
