"""One of two processes that send weights to a vLLM server after each of three changes.

Arguments: RANK PORT MODEL URL FOLDER SYNC SHARDED. Prints a gap per change, and the error when the disk is full at the end.
"""

import sys
from datetime import timedelta
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from cases import disturb, gap_now
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from grpo.engines import weights
from grpo.engines.vllm_server import sync
from grpo.engines.vllm_server.engine import VLLMServerEngine

rank, port, path, url, folder, way, sharded = sys.argv[1:]
limit = timedelta(seconds=60)  # a rank that waits for the other in vain
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
engine = VLLMServerEngine(path, [url], way, folder)
for version in range(3):
    disturb(whole, seed=version)
    now = whole.state_dict()
    for name, tensor in model.state_dict().items():
        if sharded == "yes":
            now[name] = dist.tensor.distribute_tensor(now[name], tensor.device_mesh, tensor.placements)
    model.load_state_dict(now)
    engine.load_weights(model, version)
    print("gap", gap_now(engine, whole), flush=True)
    dist.barrier()  # otherwise the next weights may arrive while the other rank samples
if way == "lora" and rank == "0":  # the files are what peft writes
    [newest] = Path(folder).glob("*/*-2")
    whole.save_pretrained(folder + "-peft")
    ours, theirs = (load_file(at / "adapter_model.safetensors") for at in (newest, Path(folder + "-peft")))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
sync.save_file = full_disk  # with most tensors still to be written
try:
    engine.load_weights(model, 3)
except (OSError, ValueError) as error:
    print(type(error).__name__, error, flush=True)
dist.barrier()  # both are here
engine.close()
