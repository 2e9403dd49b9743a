"""Sends weights from the trainer's GPU to the GPUs of vLLM servers, by vLLM's own NCCL backend.

Never run so far, because it needs two GPUs: written from vLLM's source code.
"""

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from grpo.engines.vllm.settings import INSTALL
from grpo.engines.vllm_server.http import Lost, RemoteServer
from grpo.engines.vllm_server.sync import Named, paused
from grpo.system.deadline import deadline
from grpo.system.errors import UserError


class Nccl:
    """Sends weights to one server after another, each in its own NCCL group. Methods: see `sync.Way`.

    A server that was away gets no weights before the next version, since the policy may be changing by then. With an adapter, the
    merged weights are a second copy of the model on the trainer's GPU while they are sent.
    """

    follows = True
    needs = 'was it started with --weight-transfer-config \'{"backend": "grpo_nccl"}\'?'

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UserError("engine.sync=nccl sends from GPU to GPU, and there is no GPU: set engine.sync=disk")
        try:
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: F401
        except ImportError as error:
            raise UserError(f"engine.sync=nccl needs vLLM in the trainer's environment ({error}): {INSTALL}") from error
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.senders: dict[str, Any] = {}  # vLLM's trainer engines, by url
        self.turn = threading.Lock()

    def write(self, model: nn.Module, tensors: Iterable[Named], label: str) -> None:
        self.device = next(model.parameters()).device
        self.tensors = [(name, tensor.detach()) for name, tensor in tensors]
        torch.cuda.synchronize(self.device)  # vLLM packs on its own CUDA streams

    async def give(self, server: RemoteServer, label: str) -> None:
        if not self.tensors:
            raise Lost(f"{server.url} was away when weights were sent, and gets the next ones")
        workers = (await server.ask("/get_world_size", post=False))["world_size"]
        async with paused(server, label):
            await asyncio.to_thread(self._send, server.url, workers, server.timeout)

    def _send(self, url: str, workers: int, timeout: float) -> None:
        # the current device is set per thread; two groups on one device may deadlock
        hangs = deadline(timeout, f"sending weights to {url} by NCCL", "see the server's log, or set engine.sync=disk")
        with self.turn, hangs, torch.cuda.device(self.device):
            try:
                if url not in self.senders:
                    self.senders[url] = self._sender(url, workers)
                self.senders[url].send_weights()
            except Exception as error:  # the group cannot be used any more
                if sender := self.senders.pop(url, None):
                    sender.shutdown()
                raise Lost(f"{url}: {type(error).__name__}: {error}") from error

    def _sender(self, url: str, workers: int) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_ip, get_open_port

        way = self

        class Source(WeightSource):
            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in way.tensors]

            def __iter__(self):
                return iter(way.tensors)

        group = NCCLTrainerInitInfo(
            rank=0, master_address=get_ip(), master_port=get_open_port(), world_size=1 + workers
        )
        return WeightTransferTrainerFactory.trainer_init(group, client=HTTPVLLMWeightSyncClient(url), source=Source())

    def drop(self) -> None:
        """Forget the weights, once they are sent."""
        self.tensors = []

    def close(self) -> None:
        """Close all groups."""
        for sender in self.senders.values():
            sender.shutdown()
