"""Keeps track of several vLLM servers. Only servers that answer and hold the newest weights are asked for completions.

A server that is back (`pool`) gets the weights, and is checked.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from grpo.extras.vllm_server.http import GENERATE, HEALTH, INFO, LOAD_ADAPTER, LOOK, Lost, Refused, RemoteServer
from grpo.extras.vllm_server.pool import ServerPool
from grpo.extras.vllm_server.sync import Behind, Lora, Named, Way
from grpo.system import distributed
from grpo.system.errors import UserError
from grpo.system.threads import outcome_of


@dataclass(eq=False, kw_only=True)
class Fleet(ServerPool):
    """The servers that sample for a run.

    way: how weights reach a server. last_id: the largest id of the model's vocabulary. head_dtype: of the policy's head, if it
    has its own; a server that this process did not start must have it too.
    """

    called = "vLLM server"
    key = "engine"
    final = (Behind, UserError)

    way: Way
    last_id: int
    head_dtype: str | None = None

    def push(self, model: nn.Module, tensors: Iterable[Named], label: str) -> None:
        """Send the model's weights, which are `tensors`, to all servers; absent ones get them once they are back.

        Raises UserError if no server takes them, and Lost if they must be sent again, from the start.
        """
        with self.lock:
            self.way.write(model, tensors, label)
            self.expect(label)
            outcome_of(self.keep(until_one=True))
            self.met = True

    def expect(self, label: str) -> None:
        """Require the weights `label`, which another process may send: no server is ready until it has them."""
        with self.lock:
            for server in self.servers:
                server.ready = False
            self.label = label

    async def prepare(self, server: RemoteServer) -> None:
        """Give a server the newest weights, and check one that was away."""
        await self._bring_up_to_date(server)
        if server.fault or not server.exact:
            await server.ask("/resume", limit=LOOK)  # it may still be paused by an interrupted update
            await self.examine(server)
            await check_exact(server, self.last_id)
            server.exact = True

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

    async def examine(self, server: RemoteServer) -> None:
        """Read the server's context, and raise UserError if it lacks a route that is needed."""
        await server.labels()
        for route in [GENERATE, LOAD_ADAPTER] if isinstance(self.way, Lora) else [GENERATE]:
            with suppress(Refused):  # the route exists: it refuses only the empty request
                await server.ask(route, {})
        if server.start is None:
            server.dtypes = head, _ = await dtypes_of(server)
            if self.head_dtype not in (None, head):
                line = (
                    f"the vLLM server at {server.url} computes the head in {head}, and the policy in {self.head_dtype}"
                )
                raise UserError(f"{line}: {server.advice}")


async def dtypes_of(server: RemoteServer) -> tuple[str, str]:
    """Return the number types of a server's head and of its other layers. To answer, it takes seconds to list its packages."""
    answer = await server.ask(INFO, post=False)
    with server.reading(INFO, answer):
        config = answer["vllm_config"]["model_config"]
        dtype = config["dtype"].rpartition(".")[2]
        return (config["hf_overrides"] or {}).get("head_dtype") or dtype, dtype


async def check_exact(server: RemoteServer, last_id: int) -> None:
    """Raise UserError unless a server's log-probabilities are log softmax(logits / temperature) over the whole vocabulary, found
    by two test requests: others stay as they are at temperature 1, or are -9999 for tokens that a filter excludes."""
    gaps = []
    for temperature in (1.0, 0.5):
        params = {"max_tokens": 1, "temperature": temperature, "top_k": 1, "logprobs": 5, "detokenize": False}
        answer = await server.ask(GENERATE, {"token_ids": [last_id], "sampling_params": params})
        with server.reading(GENERATE, answer):
            best = [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
            gaps.append(max(best) - min(best))
    if gaps[0] > 1000 or gaps[1] < 1.5 * gaps[0]:
        line = f"the vLLM server at {server.url} gives log-probabilities of another temperature, or after filters"
        raise UserError(f"{line}: {server.advice}")
