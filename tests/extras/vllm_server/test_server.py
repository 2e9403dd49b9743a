"""Real vLLM servers over HTTP: after every change of the weights they sample from the trainer's, and nothing is lost when one
dies."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from copy import deepcopy
from functools import partial
from pathlib import Path

import httpx2
import peft
import psutil
import pytest
import torch
from conftest import ROOT, TEST_PATH
from helpers.models import CONTEXT, PROMPTS, disturb, gap, gap_now, next_logits, steps
from helpers.runs import rows
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.engines.protocol import Sampling
from grpo.engines.stop_texts import StopTexts
from grpo.env.tokens import Completion
from grpo.extras.vllm_server import sync
from grpo.extras.vllm_server.engine import VLLMServerEngine
from grpo.extras.vllm_server.http import RemoteServer
from grpo.extras.vllm_server.launch import free_ports
from grpo.system.errors import UserError

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

BOUND = 1e-5  # largest allowed gap in float32
ARGS = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": CONTEXT}


def answers(url: str, route: str = "/health") -> bool:
    try:
        return httpx2.get(url + route, timeout=5, trust_env=False).is_success
    except httpx2.HTTPError:
        return False


def wait_for(condition, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


@pytest.fixture
def folder(served_model) -> str:
    return served_model


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def engine(folder, pair, model, tmp_path):
    engine = VLLMServerEngine(folder, pair.urls, folder=str(tmp_path / "weights"), concurrency=8, wait=20)
    engine.load_weights(model, 0)
    yield engine
    engine.close()
    assert not (tmp_path / "weights").exists()


def test_files_bring_the_trainers_weights_after_every_step(engine, model):
    assert engine.context == CONTEXT and gap_now(engine, model) < BOUND
    for version, _ in enumerate(steps(model), start=1):
        assert gap_now(engine, model) > 1e-2  # the servers still have the old weights
        engine.load_weights(model, version)
        assert engine.version == version
        prompts = PROMPTS * 6  # more than one server's concurrency, so both get a share
        completions = engine.sample(prompts, Sampling(16), seeds=range(18))
        assert gap(model, prompts, completions) < BOUND
        assert {v for completion in completions for v in completion.versions} == {version}


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"min_p": 0.2}, {"repetition_penalty": 1.5}], ids=str)
def test_logprobs_are_those_of_the_whole_vocabulary_at_the_temperature(engine, model, filters):
    completions = engine.sample(PROMPTS, Sampling(24, temperature=0.7, **filters), seeds=[1, 2, 3])
    assert gap(model, PROMPTS, completions, 0.7) < BOUND


def test_each_prompt_may_have_its_own_temperature(engine, model):
    completions = engine.sample(PROMPTS, Sampling(24), seeds=[1, 2, 3], temperatures=[0.7, 1.3, 0.7])
    for at, temperature in enumerate([0.7, 1.3, 0.7]):
        assert gap(model, PROMPTS[at : at + 1], completions[at : at + 1], temperature) < BOUND


def test_what_only_vllm_takes_reaches_a_server(engine, model):
    more = {"min_tokens": 8, "presence_penalty": 0.5, "logit_bias": {22: 100, 23: 99}, "bad_words": ["3"]}
    completions = engine.sample(PROMPTS, Sampling(12, vllm=more), seeds=[1, 2, 3])
    assert {token for completion in completions for token in completion.ids} == {22, 23}
    assert gap(model, PROMPTS, completions) < BOUND


def test_greedy_is_argmax_with_logprobs_at_temperature_1(engine, model):
    completions = engine.sample(PROMPTS, Sampling(24, temperature=0), seeds=[1, 2, 3])
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert next_logits(model, prompt, completion).argmax(-1).tolist() == list(completion.ids)
    assert gap(model, PROMPTS, completions) < BOUND


def test_guided_samples_match(engine, model, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    completions = engine.sample(PROMPTS * 5, Sampling(32, guided={"regex": "[0-9]{3}-[ab]+c"}), seeds=range(15))
    texts = [tokenizer.decode(c.ids, skip_special_tokens=True) for c in completions if c.finish == "stop"]
    assert len(texts) > 4 and all(re.fullmatch("[0-9]{3}-[ab]+c", text) for text in texts), texts
    assert gap(model, PROMPTS * 5, completions) < BOUND
    with pytest.raises(UserError, match=r"refuses a request: .*regex"):
        engine.sample(PROMPTS, Sampling(8, guided={"regex": "["}), seeds=[1, 2, 3])


def test_a_seed_decides_whichever_server_answers(engine, pair, folder, tmp_path):
    together = engine.sample(PROMPTS * 4, Sampling(24), seeds=range(12))
    for url in pair.urls:
        label = engine._fleet.label
        [server] = [server for server in engine._fleet.servers if server.url == url]
        others = [server for server in engine._fleet.servers if server.url != url]
        engine._fleet.servers = [server]
        assert engine._fleet.label == label
        assert [c.ids for c in engine.sample(PROMPTS * 4, Sampling(24), seeds=range(12))] == [c.ids for c in together]
        engine._fleet.servers = [server, *others]
    assert len({c.ids for c in together}) == 12


def test_stop_texts_end_a_completion_at_the_token_that_completes_them(engine, folder):
    decode = partial(AutoTokenizer.from_pretrained(folder).decode, skip_special_tokens=True)
    free = engine.sample(PROMPTS, Sampling(32), seeds=[1, 2, 3])
    stop = StopTexts((decode(free[0].ids)[6:8],), decode)
    for before, after in zip(free, engine.sample(PROMPTS, Sampling(32, stop=stop), seeds=[1, 2, 3]), strict=True):
        ends = [i for i in range(1, len(before.ids) + 1) if stop.end(before.ids[:i])]
        assert after.ids == before.ids[: ends[0] if ends else None]
        assert after.finish == ("stop" if ends else before.finish)


def test_stop_ids_context_and_callback(engine):
    heard = {}
    prompts = [*PROMPTS, [60] * (CONTEXT - 2)]
    sampling = Sampling(32, stop_ids=range(60, 200))
    completions = engine.sample(prompts, sampling, [1, 2, 3, 4], heard.__setitem__)
    assert [heard[i] for i in range(4)] == completions
    for completion in completions[:3]:
        assert not set(completion.ids[:-1]) & {1, *range(60, 200)}
        assert (completion.finish == "stop") == (completion.ids[-1] in {1, *range(60, 200)})
    assert len(completions[3].ids) <= 2
    with pytest.raises(UserError, match=f"{CONTEXT} tokens.*context of {CONTEXT}"):
        engine.sample([[5] * CONTEXT], Sampling(1), seeds=[1])


def under_way(engine, load, sampling: Sampling):
    """Sample, and load new weights as soon as the first completion is finished. Returns prompts and completions.

    The servers hold a seventh of the completions at a time, so that most are still to come when the weights arrive.
    """
    begun, prompts, found = threading.Event(), PROMPTS * 40, []
    thread = threading.Thread(
        target=lambda: found.extend(engine.sample(prompts, sampling, range(120), lambda *_: begun.set()))
    )
    thread.start()
    assert begun.wait(60)
    load()
    thread.join(300)
    assert len(found) == 120
    return prompts, found


def pieces(prompt: list[int], completion: Completion):
    """Yield each version, the tokens before its part of the completion, and that part."""
    for version in sorted(set(completion.versions)):
        start = completion.versions.index(version)
        end = start + completion.versions.count(version)
        assert set(completion.versions[start:end]) == {version}
        part = Completion(completion.ids[start:end], completion.logprobs[start:end], "length")
        yield version, prompt + list(completion.ids[:start]), part


def test_weights_may_change_in_the_middle_of_a_completion(engine, model):
    assert engine.in_flight
    spanned = False
    for new in range(1, 6):  # on a busy machine the weights may arrive late: then once more
        old = deepcopy(model)
        disturb(model, seed=new)
        prompts, completions = under_way(engine, lambda new=new: engine.load_weights(model, new), Sampling(300))
        for prompt, completion in zip(prompts, completions, strict=True):
            for version, before, part in pieces(prompt, completion):
                right, wrong = (model, old) if version == new else (old, model)
                assert version in (new - 1, new) and gap(right, [before], [part]) < BOUND
                assert gap(wrong, [before], [part]) > 1e-3 or len(part.ids) < 3
        spanned = any(set(completion.versions) == {new - 1, new} for completion in completions)
        if spanned:
            break
    assert spanned


def test_what_a_killed_trainer_left_half_done_does_no_harm(engine, pair, model):
    for url in pair.urls:
        for route in ("/pause?mode=keep", "/start_weight_update"):
            assert httpx2.post(url + route, timeout=60, trust_env=False).is_success
    disturb(model, seed=2)
    engine.load_weights(model, 1)
    assert gap_now(engine, model) < BOUND


def test_a_server_that_dies_loses_nothing_and_comes_back_in_step(engine, pair, model):
    sampling, prompts, seeds = Sampling(48), PROMPTS * 20, range(60)
    whole = engine.sample(prompts, sampling, seeds)
    port, url = pair.ports[1], pair.urls[1]
    api_server = psutil.Process(pair._guards[port].pid).children()[0]
    heard = []

    def kill(i, completion) -> None:
        if not heard:
            api_server.kill()
        heard.append(i)

    assert [c.ids for c in engine.sample(prompts, sampling, seeds, kill)] == [c.ids for c in whole]
    assert sorted(heard) == list(range(60))
    assert not answers(url)

    disturb(model, seed=3)
    engine.load_weights(model, 1)  # one server misses it
    assert gap(model, prompts, engine.sample(prompts, sampling, seeds)) < BOUND
    wait_for(lambda: pair.ended(port), 30)
    assert "exit code" in pair.ended(port)
    pair.start(port)
    wait_for(lambda: answers(url))

    def answered() -> float:
        served = httpx2.get(url + "/metrics", timeout=10, trust_env=False).text
        return sum(float(number) for number in re.findall(r"vllm:request_success_total\{.*\} (\S+)", served))

    for _ in range(10):  # until it has had a share, which a busy machine puts off, with the weights that it had missed
        assert gap(model, prompts, engine.sample(prompts, sampling, seeds)) < BOUND
        if answered():
            break
    assert answered()


def adapted(folder: str, rank: int):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=rank, lora_alpha=4 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config).eval()


@pytest.fixture
def lora(engine, pair, folder, model, tmp_path):
    """The servers in their initial state, with a client that sends them adapters."""
    engine.load_weights(model, 9)
    for url in pair.urls:
        httpx2.post(url + "/update_weight_version", json={"new_version": "default"}, timeout=10, trust_env=False)
    lora = VLLMServerEngine(folder, pair.urls, "lora", str(tmp_path / "adapters"), concurrency=8)
    yield lora
    lora.close()
    assert not (tmp_path / "adapters").exists()


def test_adapters_are_followed_step_by_step(lora, folder):
    policy = adapted(folder, rank=4)
    lora.load_weights(policy, 0)
    assert gap_now(lora, policy) < BOUND
    for version, _ in enumerate(steps(policy, count=4), start=1):
        assert gap_now(lora, policy) > 1e-3
        lora.load_weights(policy, version)
        assert gap_now(lora, policy) < BOUND


def test_a_completion_keeps_the_adapter_that_it_began_with(lora, folder):
    policy = adapted(folder, rank=4)
    disturb(policy, seed=4, size=0.05)
    old = {name: p.clone() for name, p in policy.state_dict().items()}
    lora.load_weights(policy, 0)
    assert not lora.in_flight

    def load() -> None:
        disturb(policy, seed=5, size=0.05)
        lora.load_weights(policy, 1)

    prompts, completions = under_way(lora, load, Sampling(100))
    new = {name: p.clone() for name, p in policy.state_dict().items()}
    assert {completion.versions[0] for completion in completions} == {0, 1}
    for version, weights in enumerate([old, new]):
        policy.load_state_dict(weights)
        its = [(p, c) for p, c in zip(prompts, completions, strict=True) if set(c.versions) == {version}]
        assert gap(policy, *map(list, zip(*its, strict=True))) < BOUND


def test_adapters_that_the_servers_cannot_take_are_told_in_one_line(lora, engine, folder, model):
    with pytest.raises(UserError, match=r"rank 16 .*max_lora_rank 8.*engine\.args\.max_lora_rank"):
        lora.load_weights(adapted(folder, rank=16), 0)
    with pytest.raises(UserError, match="adapter=lora"):
        lora.load_weights(model, 0)
    engine.load_weights(model, 10)  # from now on these servers have other weights
    with pytest.raises(UserError, match=r"weights of another run \(.*-10\).*restart it"):
        lora.load_weights(adapted(folder, rank=4), 0)


@pytest.mark.parametrize(
    ("way", "sharded"), [("disk", "no"), ("disk", "yes"), ("lora", "no"), ("lora", "yes"), ("nccl", "yes")]
)
def test_two_ranks_send_and_fail_together(engine, pair, folder, tmp_path, way, sharded):
    """The model may be sharded. At the end rank 0's disk is full; with nccl (here gloo) a server is killed while it is fed."""
    httpx2.post(pair.urls[0] + "/update_weight_version", json={"new_version": "default"}, timeout=10, trust_env=False)
    urls = pair.urls if way == "nccl" else pair.urls[:1]
    victim = psutil.Process(pair._guards[pair.ports[-1]].pid).children()[0]
    words = [str(free_ports(1)[0]), folder, ",".join(urls), str(tmp_path / "sent"), way, sharded, str(victim.pid)]
    environment = {**os.environ, "PYTHONPATH": TEST_PATH, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("two_ranks.py")), str(rank), *words],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    if way == "nccl":
        wait_for(lambda: pair.ended(pair.ports[-1]) or ranks[0].poll() is not None, 120)
        pair.start(pair.ports[-1])
    said = [rank.communicate(timeout=600)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    count = 5 if way == "nccl" else 3
    for lines in said:
        assert len(lines) == count + 1 and all(float(line.removeprefix("gap ")) < BOUND for line in lines[:count]), said
    if way == "nccl":
        assert said[0][-1] == "back True"
        return
    assert said[0][3] == "OSError [Errno 28] No space left on device"
    assert said[1][3].startswith("UserError another rank could not send the weights: OSError: [Errno 28] No space left")
    assert not list((tmp_path / "sent").glob("*/*"))


def test_a_file_that_is_not_what_the_trainer_wrote_is_refused(engine, model, monkeypatch):
    """One number of one tensor differs, as on a network disk that still shows an older file."""

    def damaged(tensors, file):
        name = next(iter(tensors))
        save_file(tensors | {name: tensors[name] + torch.eye(*tensors[name].shape)}, file)

    monkeypatch.setattr(sync, "save_file", damaged)
    with pytest.raises(UserError, match=r"refuses the weights \(.*does not hold the weights that the trainer wrote"):
        engine.load_weights(model, 1)


def test_another_model_is_refused(engine, folder):
    config = AutoModelForCausalLM.from_pretrained(folder).config
    config.hidden_size *= 2
    with pytest.raises(UserError, match=r"refuses the weights \(.+\): is it the model of model\.path") as told:
        engine.load_weights(AutoModelForCausalLM.from_config(config), 1)
    assert "\n" not in str(told.value)


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def test_a_start_brings_the_trainers_weights_and_leaves_nothing(pair, launched, model):
    pair.close()  # they are not needed any more, and would take CPU time
    disturb(model, seed=6)
    launched.load_weights(model, (launched.version or 0) + 1)
    assert gap_now(launched, model) < BOUND and launched.context == CONTEXT
    servers = launched._launched
    processes = family(servers._guards[servers.ports[0]].pid)
    assert len(processes) > 2
    launched.close()
    assert not psutil.wait_procs(processes, timeout=120)[1]
    assert [path.name for path in servers.folder.iterdir()] == [f"server-{servers.ports[0]}.log"]


def test_a_launched_server_that_is_killed_is_started_again(folder, model, tmp_path, monkeypatch):
    """It is killed while it samples, and while it takes weights, with no other server left, and not even a second of wait."""
    options = {"wait": 0.5, "launch": True, "args": ARGS, "logs": tmp_path}
    engine = VLLMServerEngine(folder, folder=str(tmp_path / "weights"), **options)
    [port], guards = engine._launched.ports, engine._launched._guards
    prompts, sampling, seeds = PROMPTS * 20, Sampling(48), range(60)

    def kill(*_) -> None:
        if guards[port] is first:
            psutil.Process(first.pid).children()[0].kill()

    async def ask(server, route, *arguments, **named):
        if route == "/update_weights":
            kill()
        return await real(server, route, *arguments, **named)

    engine.load_weights(model, 0)
    whole, first = engine.sample(prompts, sampling, seeds), guards[port]
    assert [c.ids for c in engine.sample(prompts, sampling, seeds, kill)] == [c.ids for c in whole]
    assert first.poll() and guards[port] is not first

    real, first = RemoteServer.ask, guards[port]
    monkeypatch.setattr(RemoteServer, "ask", ask)
    disturb(model, seed=7)
    engine.load_weights(model, 1)
    assert first.poll() and guards[port] is not first
    assert gap_now(engine, model) < BOUND
    engine.close()


def test_no_server_outlives_a_trainer_that_is_killed(folder, tmp_path):
    code = f"""if True:
        from grpo.extras.vllm_server.launch import Servers
        servers = Servers({folder!r}, logs={str(tmp_path)!r})
        servers.start_all()
        input()
    """
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE)
    try:
        wait_for(lambda: len(family(trainer.pid)) > 2)  # the guard and the server
        processes = family(trainer.pid)[1:]
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    assert not psutil.wait_procs(processes, timeout=120)[1]


def test_a_run_of_two_devices_starts_a_server_and_stops_it(smoke, tmp_path):
    overrides = [
        *(override for override in smoke() if not override.startswith("output_dir")),
        *("trainer=cpu", "trainer.devices=2", "logger=csv", f"hydra.run.dir={tmp_path}/run"),
        *("engine=vllm_server", "engine.launch=true", "engine.args.max_model_len=1024"),
        f"engine.args.kv_cache_memory_bytes={1 << 26}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, "train.py", *overrides], cwd=ROOT, env=environment)
    seen: dict[int, psutil.Process] = {}
    while run.poll() is None:
        seen |= {process.pid: process for process in family(run.pid)[1:]} if psutil.pid_exists(run.pid) else {}
        time.sleep(0.5)
    assert run.returncode == 0
    assert len(seen) > 4 and not psutil.wait_procs(seen.values(), timeout=120)[1]
    assert list((tmp_path / "run").glob("server-*.log")) and not (tmp_path / "run" / "weights").exists()
    learned = rows(tmp_path / "run")
    assert [row["rollout/logprob_gap"] for row in learned if "rollout/logprob_gap" in row] == pytest.approx(
        [0, 0], abs=1e-4
    )
