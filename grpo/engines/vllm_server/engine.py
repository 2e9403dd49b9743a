"""VLLM as servers, on this machine or on others: token ids and weights over HTTP. Imports no vLLM.

Every completion is a request of its own, given to whichever server has room, and to another one where that fails. `sync` is
how weights get there, `fleet` knows which servers have them, `launch` starts servers.
"""

import asyncio
import atexit
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from transformers import AutoConfig

from grpo.engines.protocol import Sampling
from grpo.engines.vllm.settings import params_of
from grpo.engines.vllm_server.fleet import Fleet, check_exact
from grpo.engines.vllm_server.http import GENERATE, Lost, Refused, RemoteServer
from grpo.engines.vllm_server.launch import START, Servers, by_hand
from grpo.engines.vllm_server.nccl import Nccl
from grpo.engines.vllm_server.sync import Disk, Lora, Restart
from grpo.engines.weights import eos_token_ids
from grpo.env.tokens import Completion
from grpo.models.pretrained import base_path
from grpo.system import distributed
from grpo.system.errors import UserError, oneof

SYNCS = ("disk", "lora", "nccl", "restart")
ATTEMPTS = 5  # of one completion
URLS = "GRPO_VLLM_SERVERS"  # what the first process of a run has started, for those of the other devices


class VLLMServerEngine:
    """path: the model that is served. urls: of servers that run already. sync: how weights get there, one of SYNCS.

    folder: for weights, seen by every server under the same name; what is written there goes at the end. concurrency: completions
    that one server is asked for at once. timeout: seconds for a completion, or for a piece of weights. wait: seconds without any
    server before the run ends. launch: start `count` servers here, see `launch.Servers`; logs: the folder of their logs.
    """

    apart = True

    def __init__(
        self,
        path: str,
        urls: Sequence[str] = (),
        sync: str = "disk",
        folder: str = "weights",
        concurrency: int = 256,
        timeout: float = 600.0,
        wait: float = 60.0,
        launch: bool = False,
        count: int = 1,
        port: int | None = None,
        devices: Sequence[int | str] | None = None,
        args: Mapping[str, Any] | None = None,
        logs: str = ".",
    ) -> None:
        oneof("engine.sync", sync, SYNCS)
        if sync == "restart" and not launch:
            raise UserError("engine.sync=restart starts its own servers: set engine.launch=true, or engine.sync=disk")
        for name, value in {"concurrency": concurrency, "timeout": timeout, "wait": wait}.items():
            if value <= 0:
                raise UserError(f"engine.{name}={value} must be above 0")
        if not launch and not (urls and all(url.startswith(("http://", "https://")) for url in urls)):
            raise UserError(f"engine.urls={list(urls)} must name servers, as [http://HOST:PORT]; or engine.launch=true")
        path = base_path(path)
        config = AutoConfig.from_pretrained(path).get_text_config()
        self.version: int | None = None
        self.sync, self.concurrency = sync, concurrency
        self._run = secrets.token_hex(4)  # or another run's weights of the same version would look like ours
        self._folder = Path(folder).resolve() / self._run
        self._eos = eos_token_ids(path, config.eos_token_id)
        self._launched: Servers | None = None
        if launch and not rank_zero_only.rank:
            self._launched = Servers(path, sync, count, port, devices, args, logs)
            os.environ[URLS] = " ".join(self._launched.urls)
        if launch and URLS not in os.environ:
            raise UserError("engine.launch=true is for devices that Lightning itself starts: here set engine.urls")
        urls = os.environ[URLS].split() if launch else [url.rstrip("/") for url in urls]
        ways = {"disk": Disk, "lora": Lora, "nccl": lambda _: Nccl(), "restart": lambda at: Restart(at, self._launched)}
        way = ways[sync](self._folder)
        advice = "see their logs" if launch else f"start one with {by_hand(path, sync)}, or set engine.launch=true"
        ended = self._launched.ended if self._launched else lambda url: None
        servers = [RemoteServer(url, timeout, partial(ended, url)) for url in dict.fromkeys(urls)]
        self._fleet = Fleet(servers, way, config.vocab_size - 1, wait, advice)
        self.in_flight = way.follows
        atexit.register(self.close)  # also where a run fails
        if sync == "restart":  # which starts them when there are weights
            return
        try:
            if self._launched:
                self._launched.start_all()
            asyncio.run(self._fleet.meet(START if self._launched else wait))
        except BaseException:
            self.close()
            raise

    @property
    def context(self) -> int | None:
        return self._fleet.context

    def load_weights(self, model: nn.Module, version: int) -> None:
        """Gives the weights to all servers that answer; the others take them once they are back. Rank 0 does it for all."""
        if version == self.version:
            return
        label, failed = f"{self._run}-{version}", None
        if distributed.rank() == 0:
            try:
                self._fleet.push(model, label)
            except UserError as error:
                failed = error
        label, failed = distributed.all_gather([(label, failed)])[0]  # the others wait here
        if failed:
            raise failed
        if distributed.rank():
            self._fleet.expect(label)
        self._run, self.version = label.rpartition("-")[0], version

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """See `Engine.sample`. A completion that meets the end of the context ends there, with finish "length"."""
        if self._fleet.label is None:
            raise UserError(
                "the vLLM servers have no weights of this run yet: load_weights comes before the first sample"
            )
        params = params_of(prompts, sampling, self._eos, self.context)
        requests = [
            {"token_ids": list(prompt), "sampling_params": params | {"seed": seed}}
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return asyncio.run(self._sample(requests, sampling, done)) if requests else []

    async def _sample(self, requests: list[dict], sampling: Sampling, done: Callable | None) -> list[Completion]:
        completions: list[Completion | None] = [None] * len(requests)
        failures: Counter[int] = Counter()
        waiting: asyncio.Queue[int] = asyncio.Queue()
        for i in range(len(requests)):
            waiting.put_nowait(i)

        async def work(server: RemoteServer) -> None:
            """One completion after the other, while the server is in."""
            while True:
                while not server.ready:
                    await asyncio.sleep(0.1)
                check_exact(server, sampling)
                i = await waiting.get()
                label = self._fleet.label
                if server.ready:  # looked at after the label: whoever changes that takes the server out before
                    try:
                        completions[i] = await self._complete(server, label, requests[i])
                        if done is not None:
                            done(i, completions[i])
                    except Lost as lost:
                        server.out(lost)
                        failures[i] += 1
                        if failures[i] == ATTEMPTS:
                            raise UserError(f"a completion failed {ATTEMPTS} times, the last time so: {lost}") from lost
                if completions[i] is None:
                    waiting.put_nowait(i)
                waiting.task_done()

        each = range(min(self.concurrency, len(requests)))
        workers = [work(server) for _ in each for server in self._fleet.servers]  # in turn: the first ones spread
        tasks = [asyncio.ensure_future(task) for task in [waiting.join(), self._fleet.keep(), *workers]]
        over, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # asyncio.run cancels the others
        if errors := [error for task in over if (error := task.exception())]:
            raise errors[0]
        return completions

    async def _complete(self, server: RemoteServer, label: str, request: dict[str, Any]) -> Completion:
        """label: of the weights of now; those that drew the tokens are what the server says."""
        adapter = label if self.sync == "lora" else None
        try:
            given = await server.ask(GENERATE, {"model": adapter, **request})
        except Refused as refused:
            if refused.status in (400, 422):
                raise UserError(f"the vLLM server at {server.url} does not take a request: {refused}") from refused
            raise Lost(f"{server.url}: {refused}") from refused  # it fails, or has no such adapter any more
        choice = given["choices"][0]
        ids, finish = tuple(choice["token_ids"]), choice["finish_reason"]
        if finish not in ("stop", "length"):
            raise Lost(f"{server.url} ended a completion with {finish!r}")
        labels = [span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])]
        if adapter:  # the servers' own label is of the base, and a completion keeps its adapter
            labels = [adapter] * len(ids)
        run = label.rpartition("-")[0]
        if foreign := [theirs for theirs in labels if theirs.rpartition("-")[0] != run]:
            raise Lost(f"{server.url} has weights that this run did not give it ({foreign[0]})")
        versions = tuple(int(theirs.rpartition("-")[2]) for theirs in labels)
        logprobs = tuple(token["logprob"] for token in choice["logprobs"]["content"])
        return Completion(ids, logprobs, finish, versions)

    def close(self) -> None:
        atexit.unregister(self.close)
        if isinstance(self._fleet.way, Nccl):
            self._fleet.way.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._folder.parent.is_dir() and not any(self._folder.parent.iterdir()):
            self._folder.parent.rmdir()
        if self._launched:
            self._launched.close()
            os.environ.pop(URLS, None)
