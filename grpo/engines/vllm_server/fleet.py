"""Several vLLM servers as one: which of them answer and have the weights of now. Only those are asked for completions.

A server that fails is left out; once it answers again it is given the weights, looked at, and taken in.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import httpx2
from torch import nn

from grpo.engines.protocol import Sampling
from grpo.engines.vllm_server.http import GENERATE, HEALTH, LOAD_ADAPTER, MODELS, Lost, Refused, answers, ask, client
from grpo.engines.vllm_server.nccl import Nccl
from grpo.engines.vllm_server.sync import Lora, Restart, Way, label_of
from grpo.system import distributed
from grpo.system.errors import UserError

log = logging.getLogger(__name__)

PAUSE = 1.0  # seconds between two looks at a server that is out


@dataclass(eq=False)
class Server:
    """It changes. ready: it is in. fault: why it is out. context: its limit of tokens. logprobs: see `logprobs_of`."""

    url: str
    ready: bool = False
    fault: Exception | None = None
    context: int | None = None
    logprobs: str | None = None

    def out(self, fault: Exception) -> None:
        if self.ready or self.fault is None:
            log.warning("a vLLM server is left out until it is back: %s", fault)
        self.ready, self.fault = False, fault


@dataclass(eq=False)
class Fleet:
    """It changes. way: how weights get to a server. last_id: of the model's vocabulary. wait: seconds without any server, then it
    is an error; advice: what to do about that. ended: one line about a server that will not come back by itself, else None.
    """

    urls: Iterable[str]
    way: Way
    last_id: int
    timeout: float
    wait: float
    advice: str
    ended: Callable[[str], str | None]

    def __post_init__(self) -> None:
        self.servers = [Server(url.rstrip("/")) for url in dict.fromkeys(self.urls)]
        self.label: str | None = None  # of the weights that every server must have
        self.lock = threading.RLock()  # one thread at a time brings servers up to date
        self.met = False

    @property
    def context(self) -> int | None:
        return min((server.context for server in self.servers if server.context), default=None)

    async def meet(self, limit: float) -> None:
        """Every server answers, within `limit` seconds, and has the routes that will be needed."""
        async with client(self.timeout) as http:
            try:
                await asyncio.gather(
                    *(answers(http, s.url, limit, lambda s=s: self.ended(s.url)) for s in self.servers)
                )
            except Lost as lost:
                raise UserError(f"no vLLM server answers within {limit:g} s ({lost}): {self.advice}") from lost
            await asyncio.gather(*(self._look(http, server) for server in self.servers))

    def push(self, model: nn.Module, label: str) -> None:
        """Give weights to all servers; the rest take them when they are back. Raises UserError where none has them in the end."""
        with self.lock:
            self.way.write(model, label)
            for server in self.servers:
                server.ready = False
            self.label = label
            try:
                asyncio.run(self.keep(until_one=True))
            finally:
                if isinstance(self.way, Nccl):
                    self.way.drop()
            self.met = True

    def expect(self, label: str) -> None:
        """The servers have been given other weights, by another process."""
        with self.lock:
            for server in self.servers:
                server.ready = False
            self.label, self.met = label, True

    async def keep(self, until_one: bool = False) -> None:
        """Take in what is out, for ever, or until each has been tried and one is in. Raises UserError when none was in for `wait`
        seconds."""
        since = time.monotonic()
        async with client(self.timeout) as http:
            while True:
                if self.lock.acquire(blocking=False):
                    try:
                        await asyncio.gather(
                            *(self._admit(http, server) for server in self.servers if not server.ready)
                        )
                    finally:
                        self.lock.release()
                else:  # another thread gives them weights, and sees to it that some are in afterwards
                    since = time.monotonic()
                if any(server.ready for server in self.servers):
                    if until_one:
                        return
                    since = time.monotonic()
                elif until_one and (wrong := [s.fault for s in self.servers if isinstance(s.fault, UserError)]):
                    raise wrong[0]
                elif time.monotonic() - since > self.wait:
                    faults = "; ".join(str(server.fault) for server in self.servers)
                    raise UserError(
                        f"no vLLM server was left for engine.wait={self.wait:g} s ({faults}): {self.advice}"
                    )
                await asyncio.sleep(PAUSE)

    async def _admit(self, http: httpx2.AsyncClient, server: Server) -> None:
        url, label = server.url, self.label
        try:
            if not isinstance(self.way, Restart):  # which starts what does not answer
                if line := self.ended(url):
                    raise Lost(line)
                await ask(http, url, HEALTH, post=False)
            if not await self.way.holds(http, url, label):
                await self._give(http, url, label)
                if not await self.way.holds(http, url, label):
                    raise Lost(f"{url} does not say that it took the weights")
            if server.fault or server.logprobs is None:
                await ask(http, url, "/resume")  # it may have been left in the middle of something
                await self._look(http, server)
                server.logprobs = await logprobs_of(http, url, self.last_id)
        except (Lost, Refused, UserError) as error:
            if isinstance(error, UserError) and not self.met:
                raise
            server.out(error)
        else:
            if server.fault:
                log.warning("the vLLM server at %s is back", url)
            server.ready, server.fault = True, None

    async def _give(self, http: httpx2.AsyncClient, url: str, label: str) -> None:
        if distributed.rank():
            raise Lost(f"{url} has not got the weights of now")
        try:
            await self.way.give(http, url, label)
        except Refused as refused:
            await ask(http, url, HEALTH, post=False)  # a dead engine says no too, but is only lost
            raise UserError(
                f"the vLLM server at {url} does not take the weights ({refused}): {self.way.needs}"
            ) from refused

    async def _look(self, http: httpx2.AsyncClient, server: Server) -> None:
        """Whether it has what we need, and how long its context is."""
        server.context = (await ask(http, server.url, MODELS, post=False))["data"][0]["max_model_len"]
        await label_of(http, server.url)
        for route in [GENERATE, LOAD_ADAPTER] if isinstance(self.way, Lora) else [GENERATE]:
            with suppress(Refused):  # there it is, but it wants arguments
                await ask(http, server.url, route, {})


async def logprobs_of(http: httpx2.AsyncClient, url: str, last_id: int) -> str:
    """The kind of log-probabilities that a server gives, found by asking: "exact", log softmax(logits / temperature) over the
    whole vocabulary; "raw", the same at temperature 1; "processed", over what the filters left."""
    gaps = []
    for temperature in (1.0, 0.5):
        params = {"max_tokens": 1, "temperature": temperature, "top_k": 1, "logprobs": 5, "detokenize": False}
        given = await ask(http, url, GENERATE, {"token_ids": [last_id], "sampling_params": params})
        best = [token["logprob"] for token in given["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
        gaps.append(max(best) - min(best))
    if gaps[0] > 1000:  # what is filtered out has -9999
        return "processed"
    return "raw" if gaps[1] < 1.5 * gaps[0] else "exact"


def check_exact(server: Server, sampling: Sampling) -> None:
    """Refuse what would come with other log-probabilities than `Engine.sample` promises."""
    filtered = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0 or sampling.repetition_penalty != 1
    wrong = {
        "raw": sampling.temperature not in (0, 1) or bool(sampling.guided),
        "processed": filtered or bool(sampling.guided),
    }
    if wrong.get(server.logprobs, False):
        raise UserError(
            f"the vLLM server at {server.url} tells {server.logprobs} log-probabilities, with this sampling not those of the "
            'policy: start it with --logprobs-mode raw_logprobs, --weight-transfer-config \'{"backend": "grpo"}\', '
            "VLLM_USE_V2_MODEL_RUNNER=0 in its environment, and this package beside it"
        )
