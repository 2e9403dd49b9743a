"""Several vLLM servers as one: which of them answer and have the weights of now. Only those are asked for completions.

A server that fails is left out; once it answers again it is given the weights, looked at, and taken in.
"""

import asyncio
import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from torch import nn

from grpo.engines.protocol import Sampling
from grpo.engines.vllm_server.http import GENERATE, HEALTH, LOAD_ADAPTER, Lost, Refused, RemoteServer
from grpo.engines.vllm_server.nccl import Nccl
from grpo.engines.vllm_server.sync import Lora, Restart, Way
from grpo.system import distributed
from grpo.system.errors import UserError

log = logging.getLogger(__name__)

PAUSE = 1.0  # seconds between two looks at a server that is out


@dataclass(eq=False)
class Fleet:
    """It changes. way: how weights get to a server. last_id: of the model's vocabulary. wait: seconds without any server, then it
    is an error; advice: what to do about that. label: of the weights that every server must have.
    """

    servers: list[RemoteServer]
    way: Way
    last_id: int
    wait: float
    advice: str
    label: str | None = None
    met: bool = False  # some server has taken weights
    lock: threading.RLock = field(default_factory=threading.RLock)  # one thread at a time brings servers up to date

    @property
    def context(self) -> int | None:
        return min((server.context for server in self.servers if server.context), default=None)

    async def meet(self, limit: float) -> None:
        """Every server answers, within `limit` seconds, and has the routes that will be needed."""
        try:
            await asyncio.gather(*(server.answers(limit) for server in self.servers))
        except Lost as lost:
            raise UserError(f"no vLLM server answers within {limit:g} s ({lost}): {self.advice}") from lost
        await asyncio.gather(*map(self._look, self.servers))

    def push(self, model: nn.Module, label: str) -> None:
        """Give weights to all servers; the rest take them when they are back. Raises UserError where none has them in the end."""
        with self.lock:
            self.way.write(model, label)
            self.expect(label)
            try:
                asyncio.run(self.keep(until_one=True))
            finally:
                if isinstance(self.way, Nccl):
                    self.way.drop()
            self.met = True

    def expect(self, label: str) -> None:
        """Other weights are to be in the servers, maybe from another process."""
        with self.lock:
            for server in self.servers:
                server.ready = False
            self.label = label

    async def keep(self, until_one: bool = False) -> None:
        """Take in what is out, for ever, or until each has been tried and one is in. Raises UserError when none was in for `wait`
        seconds."""
        since = time.monotonic()
        while True:
            # else another thread gives them weights, and sees to it that some are in afterwards
            if ours := self.lock.acquire(blocking=False):
                try:
                    await asyncio.gather(*(self._admit(server) for server in self.servers if not server.ready))
                finally:
                    self.lock.release()
            ready = any(server.ready for server in self.servers)
            if ready and until_one:
                return
            if ready or not ours:
                since = time.monotonic()
            elif until_one and (wrong := [s.fault for s in self.servers if isinstance(s.fault, UserError)]):
                raise wrong[0]
            elif time.monotonic() - since > self.wait:
                faults = "; ".join(str(server.fault) for server in self.servers)
                raise UserError(f"no vLLM server was left for engine.wait={self.wait:g} s ({faults}): {self.advice}")
            await asyncio.sleep(PAUSE)

    async def _admit(self, server: RemoteServer) -> None:
        try:
            if not isinstance(self.way, Restart):  # which starts what does not answer
                if line := server.ended():
                    raise Lost(line)
                await server.ask(HEALTH, post=False)
            await self._bring_up_to_date(server)
            if server.fault or server.logprobs is None:
                await server.ask("/resume")  # it may have been left in the middle of something
                await self._look(server)
                server.logprobs = await logprobs_of(server, self.last_id)
        except (Lost, Refused, UserError) as error:
            # rank 0 alone gives weights: the first ones, refused by any server, end the run
            if isinstance(error, UserError) and not self.met and not distributed.rank():
                raise
            server.out(error)
        else:
            if server.fault:
                log.warning("the vLLM server at %s is back", server.url)
            server.ready, server.fault = True, None

    async def _bring_up_to_date(self, server: RemoteServer) -> None:
        label = self.label
        with suppress(Lost):  # a server that is to be started
            if label in await server.labels():
                return
        if distributed.rank():
            raise Lost(f"{server.url} has not got the weights of now")
        try:
            await self.way.give(server, label)
        except Refused as refused:
            await server.ask(HEALTH, post=False)  # a dead engine says no too, but is only lost
            line = f"the vLLM server at {server.url} does not take the weights ({refused}): {self.way.needs}"
            raise UserError(line) from refused
        if label not in await server.labels():
            raise Lost(f"{server.url} does not say that it took the weights")

    async def _look(self, server: RemoteServer) -> None:
        """Whether it has what we need, and how long its context is."""
        await server.labels()
        for route in [GENERATE, LOAD_ADAPTER] if isinstance(self.way, Lora) else [GENERATE]:
            with suppress(Refused):  # there it is, but it wants arguments
                await server.ask(route, {})


async def logprobs_of(server: RemoteServer, last_id: int) -> str:
    """The kind of log-probabilities that a server gives, found by asking: "exact", log softmax(logits / temperature) over the
    whole vocabulary; "raw", the same at temperature 1; "processed", over what the filters left."""
    gaps = []
    for temperature in (1.0, 0.5):
        params = {"max_tokens": 1, "temperature": temperature, "top_k": 1, "logprobs": 5, "detokenize": False}
        given = await server.ask(GENERATE, {"token_ids": [last_id], "sampling_params": params})
        best = [token["logprob"] for token in given["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
        gaps.append(max(best) - min(best))
    if gaps[0] > 1000:  # what is filtered out has -9999
        return "processed"
    return "raw" if gaps[1] < 1.5 * gaps[0] else "exact"


def check_exact(server: RemoteServer, sampling: Sampling) -> None:
    """Refuse what would come with other log-probabilities than `Engine.sample` promises."""
    filters = sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty
    wrong = {"exact": False, "raw": sampling.temperature not in (0, 1), "processed": filters != (1, 0, 0, 1)}
    if wrong[server.logprobs] or (sampling.guided and server.logprobs != "exact"):
        raise UserError(
            f"the vLLM server at {server.url} gives {server.logprobs} log-probabilities, with this sampling not those of the "
            'policy: start it with --logprobs-mode raw_logprobs, --weight-transfer-config \'{"backend": "grpo"}\', '
            "VLLM_USE_V2_MODEL_RUNNER=0 in its environment, and this package beside it"
        )
