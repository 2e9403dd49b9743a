"""A teacher behind HTTP (teacher=server): vLLM or `python -m grpo.serve`, asked for the log-probabilities of a prompt's tokens.

A request has one row of token ids. vLLM scores prompts at temperature 1; grpo.serve with its built-in engine at any.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from grpo.engines.vllm_server.http import MODELS, Lost, Refused, RemoteServer
from grpo.models.divergence import Predicted
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.objectives.teaching import Teaching
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Seconds, enforced
from grpo.teachers.kinds import Passes, Teacher
from grpo.teachers.vocabulary import REMEDY

ATTEMPTS, PAUSE = 4, 1.0  # of one request; seconds between them
PROBED = 256  # ids whose texts are compared
COMPLETIONS = "/v1/completions"

Scores = dict[int, float]  # log-probabilities by token id: of the row's own token, and of the likeliest ones


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
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise UserError(f"teacher.urls={list(urls)} must name servers, as [http://HOST:PORT]")
        advice = "is it vLLM, or python -m grpo.serve?"
        self.servers = [RemoteServer(url.rstrip("/"), timeout, advice) for url in dict.fromkeys(urls)]
        self.student, self.concurrency, self.names, self.scored_at = student, concurrency, {}, 1.0

    def check(self, teaching: Teaching, temperature: float) -> None:
        super().check(teaching, temperature)
        if teaching.of_distributions and not (teaching.top_k and teaching.top_of == "teacher"):
            line = "teacher=server gives a token's likeliest entries, not a whole distribution"
            raise UserError(f"{line}: set algo.teacher.top_of=teacher algo.teacher.top_k=20, or divergence=sampled")
        self.scored_at = temperature

    def attach(self, policy: nn.Module) -> None:
        super().attach(policy)
        self.width = policy.config.get_text_config().vocab_size
        asyncio.run(self.meet())

    async def meet(self) -> None:
        """Learn the name and the context of each server's model, and check its tokens."""
        tokenizer = self.student.tokenizer()
        for server in self.servers:
            model = (await self.answer(server, MODELS))["data"][0]
            self.names[server.url], server.context = model["id"], model["max_model_len"]
            if self.scored_at != 1:
                try:
                    engine = (await self.answer(server, "/info"))["engine"]
                except UserError:
                    engine = "vLLM"
                if engine != "TransformersEngine":
                    line = f"rollout.sampling.temperature={self.scored_at}, but {engine} at {server.url} scores at 1"
                    fix = "set the temperature to 1, or serve the teacher by python -m grpo.serve engine=transformers"
                    raise UserError(f"{line}: {fix}")
            step = max(1, len(tokenizer) // min(PROBED, (server.context or PROBED) - 1))
            ids = [*range(0, len(tokenizer), step)][: (server.context or PROBED) - 1]
            for i, entries in zip(ids, await self.entries(server, ids, 0), strict=True):
                theirs, ours = (entries or {}).get(str(i), {}).get("decoded_token"), tokenizer.decode([i])
                if theirs and "\ufffd" not in theirs + ours and theirs != ours:
                    line = (
                        f"the teacher at {server.url} has another tokenizer than the policy: the id {i} is {theirs!r}"
                    )
                    raise UserError(f"{line} there and {ours!r} here; {REMEDY}")
        self.context = min((server.context for server in self.servers if server.context), default=None)

    async def answer(self, server: RemoteServer, route: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of an answer. A request that fails is sent again. Raises UserError."""
        for attempt in count(1):
            try:
                return await server.ask(route, body, post=body is not None)
            except Lost as lost:
                if attempt == ATTEMPTS:
                    raise UserError(f"the teacher does not answer, {attempt} times: {lost}; see its log") from lost
                await asyncio.sleep(PAUSE)
            except Refused as refused:
                raise UserError(f"the teacher at {server.url} refuses a request: {refused}") from refused

    async def entries(self, server: RemoteServer, ids: Sequence[int], top: int) -> list[dict[str, Any] | None]:
        """Return, for each token, what vLLM writes of it and of the `top` likeliest ones, by id; None for the first."""
        body = {
            "model": self.names[server.url],
            "prompt": list(ids),
            "max_tokens": 0,
            "echo": True,
            "prompt_logprobs": top,
        }
        body |= {} if self.scored_at == 1 else {"prompt_temperature": self.scored_at}
        scored = (await self.answer(server, COMPLETIONS, body))["choices"][0].get("prompt_logprobs")
        if not scored or len(scored) != len(ids):
            raise UserError(f"the teacher at {server.url} gives no prompt_logprobs: {server.advice}")
        return scored

    def scores(self, read: TokenBatch, top: int) -> list[list[Scores]]:
        """Return the scores of each row's tokens in the mask."""
        places = [mask.nonzero()[:, 0].tolist() for mask in read.mask.cpu()]
        limits = [asyncio.Semaphore(self.concurrency) for _ in self.servers]

        async def of_row(r: int, prompt: tuple[int, ...], completion: tuple[int, ...]) -> list[Scores]:
            if not places[r]:
                return []
            ids = [*prompt, *completion[: places[r][-1] + 1]]
            async with limits[r % len(limits)]:
                scored = await self.entries(self.servers[r % len(limits)], ids, top)
            mine = [scored[len(prompt) + t] for t in places[r]]
            return [{int(i): entry["logprob"] for i, entry in token.items()} for token in mine]

        async def every() -> list[list[Scores]]:
            rows: list[Coroutine] = [of_row(r, *row) for r, row in enumerate(read.sequences())]
            return await asyncio.gather(*rows)

        return asyncio.run(every())

    def logprobs(self, read: TokenBatch, passes: Passes) -> Tensor:
        targets = read.ids[:, read.prompt_width :][read.mask].tolist()
        tokens = [token for row in self.scores(read, 0) for token in row]
        values = [token[target] for token, target in zip(tokens, targets, strict=True)]
        nothing = torch.zeros_like(read.rollout_logprobs)
        return nothing.masked_scatter(read.mask, nothing.new_tensor(values))

    def distributions(self, read: TokenBatch, passes: Passes) -> Predicted:
        assert passes.top_k
        tokens = [token for row in self.scores(read, passes.top_k) for token in row]
        widest = max(map(len, tokens), default=1)
        ids = torch.full((len(tokens), widest), self.width, device=read.ids.device)
        values = torch.full(ids.shape, -1e4, device=ids.device)
        for i, token in enumerate(tokens):
            ids[i, : len(token)] = torch.tensor([min(i, self.width) for i in token])
            values[i, : len(token)] = torch.tensor([*token.values()])
        return Likeliest(ids, values, self.width)
