"""The server, with real engines and real HTTP on the loopback address."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from conftest import ROOT
from helpers.serving import POISON, PROMPT, Client, line_of, served, until

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Engine, Sampling
from grpo.extras.demo.demo_model import make_model
from grpo.extras.judges.llm_judge import Judge
from grpo.extras.network.ports import check_port
from grpo.extras.serve.__main__ import main
from grpo.extras.serve.batching import Batching
from grpo.extras.serve.service import served_name
from grpo.models.pretrained import Pretrained
from grpo.system.calls import awaited
from grpo.system.errors import UserError
from grpo.system.seeds import derive_seed


@pytest.fixture(scope="module")
def server(toy) -> Iterator[Client]:
    with served(toy) as client:
        client.ready()
        yield client


@pytest.fixture
def own(toy, tmp_path) -> Iterator[Client]:
    """A server whose weights may be changed; its folder is tmp_path/served."""
    shutil.copytree(toy, tmp_path / "served")
    with served(tmp_path / "served", weights_from=[tmp_path]) as client:
        client.ready()
        yield client


@pytest.fixture
def other(toy, tmp_path) -> Path:
    """A folder of the same model with other weights."""
    folder = Path(shutil.copytree(toy, tmp_path / "other"))
    make_model(Pretrained(str(toy)).tokenizer(), seed=1).save_pretrained(folder)
    return folder


@torch.no_grad()
def logprobs(model, prompt, ids, temperature=1.0) -> list[float]:
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def greedy(model) -> list[int]:
    engine = TransformersEngine()
    engine.load_weights(model, 0)
    return list(engine.sample([PROMPT], Sampling(8, temperature=0.0), [0])[0].ids)


def ids(answer: dict) -> list[int]:
    (found,) = answer["token_ids"]
    return found


GREEDY = {"temperature": 0, "max_tokens": 8}


def test_the_answer_that_atropos_reads(server, toy_model):
    answer = server.generate(logprobs=0, n=8, max_tokens=32, temperature=0.7, top_k=20)
    assert set(answer) == {"text", "prompt", "finish_reasons", "logprobs", "prompt_token_ids", "token_ids"}
    assert answer["prompt_token_ids"] == PROMPT and answer["prompt"].endswith("12")
    assert len(answer["text"]) == len(answer["finish_reasons"]) == len(answer["token_ids"]) == 8
    assert len({tuple(found) for found in answer["token_ids"]}) == 8  # each sample has its own seed
    for found, positions, finish in zip(answer["token_ids"], answer["logprobs"], answer["finish_reasons"], strict=True):
        assert [list(entry) for (entry,) in positions] == [[str(i)] for i in found]
        values = [value for (entry,) in positions for value in entry.values()]
        assert values == pytest.approx(logprobs(toy_model, PROMPT, found, 0.7), abs=1e-5)
        assert finish == ("stop" if found[-1] == toy_model.config.eos_token_id else "length")


def test_a_text_is_a_prompt_too_and_stop_ids_end(server):
    first = server("/generate", {"prompt": "12", "max_tokens": 3, "seed": 1})
    assert first["prompt_token_ids"] == [22, 23] and len(ids(first)) == 3
    assert server.generate([22, 23], max_tokens=3, seed=1)["token_ids"] == first["token_ids"]
    two = server("/v1/completions", {"prompt": ["12", "12"], "max_tokens": 8, "seed": 1})["choices"]
    assert two[0]["text"] != two[1]["text"]  # each prompt of a request has its own seed
    stopped = server("/generate", {"prompt": "12", "max_tokens": 3, "seed": 1, "stop_token_ids": ids(first)[1:2]})
    assert (ids(stopped), stopped["finish_reasons"]) == (ids(first)[:2], ["stop"])


def test_prompts_have_log_probabilities_where_they_are_wanted(server, toy_model):
    expected = logprobs(toy_model, PROMPT[:1], PROMPT[1:])
    first, *rows = server.generate(n=2, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    assert first is None and [row[str(i)]["logprob"] for row, i in zip(rows, PROMPT[1:], strict=True)] == pytest.approx(
        expected, abs=1e-5
    )
    assert rows[-1]["23"]["decoded_token"] == "2"
    asked = {"messages": [[{"role": "user", "content": text}] for text in ("12 + 7?", "coins")], "max_tokens": 1}
    answer = server("/generate", asked | {"prompt_logprobs": 2})
    for prompt, rows in zip(answer["prompt_token_ids"], answer["prompt_logprobs"], strict=True):
        assert len(rows) == len(prompt) and all(2 <= len(row) <= 3 for row in rows[1:])
        found = [row[str(i)]["logprob"] for row, i in zip(rows[1:], prompt[1:], strict=True)]
        assert found == pytest.approx(logprobs(toy_model, prompt[:1], prompt[1:]), abs=1e-5)


def test_conversations(server, toy_model):
    conversations = [[{"role": "user", "content": text}] for text in ("12 + 7?", "coins")]
    answer = server("/generate", {"messages": conversations, "max_tokens": 6, "top_p": 1, "top_k": -1})
    assert answer["prompt"][1] == "<|user|>coins<|end|><|assistant|>"
    parts = (answer[name] for name in ("prompt_token_ids", "completion_token_ids", "old_log_probs", "completion"))
    rows = list(zip(*parts, strict=True))
    assert len(rows) == 2
    for prompt, found, values, text in rows:
        assert isinstance(text, str) and 1 <= len(found) == len(values) <= 6
        assert values == pytest.approx(logprobs(toy_model, prompt, found, 0.7), abs=1e-5)


def test_a_seed_decides_whatever_runs_beside(server, toy_model):
    alone = server.generate(seed=5, n=3)["token_ids"]
    engine = TransformersEngine()
    engine.load_weights(toy_model, 0)
    expected = engine.sample([PROMPT] * 3, Sampling(16), [derive_seed(5, i) for i in range(3)])
    assert alone == [list(completion.ids) for completion in expected]
    asked = {"prompt": [PROMPT, PROMPT], "n": 2, "max_tokens": 16, "seed": 5, "return_token_ids": True}
    several = [choice["token_ids"] for choice in server("/v1/completions", asked)["choices"]]
    more = engine.sample([PROMPT] * 4, Sampling(16), [derive_seed(5, i) for i in range(4)])
    assert several == [list(completion.ids) for completion in more]  # each sample of a request has its own seed
    with ThreadPoolExecutor(8) as pool:
        beside = [pool.submit(server.generate, [30 + i] * (i + 1), n=2) for i in range(7)]
        assert pool.submit(server.generate, seed=5, n=3).result()["token_ids"] == alone
    assert all(len(future.result()["text"]) == 2 for future in beside)
    assert server.generate(max_tokens=16)["token_ids"] != server.generate(max_tokens=16)["token_ids"]


def test_what_waits_is_sampled_in_one_call(server):
    server("/pause", {})
    before = server.batching.engine.calls
    with ThreadPoolExecutor(30) as pool:
        asked = [pool.submit(server.generate, [20 + i], max_tokens=4 + i % 2, seed=i) for i in range(30)]
        server.waiting(30)
        server("/resume", {})
        answers = [future.result() for future in asked]
    assert server.batching.engine.calls - before == 2  # two lengths, two samplings
    for i, answer in enumerate(answers):
        assert answer["prompt_token_ids"] == [20 + i]
        assert answer["token_ids"] == server.generate([20 + i], max_tokens=4 + i % 2, seed=i)["token_ids"]


def test_one_that_the_engine_fails_at_harms_no_other(server):
    server("/pause", {})
    with ThreadPoolExecutor(3) as pool:
        good = [pool.submit(server.generate, [20 + i], seed=i) for i in range(2)]
        bad = pool.submit(server, "/generate", {"prompt": {"prompt_token_ids": [20, POISON]}}, 500)
        server.waiting(3)
        server("/resume", {})
        assert "RuntimeError: no such kernel" in line_of(bad.result())
        assert all(future.result()["text"] for future in good)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"temperature": -1}, "sampling.temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan must be a number"),
        ({"max_tokens": "3"}, "max_tokens=3 must be an integer"),
        ({"max_tokens": 5000}, "5 tokens and an answer of 5000 exceed the context of 4096: lower max_tokens"),
        ({"top_k": 2.5}, "top_k"),
        ({"stop_token_ids": [True]}, "each item an integer"),
        ({"n": 0}, "n=0 must be"),
        ({"stop_token_ids": [1] * 1001}, "at most 1000 stop_token_ids"),
        ({"best_off": 2}, "there is no field 'best_off' here"),
        ({"prompt": {"prompt_token_ids": []}}, "at least one"),
        ({"prompt": {"prompt_token_ids": [1, 10**9]}}, "1000000000, but token ids are integers from 0 to 281"),
        ({"prompt": 7}, "give a text, or token ids"),
        ({"messages": [[]]}, "either messages"),
        ({"prompt": None}, "either messages"),
        ({"prompt": None, "messages": [[{"role": "king", "content": "x"}]]}, "needs a role (system, user"),
        ({"prompt": None, "messages": [{"role": "user", "content": "x"}]}, "is no conversation"),
        ({"prompt_logprobs": 21}, "21 alternatives of a token are too many"),
        ({"min_tokens": 2, "presence_penalty": 0.5}, "does not take min_tokens, presence_penalty: set engine=vllm"),
        ({"min_tokens": "5"}, "min_tokens=5 must be an integer of at least 0"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be true or false"),
        ({"frequency_penalty": 2.5}, "frequency_penalty=2.5 must be a number of at least -2 and at most 2"),
        ({"logit_bias": {"a": 1}}, "logit_bias={a: 1} must be a mapping, each key an integer of at least 0"),
        ({"bad_words": "no"}, "bad_words=no must be a list"),
        ({"logprobs": 5}, "logprobs=5 must be an integer of at least 0 and at most 1"),
        ({"stream": True}, "use /v1/completions"),
        ({"stop": ["a"] * 65}, "at most 64 stop texts"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"guided": {"regex": "a+"}}, "set engine=vllm"),
    ],
    ids=str,
)
def test_bad_input_gets_a_line(server, more, words):
    body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 4} | more
    line = server.refused("/generate", body)
    assert words in line and "\n" not in line


def test_what_is_no_request_gets_a_line_and_nulls_are_fields_left_out(server):
    assert server.refused("/generate", b"{") == "the request is not JSON"
    assert "JSON object" in server.refused("/generate", [1])
    assert server("/generate", {"prompt": "12", "max_tokens": 2, "seed": None, "stop": None, "stream": False})["text"]


def test_health_version_and_a_list_of_what_there_is(server):
    assert server("/health") == {"status": "ok"} == server("/health_generate")
    assert server("/version") == {"version": 0}
    assert {"GET /health", "POST /generate", "POST /lora/load"} <= set(server("/")["endpoints"])


def test_nothing_is_there_before_the_weights_are(toy):
    there = threading.Event()

    def slow() -> Engine:
        there.wait()
        return TransformersEngine()

    with served(toy, slow) as client:
        assert "no weights yet" in client.refused("/health", status=503)
        client("/generate", {"prompt": "12"}, status=503)
        there.set()
        client.ready()
        assert client("/health") == {"status": "ok"}


def test_new_weights_are_those_of_the_folder(own, other, tmp_path, toy_model):
    new = greedy(Pretrained(str(other)).model())
    assert ids(own.generate(**GREEDY)) == greedy(toy_model) != new
    answer = own("/reload_weights", {"path": str(other)})
    assert answer == {"status": "ok", "message": "Weights reloaded", "version": 1} and own("/version") == {"version": 1}
    assert ids(own.generate(**GREEDY)) == new
    own("/reload_weights", {"path": str(tmp_path / "served")})
    assert ids(own.generate(**GREEDY)) == greedy(toy_model)
    shutil.copy(other / "model.safetensors", tmp_path / "served")  # as a trainer writes a new checkpoint
    assert own("/reload_weights", {})["version"] == 3
    assert ids(own.generate(**GREEDY)) == new


def test_what_is_not_the_model_is_refused_and_the_old_weights_stay(own, other, tmp_path, toy_model):
    config = toy_model.config
    config.num_hidden_layers -= 1
    type(toy_model)(config).save_pretrained(tmp_path / "smaller")
    (other / "model.safetensors").write_bytes(b"cut off")
    for path, words in [
        (tmp_path / "nowhere", "is not a model"),
        (tmp_path / "smaller", "is a different model"),
        (other, "load"),
    ]:
        line = own.refused("/reload_weights", {"path": str(path)})
        assert words in line and str(path) in line and "\n" not in line
    assert own("/version") == {"version": 0} and own("/reload_weights", {})["version"] == 1


def test_an_adapter_comes_and_goes(own, other, toy_model, tmp_path):
    plain = greedy(toy_model)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(toy_model, config)
    adapted.save_pretrained(tmp_path / "lora")
    assert own.refused("/lora/load", {"adapter_path": str(tmp_path / "no")}, 404).startswith(f"adapter_path={tmp_path}")
    assert "no adapter" in own.refused("/lora/unload", {})

    assert own("/lora/load", {"adapter_path": str(tmp_path / "lora")})["version"] == 1
    assert ids(own.generate(**GREEDY)) == greedy(adapted) != plain
    status = {"active": True, "adapter_name": "lora", "adapter_path": str(tmp_path / "lora"), "load_count": 1}
    assert own("/lora/status") == status
    own("/reload_weights", {"path": str(other)})  # the adapter stays on
    base = peft.PeftModel.from_pretrained(Pretrained(str(other)).model(), tmp_path / "lora")
    assert ids(own.generate(**GREEDY)) == greedy(base)

    assert own("/lora/unload", {})["version"] == 3
    assert ids(own.generate(**GREEDY)) == greedy(Pretrained(str(other)).model())
    assert own("/lora/status") == dict.fromkeys(status) | {"active": False, "load_count": 1}


def test_paused_requests_wait_and_see_the_weights_that_came_meanwhile(own, other):
    assert own("/pause", {})["is_paused"] and own("/is_paused") == {"is_paused": True}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(own.generate, **GREEDY)
        own.waiting(1)
        own("/reload_weights", {"path": str(other)})
        assert "paused" in own.refused("/health_generate", status=503)
        assert not asked.done() and own.batching.engine.calls == 0
        own("/resume", {})
        assert ids(asked.result()) == greedy(Pretrained(str(other)).model())
    assert own("/is_paused") == {"is_paused": False}


class Sleeping(TransformersEngine):
    """The built-in engine, which frees its weights in its sleep, as vLLM does on a GPU."""

    def sleep(self) -> None:
        self.version = None


def test_an_engine_that_slept_has_its_weights_again(toy, toy_model):
    with served(toy, Sleeping) as client:
        client.ready()
        told = client("/info")
        assert told["requests"] == {"running": 0, "waiting": 0} and told["model"] == str(toy)
        assert [told[name] for name in ("version", "dtype", "max_model_len", "engine")] == [
            0,
            "float32",
            4096,
            "Sleeping",
        ]
        for _ in range(2):  # the second one changes nothing
            assert client("/sleep", {}) == {"status": "sleeping"} and client("/is_sleeping") == {"is_sleeping": True}
        assert client("/health") == {"status": "ok"} and client("/info")["max_model_len"] is None
        client("/resume", {})
        assert "POST /wake_up" in client.refused("/generate", {"prompt": "12"}, 503)
        assert client("/wake_up", {}) == {"status": "awake"} and client("/is_sleeping") == {"is_sleeping": False}
        assert ids(client.generate(**GREEDY)) == greedy(toy_model)
        assert client("/version") == {"version": 1} == {"version": client("/info")["version"]}


TRL = {"n": 2, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 5}


def of_trl(answer: dict, model, prompts: list[list[int]]) -> None:
    """Check ids and log-probabilities, [samples][tokens][1] each, of two samples of each prompt."""
    assert answer["prompt_ids"] == prompts
    rows = zip(answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True)
    for i, (found, values, likeliest) in enumerate(rows):
        expected = logprobs(model, prompts[i // 2], found, 0.7)
        assert [value for (value,) in values] == pytest.approx(expected, abs=1e-5)
        assert likeliest == [[token] for token in found]
    assert i == 2 * len(prompts) - 1


def test_the_client_of_trl(server, toy_model, monkeypatch):
    """TRL's own client, which needs vLLM only to send weights. Only its question whether vLLM is installed is answered for it."""
    client = pytest.importorskip("trl.generation.vllm_client")
    monkeypatch.setattr(client, "is_vllm_available", lambda: True)
    theirs = client.VLLMClient(server.url)
    (listed,) = server("/v1/models")["data"]
    assert theirs.model == listed["id"] and theirs.get_world_size() == 1
    of_trl(theirs.generate(["12", "1"], **TRL), toy_model, [[22, 23], [22]])
    of_trl(theirs.generate([PROMPT], **TRL), toy_model, [PROMPT])
    conversations = [[{"role": "user", "content": text}] for text in ("12 + 7?", "coins")]
    asked = server("/generate", {"messages": conversations, "max_tokens": 1})["prompt_token_ids"]
    of_trl(theirs.chat(conversations, **TRL), toy_model, asked)
    theirs.reset_prefix_cache()
    with pytest.raises(Exception, match=r"501.*reads weights from a folder.*POST /reload_weights"):
        theirs.init_communicator()
    with pytest.raises(Exception, match=r"501.*engine=vllm_server"):
        theirs._start_weight_update()


