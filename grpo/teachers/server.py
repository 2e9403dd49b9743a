"""A teacher behind HTTP (teacher=server): vLLM or `python -m grpo.serve`, asked for the log-probabilities of a prompt's tokens.

A request has one row of token ids. vLLM scores prompts at temperature 1; grpo.serve with its built-in engine at any.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo.engines.vllm_server.http import MODELS, Lost, Refused, RemoteServer
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.objectives.teaching import Teaching
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Seconds, enforced
from grpo.teachers.kinds import REMEDY, Passes, Teacher

PAUSES = 1.0, 2.0, 4.0, None  # seconds after a failure, before the request is sent again; None: no more
PROBED = 256  # ids whose texts are compared


@dataclass(frozen=True)
class Likeliest:
    """The largest entries of distributions at n tokens, as a server gives them. The probability of others is unknown, here 0.

    ids: [n, k], `width` where there is none; values: log-probabilities, [n, k]; width: V.
    """

    ids: Tensor
    values: Tensor
    width: int

    def logprobs(self, at: slice | Tensor, temperature: float | Tensor, width: int) -> Tensor:
        """As `Predicted`; the server has divided by the temperature."""
        ids = self.ids[at]
        return self.values.new_full((len(ids), self.width + 1), -1e4).scatter(1, ids, self.values[at])[:, :width]


class Served(Teacher):
    """A model that one or more servers score tokens with.

    urls: their addresses; all serve the same model. student: the policy. timeout: seconds for one answer. concurrency: requests
    to one server at a time.
    """

    has_model = True

    @enforced("teacher")
    def __init__(
        self, urls: Sequence[str], student: Pretrained, timeout: Seconds = 120.0, concurrency: Count = 16
    ) -> None:
        self.servers = [RemoteServer(url.rstrip("/"), timeout, "is it vLLM, or python -m grpo.serve?") for url in urls]
        self.student, self.concurrency, self.heat, self.names = student, concurrency, 1.0, {}

    def check(self, teaching: Teaching, temperature: float) -> None:
        super().check(teaching, temperature)
        if teaching.of_distributions and not (teaching.top_k and teaching.top_of == "teacher"):
            line = "teacher=server gives a token's likeliest entries, not a whole distribution"
            raise UserError(f"{line}: set algo.teacher.top_of=teacher algo.teacher.top_k=20, or divergence=sampled")
        self.heat = temperature

    def attach(self, policy: nn.Module) -> None:
        super().attach(policy)
        self.width = policy.config.get_text_config().vocab_size
        asyncio.run(self.meet())

    async def meet(self) -> None:
        """Learn the name and the context of each server's model, and check its temperature and its tokens."""
        tokenizer = self.student.tokenizer()
        for server in self.servers:
            model = (await self.answer(server, MODELS))["data"][0]
            self.names[server], server.context = model["id"], model["max_model_len"]
            ours = (
                model["owned_by"] == "grpo" and (await self.answer(server, "/info"))["engine"] == "TransformersEngine"
            )
            if self.heat != 1 and not ours:
                line = f"rollout.sampling.temperature={self.heat}, but {server.url} scores at 1"
                fix = "set the temperature to 1, or serve the teacher by python -m grpo.serve engine=transformers"
                raise UserError(f"{line}: {fix}")
            most = min(PROBED, server.context or PROBED, len(tokenizer)) - 1
            ids = [i * len(tokenizer) // most for i in range(most)]
            for i, entries in zip(ids[1:], (await self.entries(server, ids, 0))[1:], strict=True):
                there, here = entries[str(i)].get("decoded_token") or "", tokenizer.decode([i])
                if there and there != here and "\ufffd" not in there + here:
                    line = f"the teacher at {server.url} has another tokenizer than the policy: the id {i} is {there!r}"
                    raise UserError(f"{line} there and {here!r} here; {REMEDY}")
        self.limit = min((server.context for server in self.servers if server.context), default=None)

    async def answer(self, server: RemoteServer, route: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of an answer. Raises UserError."""
        for pause in PAUSES:
            try:
                return await server.ask(route, body, post=body is not None)
            except Refused as refused:
                raise UserError(f"the teacher at {server.url} refuses a request: {refused}") from refused
            except Lost as lost:
                if pause is None:
                    raise UserError(f"the teacher does not answer, {len(PAUSES)} times: {lost}") from lost
                await asyncio.sleep(pause)

    async def entries(self, server: RemoteServer, ids: Sequence[int], top: int) -> list[dict[str, Any]]:
        """Return what vLLM writes of each token and of the `top` likeliest ones, by id; None for the first."""
        body = {"model": self.names[server], "prompt": ids, "max_tokens": 0, "echo": True, "prompt_logprobs": top}
        body |= {} if self.heat == 1 else {"prompt_temperature": self.heat}
        return (await self.answer(server, "/v1/completions", body))["choices"][0]["prompt_logprobs"]

    def scores(self, read: TokenBatch, top: int) -> list[dict[int, float]]:
        """Return log-probabilities by id for each token of the mask: its own, and those of the `top` likeliest ones."""
        limits = [asyncio.Semaphore(self.concurrency) for _ in self.servers]

        async def of_row(r: int, prompt: Sequence[int], completion: Sequence[int]) -> list[dict[str, Any]]:
            places, s = read.mask[r].nonzero()[:, 0].tolist(), r % len(limits)
            async with limits[s]:
                scored = places and await self.entries(self.servers[s], [*prompt, *completion], top)
            return [scored[len(prompt) + t] for t in places]

        async def of_rows() -> list[list[dict[str, Any]]]:
            return await asyncio.gather(*(of_row(r, *row) for r, row in enumerate(read.sequences())))

        tokens = [token for row in asyncio.run(of_rows()) for token in row]
        return [{int(i): entry["logprob"] for i, entry in token.items()} for token in tokens]

    def logprobs(self, read: TokenBatch, passes: Passes) -> Tensor:
        self.check_lengths(read)
        targets = read.ids[:, read.prompt_width :][read.mask].tolist()
        values = [token[target] for token, target in zip(self.scores(read, 0), targets, strict=True)]
        nothing = torch.zeros_like(read.rollout_logprobs)
        return nothing.masked_scatter(read.mask, nothing.new_tensor(values))

    def distributions(self, read: TokenBatch, passes: Passes) -> Likeliest:
        self.check_lengths(read)
        tokens = [sorted(token.items()) for token in self.scores(read, passes.top_k or 0)]
        widest = max(map(len, tokens), default=1)
        tokens = [[*token, *[(self.width, -1e4)] * (widest - len(token))] for token in tokens]
        ids, values = torch.tensor(tokens, device=read.ids.device).view(-1, widest, 2).unbind(-1)
        return Likeliest(ids.long().clamp(max=self.width), values, self.width)
