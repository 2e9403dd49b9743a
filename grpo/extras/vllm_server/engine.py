"""Samples from vLLM servers, on this or other machines: token ids and weights over HTTP. Does not import vLLM.

Every completion is its own request. It goes to a server with a free slot, and to another one if that fails. `routing` chooses it,
`sync` sends weights, `fleet` knows which servers have them, `launch` starts servers.
"""

import atexit
import json
import os
import secrets
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from transformers import AutoConfig

from grpo.engines.context import Bound, bounded
from grpo.engines.logprobs import is_logprob
from grpo.engines.protocol import Done, Prompts, Sampling
from grpo.engines.vllm.settings import check_args, check_head, params_of, params_of_each
from grpo.engines.weights import as_in_files, eos_token_ids
from grpo.env.tokens import Completion
from grpo.extras.network.answers import addresses
from grpo.extras.vllm_server.fleet import Fleet
from grpo.extras.vllm_server.http import GENERATE, START, Lost, Refused, RemoteServer, int_of
from grpo.extras.vllm_server.launch import Servers, by_hand, check_apart
from grpo.extras.vllm_server.pool import ATTEMPTS
from grpo.extras.vllm_server.routing import Routes
from grpo.extras.vllm_server.sync import Disk, Lora, Nccl, adapter_tensors
from grpo.models.head import has_float32_head
from grpo.models.pretrained import base_path
from grpo.system import distributed
from grpo.system.errors import UserError, error_line
from grpo.system.output.console import busy
from grpo.system.ranges import Count, Port, Seconds, Whole, enforced
from grpo.system.threads import outcome_of

Sync = Literal["disk", "lora", "nccl"]
URLS = "GRPO_VLLM_SERVERS"  # servers that the run's first process started, for the processes of the other devices


