"""Ways for new weights to get into vLLM servers: files, an adapter, starting anew; `nccl` is one more.

A label names the weights of one version of one run.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file
from torch import nn

from grpo.engines.vllm_server.http import LOAD_ADAPTER, Lost, Refused, RemoteServer
from grpo.engines.vllm_server.launch import START, Servers
from grpo.engines.weights import buckets, checkpoint
from grpo.system.errors import UserError

KEPT = 4  # adapters; a completion under way goes on with the one it began with


class Way(Protocol):
    """follows: a completion under way goes on with new weights. needs: advice where a server does not take them. Files
    go into a folder of the run's own, which the engine removes at the end."""

    follows: bool
    needs: str

    def write(self, model: nn.Module, label: str) -> None:
        """Once for each version."""

    async def give(self, server: RemoteServer, label: str) -> None:
        """To one server, also to one that was away. Raises Lost, Refused, UserError."""


class Disk:
    """Safetensors files in a folder that every server sees under the same name, read through vLLM's own life cycle."""

    follows = True
    needs = (
        "is it the model of model.path, is engine.folder the same folder for it, and was it started with "
        '--weight-transfer-config \'{"backend": "grpo"}\'? After weights of another shape it has to be started again'
    )

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, model: nn.Module, label: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for i, bucket in enumerate(buckets(checkpoint(model))):
            tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in bucket}
            save_file(tensors, self.folder / f"{label}-{i:04d}.safetensors")

    async def give(self, server: RemoteServer, label: str) -> None:
        async with paused(server, label):
            try:
                await server.ask("/start_weight_update")
            except Refused as refused:
                if "already active" not in str(refused):
                    raise
                await server.ask("/finish_weight_update")  # what a trainer began that is no more
                await server.ask("/start_weight_update")
            for file in sorted(self.folder.iterdir()):
                await server.ask("/update_weights", {"update_info": {"file": str(file)}})
            await server.ask("/finish_weight_update")


class Lora:
    """The adapter as a folder, under a name of its own for each version.

    Under one name, reloaded in place, vLLM would read the files again for every request, and an older request would bring its
    older adapter back.
    """

    follows = False
    needs = (
        "is it the model of model.path, is engine.folder the same folder for it, and was it started with --enable-lora and a "
        "--max-lora-rank (engine.args.max_lora_rank) that is not below adapter.r?"
    )

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.labels: list[str] = []

    def write(self, model: nn.Module, label: str) -> None:
        if not hasattr(model, "peft_config"):
            raise UserError("engine.sync=lora needs a policy with an adapter: set adapter=lora, or engine.sync=disk")
        model.save_pretrained(self.folder / label, save_embedding_layers=False)  # which it would ask the hub about
        self.labels.append(label)
        while len(self.labels) > KEPT:
            shutil.rmtree(self.folder / self.labels.pop(0), ignore_errors=True)

    async def give(self, server: RemoteServer, label: str) -> None:
        if (other := (await server.labels())[0]) != "default":
            line = f"the server at {server.url} holds weights that another run gave it ({other}), not an adapter's base"
            raise UserError(f"{line}: restart it")
        await server.ask(LOAD_ADAPTER, {"lora_name": label, "lora_path": str(self.folder / label)})
        for old in self.labels[:-2]:  # a request may just be on its way with the name before this one
            with suppress(Refused):  # it is not there any more
                await server.ask("/v1/unload_lora_adapter", {"lora_name": old})


class Restart:
    """The whole model saved as a folder, and the server started on it: slow, and nothing of the old one can survive."""

    follows = False
    needs = "see its log"

    def __init__(self, folder: Path, servers: Servers) -> None:
        self.folder, self.servers = folder, servers

    def write(self, model: nn.Module, label: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.save_pretrained(self.folder / label, state_dict=dict(checkpoint(model)))

    async def give(self, server: RemoteServer, label: str) -> None:
        port = self.servers.port_of(server.url)
        await asyncio.to_thread(self.servers.stop, port)
        self.servers.start(port, str(self.folder / label))
        await server.answers(START)
        await server.ask("/update_weight_version", {"new_version": label})


@asynccontextmanager
async def paused(server: RemoteServer, label: str) -> AsyncIterator[None]:
    """Completions under way are frozen, and go on with new weights and nothing that older ones computed."""
    await server.ask("/pause?mode=keep")
    try:  # what is drawn after a failure is nobody's: no run has that label
        await server.ask("/update_weight_version", {"new_version": "unfinished-0"})
        yield
        if not (await server.ask("/reset_prefix_cache"))["success"]:
            raise Lost(f"{server.url} kept its prefix cache")
        await server.ask("/update_weight_version", {"new_version": label})
    finally:
        await server.ask("/resume")
