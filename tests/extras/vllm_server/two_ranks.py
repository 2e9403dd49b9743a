"""One of two processes that send weights to vLLM servers after each of three changes.

Arguments: RANK PORT MODEL URLS FOLDER SYNC SHARDED PID. Prints a gap per change. At the end the disk is full, and it prints the
error; with nccl the last server, whose process is PID, is killed while it is fed, and gets the next weights when it is back.
"""

import asyncio
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from helpers.models import disturb, gap_now
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from grpo.engines import weights
from grpo.extras.vllm_server import sync
from grpo.extras.vllm_server.engine import VLLMServerEngine
from grpo.extras.vllm_server.http import RemoteServer

rank, port, path, urls, folder, way, sharded, pid = sys.argv[1:]
limit = timedelta(seconds=180)  # a rank that waits for the other in vain
weights.BUCKET = 1 << 16  # many files
torch.set_num_threads(1)
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2, timeout=limit)


def new_model():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval() if way == "lora" else model


def full_disk(*_):
    raise OSError(28, "No space left on device")


whole, model = new_model(), new_model()
if sharded == "yes":
    for layer in [*model.get_submodule("base_model.model.model.layers" if way == "lora" else "model.layers"), model]:
        fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
engine = VLLMServerEngine(path, urls.split(","), way, folder=folder)
last = engine._fleet.servers[-1]


def change(version):
    disturb(whole, seed=version)
    now = whole.state_dict()
    for name, tensor in model.state_dict().items():
        if sharded == "yes":
            now[name] = dist.tensor.distribute_tensor(now[name], tensor.device_mesh, tensor.placements)
    model.load_state_dict(now)
    engine.load_weights(model, version)
    print("gap", gap_now(engine, whole), flush=True)
    dist.barrier()  # otherwise the next weights may arrive while the other rank samples


for version in range(3):
    change(version)
if way == "lora" and rank == "0":  # the files are what peft writes
    [newest] = Path(folder).glob("*/*-2")
    whole.save_pretrained(folder + "-peft")
    ours, theirs = (load_file(at / "adapter_model.safetensors") for at in (newest, Path(folder + "-peft")))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
if way == "nccl":
    real, fed = RemoteServer.ask, []

    async def ask(server, route, *arguments, **named):
        if route == "/update_weights" and server is last:
            fed.append(route)
            if len(fed) == 2:
                os.kill(int(pid), signal.SIGKILL)
        return await real(server, route, *arguments, **named)

    RemoteServer.ask = ask
    change(3)
    asyncio.run(last.answers(170))
    change(4)
    print("back", last.ready, flush=True)
else:
    sync.save_file = full_disk  # with most tensors still to be written
    try:
        engine.load_weights(model, 3)
    except (OSError, ValueError) as error:
        print(type(error).__name__, error, flush=True)
dist.barrier()  # both are here
engine.close()