def test_the_paths_of_the_server_of_older_trl(server, toy_model):
    import requests  # as its client, it follows the redirection from /health/ to /health

    assert requests.get(f"{server.url}/health/").json() == {"status": "ok"}
    assert requests.get(f"{server.url}/get_tensor_parallel_size/").json()["tensor_parallel_size"] == 1
    assert requests.post(f"{server.url}/reset_prefix_cache/").status_code == 200
    asked = {**TRL, "images": None, "generation_kwargs": {}, "seed": 3, "structured_outputs_regex": None}
    answer = server("/generate/", {"prompts": ["12", [1, 2]], "logprobs": 0, **asked})
    of_trl(answer, toy_model, [[22, 23], [1, 2]])
    plain = server("/generate/", {"prompts": ["12", [1, 2]], "guided_decoding_regex": None, **asked})
    assert plain["completion_ids"] == answer["completion_ids"] and "logprob_token_ids" not in plain
    assert [[[p] for p in row] for row in plain["logprobs"]] == answer["logprobs"]
    chat = server("/chat/", {"messages": [[{"role": "user", "content": "coins"}]], "logprobs": 0, **asked})
    of_trl(chat, toy_model, chat["prompt_ids"])
    named = {"name": "w", "dtype": "torch.float32", "shape": [1]}
    answer = requests.post(f"{server.url}/update_named_param/", json=named)
    assert answer.status_code == 501 and "POST /reload_weights" in line_of(answer.json())
    assert "at least one" in server.refused("/generate/", {"prompts": []})
    assert "no field 'images'" in server.refused("/generate/", {"prompts": ["12"], "images": ["x"]})
    assert "set engine=vllm" in server.refused("/generate/", {"prompts": ["12"], "guided_decoding_regex": "a+"})


