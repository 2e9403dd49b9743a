"""Ways to send new weights to vLLM servers: files, adapters, or a restart; a fourth one is in `nccl`.

A label names the weights of one version of one run.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file
from torch import Tensor, nn

from grpo.engines.vllm_server.http import LOAD_ADAPTER, Lost, Refused, RemoteServer
from grpo.engines.vllm_server.launch import START, Servers
from grpo.engines.weights import buckets, checksum
from grpo.models.quantized import refuse_quantized
from grpo.system.distributed import full
from grpo.system.errors import UserError

Named = tuple[str, Tensor]
KEPT = 4  # adapters; an unfinished completion keeps the adapter that it started with


def adapter_tensors(model: nn.Module) -> Iterator[Named]:
    """Yield names and tensors as in the adapter's checkpoint. All ranks gather them together if the model is sharded."""
    if not hasattr(model, "peft_config"):
        raise UserError("engine.sync=lora needs a policy with an adapter: set adapter=lora, or engine.sync=disk")
    refuse_quantized(model, "engine.sync=lora", "engine.sync=disk")
    from peft import get_peft_model_state_dict  # takes a second, and most runs have no adapter

    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)  # otherwise peft asks the hub
    yield from ((name, full(tensor)) for name, tensor in tensors.items())


def cpu_copies(tensors: Iterable[Named]) -> dict[str, Tensor]:
    """Return copies on the CPU, which share no memory, as safetensors needs it."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}


class Way(Protocol):
    """A way to send weights to servers. Files go to the run's own folder, which the engine removes at the end.

    follows: whether an unfinished completion continues with the new weights. needs: advice if a server refuses them.
    """

    follows: bool
    needs: str

    def write(self, model: nn.Module, tensors: Iterable[Named], label: str) -> None:
        """Prepare the weights of `model`, which are `tensors`; called once per version."""

    async def give(self, server: RemoteServer, label: str) -> None:
        """Send the weights to one server, maybe one that was away. Raises Lost, Refused, UserError."""


class Disk:
    """Writes safetensors files to a folder that every server sees under the same path; vLLM's weight update reads them, and
    checks that they hold what was written."""

    follows = True
    needs = (
        "is it the model of model.path, is engine.folder the same folder for it, and was it started with "
        '--weight-transfer-config \'{"backend": "grpo"}\'? After weights of another shape it must be restarted'
    )

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[Path, int] = {}  # checksums

    def write(self, model: nn.Module, tensors: Iterable[Named], label: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.files = {}
        for i, bucket in enumerate(buckets(tensors)):
            file = self.folder / f"{label}-{i:04d}.safetensors"
            save_file(copies := cpu_copies(bucket), file)
            self.files[file] = checksum(copies.items())

    async def give(self, server: RemoteServer, label: str) -> None:
        async with paused(server, label):
            await begin_update(server)
            for file, total in self.files.items():
                await server.ask("/update_weights", {"update_info": {"file": str(file), "checksum": total}})
            await server.ask("/finish_weight_update")


class Lora:
    """Writes the adapter to a folder, under a new name for each version.

    With one name, reloaded in place, vLLM would read the files again for every request, and an older request would bring back
    the older adapter.
    """

    follows = False
    needs = (
        "is it the model of model.path, is engine.folder the same folder for it, and was it started with --enable-lora and a "
        "--max-lora-rank (engine.args.max_lora_rank) of at least adapter.r?"
    )

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.labels: list[str] = []

    def write(self, model: nn.Module, tensors: Iterable[Named], label: str) -> None:
        copies = cpu_copies(tensors)
        model.peft_config["default"].save_pretrained(self.folder / label)
        save_file(copies, self.folder / label / "adapter_model.safetensors")
        self.labels.append(label)
        while len(self.labels) > KEPT:
            shutil.rmtree(self.folder / self.labels.pop(0), ignore_errors=True)

    async def give(self, server: RemoteServer, label: str) -> None:
        if (other := (await server.labels())[0]) != "default":
            line = f"the server at {server.url} holds weights of another run ({other}), not the adapter's base"
            raise UserError(f"{line}: restart it")
        await server.ask(LOAD_ADAPTER, {"lora_name": label, "lora_path": str(self.folder / label)})
        for old in self.labels[:-2]:  # a request with the previous name may still be on its way
            with suppress(Refused):  # it is already unloaded
                await server.ask("/v1/unload_lora_adapter", {"lora_name": old})


class Restart:
    """Saves the whole model to a folder and restarts the server on it: slow, but nothing computed with old weights survives."""

    follows = False
    needs = "see its log"

    def __init__(self, folder: Path, servers: Servers) -> None:
        self.folder, self.servers = folder, servers

    def write(self, model: nn.Module, tensors: Iterable[Named], label: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.save_pretrained(self.folder / label, state_dict=dict(tensors))

    async def give(self, server: RemoteServer, label: str) -> None:
        port = self.servers.port_of(server.url)
        await asyncio.to_thread(self.servers.stop, port)
        self.servers.start(port, str(self.folder / label))
        await server.answers(START)
        await server.ask("/update_weight_version", {"new_version": label})


async def begin_update(server: RemoteServer) -> None:
    """Begin an update of a server's weights."""
    try:
        await server.ask("/start_weight_update")
    except Refused as refused:
        if "already active" not in str(refused):
            raise
        await server.ask("/finish_weight_update")  # an update that was left unfinished
        await server.ask("/start_weight_update")


@asynccontextmanager
async def paused(server: RemoteServer, label: str) -> AsyncIterator[None]:
    """Pause unfinished completions; afterwards they continue with the new weights, without cached results of older ones."""
    await server.ask("/pause?mode=keep")
    try:  # tokens drawn after a failure belong to no run: none has this label
        await server.ask("/update_weight_version", {"new_version": "unfinished-0"})
        yield
        if not (await server.ask("/reset_prefix_cache"))["success"]:
            raise Lost(f"{server.url} did not clear its prefix cache")
        await server.ask("/update_weight_version", {"new_version": label})
    finally:
        await server.ask("/resume")
