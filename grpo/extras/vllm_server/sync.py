"""Ways to send new weights to vLLM servers: files, adapters, or a broadcast from the trainer's device.

A label names the weights of one version of one run.
"""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from grpo.engines.weights import buckets, checksum
from grpo.extras.vllm_server.http import HEALTH, LOAD_ADAPTER, LOOK, Lost, Refused, RemoteServer
from grpo.models.adapted import refuse_quantized
from grpo.system import distributed
from grpo.system.errors import UserError
from grpo.system.stopping.signals import deadline
from grpo.system.threads import outcome_of

Named = tuple[str, Tensor]
KEPT = 4  # adapters; an unfinished completion keeps the adapter that it started with


def adapter_tensors(model: nn.Module) -> Iterator[Named]:
    """Yield names and tensors as in the adapter's checkpoint. All ranks gather them together if the model is sharded."""
    if not hasattr(model, "peft_config"):
        raise UserError("engine.sync=lora needs a policy with an adapter: set adapter=lora, or engine.sync=disk")
    refuse_quantized(model, "engine.sync=lora", "engine.sync=disk")
    from peft import get_peft_model_state_dict  # takes a second, and most runs have no adapter

    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)  # otherwise peft asks the hub
    yield from ((name, distributed.full(tensor)) for name, tensor in tensors.items())