def test_a_call_comes_before_requests_that_wait(toy_model):
    order, begun, gate = [], threading.Event(), threading.Event()

    class Slow(TransformersEngine):
        def sample(self, prompts, sampling, *rest):
            order.append(sampling.max_tokens)
            begun.set()
            gate.wait()
            return super().sample(prompts, sampling, *rest)

    batching = Batching(Slow)
    batching.call(lambda engine: engine.load_weights(toy_model, 0)).result()
    first = batching.sample([PROMPT], Sampling(1), [0])
    begun.wait()
    others = [batching.sample([PROMPT], Sampling(length), [0]) for length in (2, 3, 2)]
    called = batching.call(lambda engine: order.append("call"))
    gate.set()
    assert [len(future.result()[0].ids) for future in (first, *others)] == [1, 2, 3, 2] and called.done()
    assert order == [1, "call", 2, 3]
    batching.stop()


def test_what_waits_at_the_end_is_told_so(own):
    own("/pause", {})
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(own, "/generate", {"prompt": "12"}, 503)
        own.waiting(1)
        own.server.should_exit = True
        assert line_of(asked.result()) == "the server is stopping"


def test_completions_as_openai_has_them(server, toy_model):
    asked = {"model": "any", "prompt": ["12", PROMPT], "n": 2, "max_tokens": 5, "seed": 3, "logprobs": 1}
    answer = server("/v1/completions", {**asked, "return_token_ids": True})
    assert answer["object"] == "text_completion" and [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    written = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": written, "total_tokens": 7 + written}
    for choice, prompt in zip(answer["choices"], [[22, 23]] * 2 + [PROMPT] * 2, strict=True):
        assert choice["prompt_token_ids"] == prompt and len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
        expected = logprobs(toy_model, prompt, choice["token_ids"])
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-5)
    plain = server("/v1/completions", {"prompt": "12", "max_tokens": 5, "seed": 3})["choices"]
    assert plain == [
        {"index": 0, "finish_reason": "length", "text": answer["choices"][0]["text"], "logprobs": None},
    ]


