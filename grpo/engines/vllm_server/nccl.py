"""Sends weights to all vLLM servers at once, from the trainer's device: one process group of rank 0 and all their workers.

Each bucket is one broadcast, and the servers check it. On CPUs gloo takes NCCL's place. NCCL has never run: it needs two GPUs.
"""

import asyncio
import socket
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from grpo.engines.vllm_server.http import HEALTH, Lost, Refused, RemoteServer
from grpo.engines.vllm_server.sync import Named, begin_update, paused
from grpo.engines.weights import buckets, checksum
from grpo.system import distributed
from grpo.system.deadline import deadline
from grpo.system.errors import UserError


class Behind(Lost):
    """A server answers, but must wait until weights are sent to all servers at once."""


class Nccl:
    """Sends weights to all servers that answer. Methods: see `sync.Way`. The group is made anew if a server has come or gone.

    A server that was away gets no weights before the next version, since the policy may be changing by then.
    """

    follows = True
    needs = 'was it started with --weight-transfer-config \'{"backend": "grpo"}\', and does it reach the trainer\'s machine?'

    def __init__(self, servers: Sequence[RemoteServer]) -> None:
        self.servers = servers
        self.group: Any = None
        self.members: list[str] = []  # urls
        self.label: str | None = None  # of the weights that all members took

    def write(self, model: nn.Module, tensors: Iterable[Named], label: str) -> None:
        """Send the weights. Raises Lost if a server is lost meanwhile; those that are left can take them again."""
        try:
            asyncio.run(self._send(next(model.parameters()).device, tensors, label))
        except Refused as refused:
            raise Lost(f"a vLLM server refuses to pause or to resume: {refused}") from refused

    async def give(self, server: RemoteServer, label: str) -> None:
        raise Behind(f"{server.url} was away when weights were sent, and gets the next ones")

    async def _send(self, device: torch.device, tensors: Iterable[Named], label: str) -> None:
        there = [server for server in self.servers if await self._present(server)]
        if not there:
            return
        # with mode=keep unfinished completions wait, and continue with the new weights
        async with AsyncExitStack() as pauses:
            for server in there:
                await pauses.enter_async_context(paused(server, label))
            try:
                await self._meet(there, device)
                await asyncio.gather(*map(begin_update, there))
                for bucket in buckets(tensors):
                    flat, layout = flattened(bucket)
                    info = {"update_info": {**layout, "checksum": checksum(bucket)}}
                    sent = asyncio.to_thread(self._broadcast, flat.to(device), there[0].timeout)
                    await asyncio.gather(sent, *(server.ask("/update_weights", info) for server in there))
                await asyncio.gather(*(server.ask("/finish_weight_update") for server in there))
            except Exception as error:  # the group cannot be used any more, and servers may wait in it
                self.close()
                refused = [server for server in there if isinstance(error, Refused) and await self._present(server)]
                if len(refused) == len(there):
                    raise UserError(f"the vLLM servers refuse the weights ({error}): {self.needs}") from error
                raise error if isinstance(error, Lost | UserError) else Lost(f"weights: {error}") from error
        self.label = label

    async def _present(self, server: RemoteServer) -> bool:
        """Return whether a server answers. One that has forgotten the last weights has been restarted and left the group."""
        try:
            await server.ask(HEALTH, post=False)
            if (await server.labels())[0] != self.label:
                self.members = []
        except (Lost, Refused):
            return False
        return True

    async def _meet(self, there: list[RemoteServer], device: torch.device) -> None:
        """Make a group of this process, its rank 0, and the workers of these servers, unless there is one."""
        if self.members == (urls := [server.url for server in there]):
            return
        self.close()
        workers = [(await server.ask("/get_world_size", post=False))["world_size"] for server in there]
        first, limit = list(accumulate(workers, initial=1)), there[0].timeout
        kind = "nccl" if device.type == "cuda" else "gloo"
        listener = socket.create_server((max(map(own_address, urls), key=lambda a: not a.startswith("127.")), 0))
        address, port = listener.getsockname()
        group = {"address": address, "port": port, "size": first[-1], "kind": kind, "timeout": limit}
        joining = asyncio.to_thread(distributed.join_group, rank=0, listener=listener, device=device, **group)
        invited = [
            server.ask("/init_weight_transfer_engine", {"init_info": group | {"rank": rank}})
            for server, rank in zip(there, first, strict=False)
        ]
        self.group, *_ = await asyncio.gather(joining, *invited)
        self.members = urls

    def _broadcast(self, flat: Tensor, limit: float) -> None:
        with deadline(2 * limit, "sending weights to the vLLM servers", "see their logs, or set engine.sync=disk"):
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