def cpu_copies(tensors: Iterable[Named]) -> dict[str, Tensor]:
    """Return copies on the CPU, which share no memory, as safetensors needs it."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}


class Behind(Lost):
    """A server answers, but must wait until weights are sent to all servers at once."""


class Way(Protocol):
    """A way to send weights to servers. Files go to the run's own folder, which the engine removes at the end.

    follows: whether an unfinished completion continues with the new weights.
    """

    follows: bool

    def write(self, model: nn.Module, tensors: Iterable[Named], label: str) -> None:
        """Prepare the weights of `model`, which are `tensors`; called once per version."""

    async def give(self, server: RemoteServer, label: str) -> None:
        """Send the weights to one server, maybe one that was away. Raises Lost, Refused, UserError."""


class Disk:
    """Writes safetensors files to a folder that every server sees under the same path; vLLM's weight update reads them, and
    checks that they hold what was written."""

    follows = True

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
            raise UserError(f"{server.url} holds weights of another run ({other}), not the adapter's base: restart it")
        await server.ask(LOAD_ADAPTER, {"lora_name": label, "lora_path": str(self.folder / label)})
        for old in self.labels[:-2]:  # a request with the previous name may still be on its way
            with suppress(Refused):  # it is already unloaded
                await server.ask("/v1/unload_lora_adapter", {"lora_name": old})


class Nccl:
    """Sends weights to all servers at once, from the trainer's device: one process group of rank 0 and all their workers.

    Each bucket is one broadcast, and the servers check it. On CPUs gloo takes NCCL's place; NCCL itself has never run, since it
    needs two GPUs. The group is made anew if a server has come or gone. A server that was away gets no weights before the next
    version, since the policy may be changing by then.
    """

    follows = True

    def __init__(self, servers: Sequence[RemoteServer]) -> None:
        self.servers = servers
        self.group: Any = None
        self.members: list[str] = []  # urls
        self.label: str | None = None  # of the weights that all members took

    def write(self, model: nn.Module, tensors: Iterable[Named], label: str) -> None:
        """Send the weights. Raises Lost if a server is lost meanwhile; those that are left can take them again."""
        try:
            outcome_of(self._send(next(model.parameters()).device, tensors, label))
        except Refused as refused:
            raise Lost(f"a vLLM server refuses to pause or to resume: {refused}") from refused

    async def give(self, server: RemoteServer, label: str) -> None:
        raise Behind(f"{server.url} was away when weights were sent, and gets the next ones")

    async def _send(self, device: torch.device, tensors: Iterable[Named], label: str) -> None:
        present = [server for server in self.servers if await self._present(server)]
        if not present:
            return
        # with mode=keep unfinished completions wait, and continue with the new weights
        async with AsyncExitStack() as pauses:
            for server in present:
                await pauses.enter_async_context(paused(server, label))
            try:
                await self._meet(present, device)
                await asyncio.gather(*map(begin_update, present))
                for bucket in buckets(tensors):
                    flat, layout = flattened(bucket)
                    info = {"update_info": {**layout, "checksum": checksum(bucket)}}
                    sent = asyncio.to_thread(self._broadcast, flat.to(device), present[0].timeout)
                    await asyncio.gather(sent, *(server.ask("/update_weights", info) for server in present))
                await asyncio.gather(*(server.ask("/finish_weight_update") for server in present))
            except Exception as error:  # the group cannot be used any more, and servers may wait in it
                self.close()
                refused = [server for server in present if isinstance(error, Refused) and await self._present(server)]
                if len(refused) == len(present):
                    raise UserError(f"the vLLM servers refuse the weights ({error}): {present[0].advice}") from error
                raise error if isinstance(error, Lost | UserError) else Lost(f"weights: {error}") from error
        self.label = label

    async def _present(self, server: RemoteServer) -> bool:
        """Return whether a server answers. One that has forgotten the last weights has been restarted and left the group."""
        try:
            await server.look(HEALTH)
            if (await server.labels())[0] != self.label:
                self.members = []
        except (Lost, Refused):
            return False
        return True

    async def _meet(self, present: list[RemoteServer], device: torch.device) -> None:
        """Make a group of this process, its rank 0, and the workers of these servers, unless there is one."""
        if self.members == (urls := [server.url for server in present]):
            return
        self.close()
        workers = [(await server.ask("/get_world_size", post=False))["world_size"] for server in present]
        first, limit = list(accumulate(workers, initial=1)), present[0].timeout
        kind = "nccl" if device.type == "cuda" else "gloo"
        listener = socket.create_server((max(map(own_address, urls), key=lambda a: not a.startswith("127.")), 0))
        address, port = listener.getsockname()
        group = {"address": address, "port": port, "size": first[-1], "kind": kind, "timeout": limit}
        joining = asyncio.to_thread(distributed.join_group, rank=0, listener=listener, device=device, **group)
        invited = [
            server.ask("/init_weight_transfer_engine", {"init_info": group | {"rank": rank}})
            for server, rank in zip(present, first, strict=False)
        ]
        self.group, *_ = await asyncio.gather(joining, *invited)
        self.members = urls

    def _broadcast(self, flat: Tensor, limit: float) -> None:
        whom = f"sending weights to {', '.join(self.members)}"
        with deadline(2 * limit, whom, "see their logs, or set engine.sync=disk"):
            self.group.broadcast(flat, 0).wait()
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)

    def close(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.abort()
        self.group, self.members = None, []


def flattened(bucket: Sequence[Named]) -> tuple[Tensor, dict[str, Any]]:
    """Return the bytes of all tensors, one after the other, and what `Transfer.received` needs to undo it."""
    flat = torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in bucket])
    names, dtypes = [name for name, _ in bucket], [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
    return flat, {"names": names, "dtypes": dtypes, "shapes": [list(tensor.shape) for _, tensor in bucket]}


def own_address(url: str) -> str:
    """Return the address of this machine in the network in which it reaches a server."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as looking:
        looking.connect((parts.hostname, parts.port or 80))  # sends nothing
        return looking.getsockname()[0]


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
    """Pause unfinished completions; afterwards they continue with the new weights. With `recompute` nothing cached with older
    ones is left; otherwise they keep their cache, which vLLM then does not clear, and later requests have another salt."""
    await server.ask("/pause?mode=keep&clear_cache=false")
    try:  # tokens drawn after a failure belong to no run: none has this label
        await server.ask("/update_weight_version", {"new_version": "unfinished-0"})
        yield
        route = f"/reset_prefix_cache?reset_running_requests={str(server.recompute).lower()}"
        if not (await server.ask(route))["success"] and server.recompute:
            raise Lost(f"{server.url} did not clear its prefix cache")
        await server.ask("/update_weight_version", {"new_version": label})
    finally:
        await server.ask("/resume", limit=LOOK)