def test_chat_as_openai_has_it(server):
    messages = [{"role": "user", "content": "12 + 7?"}]
    answer = server("/v1/chat/completions", {"model": "any", "messages": messages, "max_tokens": 5, "temperature": 0})
    conversation = {"messages": [messages], "max_tokens": 5, "temperature": 0}
    ours = server("/generate", conversation)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": ours["completion"][0]}
    assert answer["usage"]["prompt_tokens"] == len(ours["prompt_token_ids"][0])
    assert "describes no tool" in server.refused("/v1/chat/completions", {"messages": messages, "tools": [{}]})
    refused = server("/v1/messages", {"messages": messages, "n": 2}, 400)
    assert (refused["type"], refused["error"]["type"]) == ("error", "invalid_request_error")


def test_a_request_for_another_model_is_refused(toy):
    asked = {"prompt": "12", "max_tokens": 2}
    with served(toy, names=["policy"]) as client:
        client.ready()
        for name in ("policy", str(toy), None):
            assert client("/v1/completions", asked | {"model": name})["model"] == "policy"
        line = "there is no model 'gpt-4' here: ask for policy, leave it out, or start the server with served_name=NAME"
        assert client.refused("/v1/completions", asked | {"model": "gpt-4"}, 404) == line
        assert client.refused("/v1/models/gpt-4", status=404) == line
        assert client("/v1/models")["data"] == [client("/v1/models/policy")]
        claude = client(
            "/v1/messages", {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "1"}]}, 404
        )
        assert claude["error"] == {"type": "not_found_error", "message": line.replace("gpt-4", "m")}


