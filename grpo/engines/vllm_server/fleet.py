"""Keeps track of several vLLM servers. Only servers that answer and hold the newest weights are asked for completions.

A server that fails is left out. Once it answers again, it gets the weights, is checked, and is used again. If this process
started it, and it has ended, it is started again.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from torch import nn

from grpo.engines.vllm_server.http import GENERATE, HEALTH, LOAD_ADAPTER, LOOK, Lost, Refused, RemoteServer
from grpo.engines.vllm_server.launch import START
from grpo.engines.vllm_server.sync import Behind, Lora, Named, Way
from grpo.system import distributed
from grpo.system.errors import UserError

log = logging.getLogger(__name__)

PAUSE = 1.0  # seconds between two checks of a server that is left out


@dataclass(eq=False)
class Fleet:
    """The servers of a run. Mutable: servers fail and come back, and the label changes.

    way: how weights reach a server. last_id: the largest id of the model's vocabulary. wait: seconds without any ready server
    before an error is raised. label: the weights that every server must hold.
    """

    servers: list[RemoteServer]
    way: Way
    last_id: int
    wait: float
    label: str | None = None
    met: bool = False  # a server has taken weights
    lock: threading.RLock = field(default_factory=threading.RLock)  # one thread at a time updates servers

    @property
    def context(self) -> int | None:
        """The smallest context among the servers, in tokens; None if no server has reported one."""
        return min((server.context for server in self.servers if server.context), default=None)

    async def meet(self, limit: float) -> None:
        """Wait until every server answers and has the routes that are needed. Raises UserError after `limit` seconds."""
        try:
            await asyncio.gather(*(server.answers(limit) for server in self.servers))
        except Lost as lost:
            raise UserError(f"no vLLM server answers within {limit:g} s ({lost}): {self.servers[0].advice}") from lost
        await asyncio.gather(*map(self._look, self.servers))

    def push(self, model: nn.Module, tensors: Iterable[Named], label: str) -> None:
        """Send the model's weights, which are `tensors`, to all servers; absent ones get them once they are back.

        Raises UserError if no server takes them, and Lost if they must be sent again, from the start.
        """
        with self.lock:
            self.way.write(model, tensors, label)
            self.expect(label)
            asyncio.run(self.keep(until_one=True))
            self.met = True

    def expect(self, label: str) -> None:
        """Require the weights `label`, which another process may send: no server is ready until it has them."""
        with self.lock:
            for server in self.servers:
                server.ready = False
            self.label = label

    async def keep(self, until_one: bool = False) -> None:
        """Update servers that are left out, forever, or with until_one until each was tried and one is ready. Raises UserError
        if no server was ready for `wait` seconds, while none was loading its model."""
        since = time.monotonic()
        while True:
            # otherwise another thread updates them, or waits until one is ready, and judges how long that takes
            if ours := self.lock.acquire(blocking=False):
                try:
                    await asyncio.gather(*(self._admit(server) for server in self.servers if not server.ready))
                finally:
                    self.lock.release()
            ready = any(server.ready for server in self.servers)
            if ready and until_one:
                return
            loads = any(time.monotonic() < server.loads_until for server in self.servers)
            if ready or loads:
                since = time.monotonic()
            elif not ours:
                pass
            elif until_one and (behind := [s.fault for s in self.servers if isinstance(s.fault, Behind)]):
                raise behind[0]
            elif until_one and (wrong := [s.fault for s in self.servers if isinstance(s.fault, UserError)]):
                raise wrong[0]
            elif time.monotonic() - since > self.wait:
                faults = "; ".join(str(server.fault) for server in self.servers)
                raise UserError(f"no vLLM server for engine.wait={self.wait:g} s ({faults}): {self.servers[0].advice}")
            await asyncio.sleep(PAUSE)

    async def _admit(self, server: RemoteServer) -> None:
        try:
            if line := server.ended():
                server.start_again(line, START)
                raise Lost(line)
            await server.look(HEALTH)
            server.loads_until = 0.0
            await self._bring_up_to_date(server)
            if server.fault or not server.exact:
                await server.ask("/resume", limit=LOOK)  # it may still be paused by an interrupted update
                await self._look(server)
                await check_exact(server, self.last_id)
                server.exact = True
        except (Lost, Refused, UserError) as error:
            # only rank 0 sends weights; if any server refuses the first ones, the run ends
            if isinstance(error, UserError) and not self.met and not distributed.rank():
                raise
            server.out(error)
        else:
            if server.fault:
                log.warning("the vLLM server at %s is back", server.url)
            server.ready, server.fault = True, None

    async def _bring_up_to_date(self, server: RemoteServer) -> None:
        label = self.label
        if label in await server.labels():
            return
        if distributed.rank():
            raise Lost(f"{server.url} does not have the newest weights yet")
        try:
            await self.way.give(server, label)
        except Refused as refused:
            await server.look(HEALTH)  # a dead engine refuses too, and then this raises Lost
            line = f"the vLLM server at {server.url} refuses the weights ({refused}): is it the model of model.path"
            needs = "does it see engine.folder, is engine.args.max_lora_rank enough for an adapter"
            raise UserError(f"{line}, {needs}, {server.advice}") from refused
        if label not in await server.labels():
            raise Lost(f"{server.url} does not report the new weights")

    async def _look(self, server: RemoteServer) -> None:
        """Read the server's context, and raise UserError if it lacks a route that is needed."""
        await server.labels()
        for route in [GENERATE, LOAD_ADAPTER] if isinstance(self.way, Lora) else [GENERATE]:
            with suppress(Refused):  # the route exists: it refuses only the empty request
                await server.ask(route, {})


async def check_exact(server: RemoteServer, last_id: int) -> None:
    """Raise UserError unless a server's log-probabilities are log softmax(logits / temperature) over the whole vocabulary, found
    by two test requests: others stay as they are at temperature 1, or are -9999 for tokens that a filter excludes."""
    gaps = []
    for temperature in (1.0, 0.5):
        params = {"max_tokens": 1, "temperature": temperature, "top_k": 1, "logprobs": 5, "detokenize": False}
        answer = await server.ask(GENERATE, {"token_ids": [last_id], "sampling_params": params})
        best = [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
        gaps.append(max(best) - min(best))
    if gaps[0] > 1000 or gaps[1] < 1.5 * gaps[0]:
        line = f"the vLLM server at {server.url} gives log-probabilities of another temperature, or after filters"
        raise UserError(f"{line}: {server.advice}")