class VLLMServerEngine:
    """Samples from one or more vLLM servers.

    path: the model that is served. urls: addresses of servers that already run. sync: how weights reach them, see `Sync`.
    folder: folder for weights, which every server sees under the same path; its files are removed at the end.
    concurrency: requests to one server at a time, of all threads that sample together. timeout: seconds for a completion, or for
    a piece of weights. wait: seconds without a working server after which the run ends. recompute: see `VLLMEngine`; with
    sync=lora a completion keeps its adapter, and nothing is computed again.
    key_from: the variable of the environment that has the servers' key.
    launch: start `count` servers here; port, devices, args: see `launch.Servers`; logs: the folder of their logs; most_tokens:
    see `VLLMEngine`.
    """

    apart = True
    concurrent = True

    @enforced("engine")
    def __init__(
        self,
        path: str,
        urls: Sequence[str] = (),
        sync: Sync = "disk",
        folder: str = "weights",
        concurrency: Count = 256,
        timeout: Seconds = 600.0,
        wait: Seconds = 60.0,
        launch: bool = False,
        count: Count = 1,
        port: Port | None = None,
        devices: Sequence[Whole | str] | None = None,
        args: Mapping[str, Any] | None = None,
        logs: str = ".",
        most_tokens: Bound | None = None,
        recompute: bool = True,
        key_from: str = "VLLM_API_KEY",
    ) -> None:
        urls = [] if launch else addresses(urls, "engine.urls", "; or set engine.launch=true")
        check_args(args or {})
        path = base_path(path)
        config = AutoConfig.from_pretrained(path).get_text_config()
        self.version: int | None = None
        self.sync = sync
        self._homes: dict[int, RemoteServer] = {}  # see `routing`; empty after new weights, as the servers' caches
        self._run = secrets.token_hex(4)  # tells this run's weights from another run's of the same version
        self._folder = Path(folder).resolve() / self._run
        self._eos = eos_token_ids(path, config.eos_token_id)
        self._launched: Servers | None = None
        self._bound = bounded(args or {}, most_tokens) if launch else {}
        if launch and not rank_zero_only.rank:
            if sync == "nccl" and torch.cuda.is_available():
                check_apart(devices, torch.cuda.current_device())
            self._launched = Servers(path, sync, count, port, devices, {**(args or {}), **self._bound}, logs)
            os.environ[URLS] = " ".join(self._launched.urls)
        if launch and URLS not in os.environ:
            raise UserError("engine.launch=true needs processes that Lightning itself starts: set engine.urls instead")
        urls = os.environ[URLS].split() if launch else urls
        self._head = ((args or {}).get("hf_overrides") or {}).get("head_dtype")
        own = {"hf_overrides": {"head_dtype": self._head}} if self._head else {}
        how = f"is it vLLM, started as {by_hand(path, sync, own)}? Or set engine.launch=true"
        advice = "see its log" if launch else how
        servers = [RemoteServer(url, timeout, advice, recompute=recompute, key_from=key_from) for url in urls]
        way = Nccl(servers) if sync == "nccl" else {"disk": Disk, "lora": Lora}[sync](self._folder)
        if here := self._launched:
            for server, port in zip(servers, here.ports, strict=True):
                server.ended, server.start = partial(here.ended, port), partial(here.start, port)
        elif launch:
            wait += START  # the first process may be starting them again
        last_id = config.vocab_size - 1
        self._fleet = Fleet(
            servers=servers, wait=wait, concurrency=concurrency, way=way, last_id=last_id, head_dtype=self._head
        )
        self.in_flight = way.follows
        atexit.register(self.close)  # also if the run fails
        try:
            if self._launched:
                self._launched.start_all()
            with busy("waiting for the vLLM servers"):
                outcome_of(self._fleet.meet(START if self._launched else wait))
        except BaseException:
            self.close()
            raise

    @property
    def context(self) -> int | None:
        return self._fleet.context

    def load_weights(self, model: nn.Module, version: int) -> None:
        """Send the weights to all servers that answer; the others get them once they are back. Rank 0 sends for all ranks.

        An error is raised on all ranks. If a server is lost on the way, all ranks begin again if that is needed.
        """
        if version == self.version:
            return
        for _ in range(ATTEMPTS):
            label, failed = f"{self._run}-{version}", None
            try:
                self._push(model, label)
            except Exception as error:
                failed = error
            line = failed and (str(failed) if isinstance(failed, UserError) else error_line(failed))
            gathered = distributed.all_gather([(label, line, isinstance(failed, Lost))])  # the other ranks wait here
            if not any(lost for *_, lost in gathered):
                break
        if lines := [line for _, line, _ in gathered if line]:
            if isinstance(failed, Lost):
                failed = UserError(f"{failed}, {ATTEMPTS} times")
            raise failed or UserError(f"another rank could not send the weights: {lines[0]}")
        label = gathered[0][0]
        if distributed.rank():
            self._fleet.expect(label)
        self._run, self.version = label.rpartition("-")[0], version
        self._homes = {}  # a call that still samples keeps its own

    def _push(self, model: nn.Module, label: str) -> None:
        """Send the weights from rank 0."""
        ours = "float32" if has_float32_head(model) else None
        if ours != self._head:
            line = f"the policy's head_dtype is {ours or 'null'}, and the servers' is {self._head or 'null'}"
            raise UserError(f"{line}: leave engine.args.hf_overrides.head_dtype as it is")
        for server in self._fleet.servers:
            if server.dtypes:
                head, dtype = (getattr(torch, name, None) for name in server.dtypes)
                check_head(model, head, dtype, f"the vLLM server at {server.url}")
        tensors = adapter_tensors(model) if self.sync == "lora" else as_in_files(model)
        try:
            if distributed.rank() == 0:
                self._fleet.push(model, tensors, label)
        finally:
            if distributed.is_sharded(model):  # all ranks gather all tensors together, even if rank 0 has failed
                deque(tensors, maxlen=0)

    def sample(
        self,
        prompts: Prompts,
        sampling: Sampling,
        seeds: Sequence[int],
        done: Done | None = None,
        temperatures: Sequence[float] | None = None,
    ) -> list[Completion]:
        """Sample as `Engine.sample`. A completion that reaches the end of the context ends there, with finish "length"."""
        if self._fleet.label is None:
            raise UserError("the vLLM servers have no weights of this run: call load_weights before the first sample")
        params = params_of(prompts, sampling, self._eos, self.context, bool(self._bound))
        requests = [
            {"token_ids": list(prompt), "sampling_params": own | {"seed": seed}}
            for prompt, own, seed in zip(
                prompts, params_of_each(params, len(prompts), temperatures), seeds, strict=True
            )
        ]
        return outcome_of(self._sample(requests, done)) if requests else []

    async def _sample(self, requests: list[dict], done: Done | None) -> list[Completion]:
        routes = Routes([request["token_ids"] for request in requests], self._homes)

        async def ask(server: RemoteServer, label: str, i: int) -> Completion:
            completion = await self._complete(server, label, requests[i])
            routes.done(i, completion.ids, server)
            if done is not None:
                done(i, completion)
            return completion

        return await self._fleet.share(routes, ask)

    async def _complete(self, server: RemoteServer, label: str, request: dict[str, Any]) -> Completion:
        """Ask the server for one completion. label: the newest weights; the server reports the weights that drew each token."""
        adapter = label if self.sync == "lora" else None
        salt = {} if server.recompute else {"cache_salt": label}
        try:
            answer = await server.ask(GENERATE, {"model": adapter, **salt, **request})
        except Refused as refused:
            if refused.status in (400, 422):
                raise UserError(f"the vLLM server at {server.url} refuses a request: {refused}") from refused
            raise Lost(f"{server.url}: {refused}") from refused  # it fails, or no longer has the adapter
        with server.reading(GENERATE, answer):
            choice = answer["choices"][0]
            ids, finish = tuple(map(int_of, choice["token_ids"])), choice["finish_reason"]
            logprobs = tuple(token["logprob"] for token in (choice["logprobs"] or {"content": ()})["content"])
            if len(logprobs) != len(ids) or not all(map(is_logprob, logprobs)):
                raise ValueError(f"with log-probabilities {json.dumps(logprobs)} of {len(ids)} tokens")
            labels = [span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])]
            if len(labels) != len(ids):
                raise ValueError(f"with versions of {len(labels)} of {len(ids)} tokens")
        if finish not in ("stop", "length"):
            raise Lost(f"{server.url} ended a completion with {finish!r}")
        if adapter:  # the server's label names the base's weights, and a completion keeps its adapter
            labels = [adapter] * len(ids)
        run = label.rpartition("-")[0]
        if foreign := [theirs for theirs in labels if theirs.rpartition("-")[0] != run]:
            raise Lost(f"{server.url} has weights that this run did not send ({foreign[0]})")
        versions = tuple(int(theirs.rpartition("-")[2]) for theirs in labels)
        return Completion(ids, logprobs, finish, versions)

    def close(self) -> None:
        """Remove the weights' folder, and stop the servers that this run started."""
        atexit.unregister(self.close)
        if isinstance(self._fleet.way, Nccl):
            self._fleet.way.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):  # another run, or another rank, has files there or was here first
            self._folder.parent.rmdir()
        if self._launched:
            self._launched.close()
            os.environ.pop(URLS, None)