def test_a_served_model_has_a_readable_name(toy, tmp_path):
    best = tmp_path / "run" / "checkpoints" / "best"
    best.mkdir(parents=True)
    assert [served_name(str(place)) for place in (best, toy, "org/model")] == ["run/best", toy.name, "org/model"]


def test_answers_end_before_a_stop_text(server):
    asked = {"prompt": "12", "max_tokens": 24, "temperature": 0}
    whole = server("/v1/completions", asked)["choices"][0]["text"]
    stop = whole[3:5]
    more = {"stop": ["never", stop], "logprobs": 0, "return_token_ids": True}
    (choice,) = server("/v1/completions", asked | more)["choices"]
    assert choice["text"] == whole[: whole.index(stop)] and choice["finish_reason"] == "stop"
    (plain,) = server("/v1/completions", asked | {"stop": stop, "logprobs": 0})["choices"]
    assert "".join(plain["logprobs"]["tokens"]).startswith(choice["text"])
    assert len(plain["logprobs"]["tokens"]) < len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) < 24
    assert server("/generate", asked | {"stop": stop})["text"] == [choice["text"]]


def test_an_echo_has_the_models_log_probabilities(server, toy_model):
    """As lm-eval asks for the likelihood of an answer."""
    rows = [PROMPT, [22, 23]]
    asked = {"prompt": rows, "max_tokens": 0, "echo": True, "logprobs": 2, "return_tokens_as_token_ids": True}
    answer = server("/v1/completions", asked)
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
    for row, choice in zip(rows, answer["choices"], strict=True):
        with torch.no_grad():
            whole = toy_model(torch.tensor([row])).logits[0].log_softmax(-1)
        found = choice["logprobs"]
        assert found["tokens"] == [f"token_id:{i}" for i in row] and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(logprobs(toy_model, row[:1], row[1:]), abs=1e-5)
        for place, top in enumerate(found["top_logprobs"][1:]):
            best = whole[place].topk(2)
            expected = {f"token_id:{i}": p for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)}
            own = {f"token_id:{row[place + 1]}": whole[place, row[place + 1]].item()}
            assert top == pytest.approx(expected | own, abs=1e-5)
    prompted = server("/v1/completions", {"prompt": [22, 23], "max_tokens": 1, "prompt_logprobs": 0})["choices"][0]
    (value,) = logprobs(toy_model, [22], [23])
    assert prompted["prompt_logprobs"][1]["23"]["logprob"] == pytest.approx(value, abs=1e-5)


def test_alternatives_of_a_sample_have_its_temperature(server, toy_model):
    messages = [{"role": "user", "content": "12 + 7?"}]
    asked = {"messages": messages, "max_tokens": 6, "temperature": 0.5, "logprobs": True, "top_logprobs": 3}
    answer = server("/v1/chat/completions", asked | {"return_token_ids": True, "return_tokens_as_token_ids": True})
    row = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
    with torch.no_grad():
        whole = (toy_model(torch.tensor([row])).logits[0] / 0.5).log_softmax(-1)
    for place, one in enumerate(answer["choices"][0]["logprobs"]["content"], start=len(answer["prompt_token_ids"]) - 1):
        best = whole[place].topk(3)
        assert [top["token"] for top in one["top_logprobs"]] == [f"token_id:{i}" for i in best.indices.tolist()]
        assert [top["logprob"] for top in one["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_models_and_the_route_of_tokens(server, toy):
    (model,) = server("/v1/models")["data"]
    assert (model["id"], model["root"], model["max_model_len"]) == (toy.name, str(toy), 4096)
    assert server("/v1/models/any/other") == {**model, "id": "any/other"}  # as in requests
    nothing = server("/v1/completions", {"prompt": "1", "max_tokens": 0, "n": 2})
    assert [(one["text"], one["finish_reason"]) for one in nothing["choices"]] == [("", "length")] * 2
    assert nothing["usage"]["completion_tokens"] == 0
    conversation = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 0}
    assert "max_tokens=0 must be an integer of at least 1" in server.refused("/v1/chat/completions", conversation)
    asked = {"token_ids": [22, 23], "sampling_params": {"max_tokens": 3, "seed": 1, "logprobs": 1}}
    (choice,) = server("/inference/v1/generate", asked)["choices"]
    assert choice["token_ids"] == ids(server.generate([22, 23], max_tokens=3, seed=1))
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    counted = server("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "12 + 7?"}]})
    chat = server("/v1/chat/completions", {"messages": [{"role": "user", "content": "12 + 7?"}], "max_tokens": 1})
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}
    template = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    assert "chat_template_kwargs has chat_template" in server.refused("/v1/chat/completions", template)


def test_the_server_can_be_a_judge(server):
    logged = {}
    judge = Judge("any", ["?"], url=f"{server.url}/v1", request={"temperature": 0, "max_tokens": 4})
    [reward] = awaited(judge(["2 + 2?"], ["4"], logged.__setitem__))
    assert not reward.known and logged["judge_invalid"] == logged["judge_calls"] == 1  # a random model gives no verdict
    assert logged["judge_tokens"] > 4


def test_a_port_that_is_taken_names_who_has_it():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"port={port} is held by .*\(pid {os.getpid()}, user \S+\): choose another"
        ):
            main([f"port={port}"])
    check_port("127.0.0.1", port)
    with pytest.raises(UserError, match="host= is empty"):  # it would be every machine
        check_port("", port)
    for host, wrong in [("127.0.0.1", 70000), ("127.0.0.1", "x"), ("203.0.113.1", 0)]:
        with pytest.raises(UserError, match=f"port={wrong}"):
            check_port(host, wrong)


def test_a_model_without_weights_ends_the_command_with_a_line(toy, tmp_path):
    shutil.copytree(toy, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UserError, match="has no model that transformers can load"):
        main(["model=path", f"model.path={tmp_path / 'bare'}", "engine=transformers", "port=0", "device=cpu"])


@pytest.mark.slow
def test_the_command_starts_answers_and_ends(toy):
    arguments = ["model=path", f"model.path={toy}", "engine=transformers", "port=0", "device=cpu"]
    command = [sys.executable, "-m", "grpo.serve", *arguments]
    listens = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a test process in the background ignores SIGINT, and its children inherit that
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, preexec_fn=listens, **pipes)
    try:
        line = process.stdout.readline()
        assert line.startswith(f"serving {toy} as {toy.name} with TransformersEngine at http://127.0.0.1:")
        client = Client(int(line.rpartition(":")[2]), type("Away", (), {"batching": None}))
        assert client("/health") == {"status": "ok"}
        assert len(ids(client.generate(max_tokens=3, seed=1))) == 3
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=300)
        assert (process.returncode, rest, errors) == (130, "", "")
        with pytest.raises(urllib.error.URLError):
            client("/health")
    finally:
        process.kill()


@pytest.mark.vllm
def test_it_serves_vllm(toy, other):
    pytest.importorskip("vllm")
    from grpo.engines.vllm.engine import VLLMEngine

    class Finishing(VLLMEngine):
        finished = 0

        def sample(self, prompts, sampling, seeds, done):
            def counted(*finished):
                self.finished += 1
                done(*finished)

            return super().sample(prompts, sampling, seeds, counted)

    with served(toy, lambda: Finishing(str(toy)), weights_from=[other]) as client:
        client.ready()
        body = json.dumps({"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 4000, "n": 100}).encode()
        with client.raw(client.head("POST /generate", Content_Length=str(len(body))), body):
            until(lambda: client.batching.running)
        until(lambda: not client.batching.running)
        assert client.batching.engine.finished < 100  # the client has left, and the rest is not sampled
        for version, folder in enumerate((toy, other)):
            if version:
                assert client("/reload_weights", {"path": str(folder)})["version"] == version
            model = Pretrained(str(folder)).model()
            answer = client.generate(n=4, temperature=0.7, max_tokens=12)
            for found, positions in zip(answer["token_ids"], answer["logprobs"], strict=True):
                values = [value for (entry,) in positions for value in entry.values()]
                assert values == pytest.approx(logprobs(model, PROMPT, found, 0.7), abs=1e-5)
            echo = client("/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2})
            values = echo["choices"][0]["logprobs"]["token_logprobs"]
            assert values[1:] == pytest.approx(logprobs(model, PROMPT[:1], PROMPT[1:]), abs=1e-5)
        answer = client.generate(n=2, max_tokens=6, min_tokens=6, logit_bias={"22": 100}, prompt_logprobs=1)
        assert answer["token_ids"] == [[22] * 6] * 2 and len(answer["prompt_logprobs"]) == len(PROMPT)
        asked = {"prompt": PROMPT, "max_tokens": 24, "seed": 1}
        whole = client("/v1/completions", asked)["choices"][0]["text"]
        stop = next(letter for letter in whole[2:] if letter.isascii())
        (choice,) = client("/v1/completions", asked | {"stop": stop, "return_token_ids": True})["choices"]
        assert choice["text"] == whole[: whole.index(stop)] and len(choice["token_ids"]) < 24
