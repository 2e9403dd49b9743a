"""A teacher behind HTTP (teacher=server): vLLM or `python -m grpo.serve`, asked for the log-probabilities of a prompt's tokens.

A request has one row of token ids. vLLM scores prompts at temperature 1; grpo.serve with its built-in engine at any. The servers
share the rows as those of an engine share prompts (`extras/vllm_server/pool.py`): one that fails is left out until it is back.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from grpo.engines.logprobs import is_logprob
from grpo.extras.network.answers import addresses
from grpo.extras.teachers.kinds import REMEDY, Passes, Teacher
from grpo.extras.teachers.teaching import Teaching
from grpo.extras.vllm_server.http import MODELS, Lost, Refused, RemoteServer
from grpo.extras.vllm_server.pool import ServerPool
from grpo.extras.vllm_server.routing import Routes
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.system.errors import UserError
from grpo.system.memory import sent
from grpo.system.ranges import Count, Seconds, enforced
from grpo.system.threads import outcome_of

SCORES = "/v1/completions"
IMPOSSIBLE = -9999.0  # what vLLM writes for the log-probability of a token whose probability is 0
PROBED = 256  # ids whose texts are compared


@dataclass(frozen=True)
class Likeliest:
    """The largest entries of distributions at n tokens, as a server gives them. Others share what these leave of the
    probability, at least 1e-7, which is as exact as the numbers are.

    ids: [n, k], `width` where there is none; values: log-probabilities, [n, k]; width: V.
    """

    ids: Tensor
    values: Tensor
    width: int

    def logprobs(self, at: slice | Tensor, temperature: float | Tensor, width: int) -> Tensor:
        """As `Predicted`; the server has divided by the temperature."""
        at = sent(at, self.ids.device) if isinstance(at, Tensor) else at
        ids, values = self.ids[at], self.values[at]
        left = (1 - values.double().exp().sum(1, keepdim=True)).clamp(min=1e-7)
        others = (self.width - (ids < self.width).sum(1, keepdim=True)).clamp(min=1)
        every = (left / others).log().to(values.dtype).expand(-1, self.width + 1)
        return every.scatter(1, ids, values)[:, :width]


Row = dict[int, float]  # log-probabilities of a token and of the likeliest ones in its place, by id


@dataclass(eq=False, kw_only=True)
class Scorers(ServerPool):
    """The servers of a teacher.

    student: the policy. heat: the temperature of the run. top: the likeliest entries that the run compares. width: V. names: of
    each server's model.
    """

    called = "teacher"
    key = "teacher"

    student: Pretrained
    heat: float = 1.0
    top: int = 0
    width: int = 0
    names: dict[RemoteServer, str] = field(default_factory=dict)

    async def examine(self, server: RemoteServer) -> None:
        """Learn the name and the context of the server's model, and check its temperature, its tokens and how many entries it
        gives."""
        self.names[server] = (await server.models())[0]
        if self.heat != 1 and not await self.is_ours(server):
            line = f"rollout.sampling.temperature={self.heat}, but {server.url} scores at 1"
            fix = "set the temperature to 1, or serve the teacher by python -m grpo.serve engine=transformers"
            raise UserError(f"{line}: {fix}")
        tokenizer = self.student.tokenizer()
        most = min(PROBED, server.context or PROBED, len(tokenizer)) - 1
        ids = [i * len(tokenizer) // most for i in range(most)]
        answer = await self.asked(server, ids, self.top)
        with server.reading(SCORES, answer):
            self.rows(answer, ids, range(1, len(ids)), self.top)
            texts = [str(answer[t][str(ids[t])].get("decoded_token") or "") for t in range(1, len(ids))]
        for i, there in zip(ids[1:], texts, strict=True):
            here = tokenizer.decode([i])
            if there and there != here and "\ufffd" not in there + here:
                line = f"the teacher at {server.url} has another tokenizer than the policy: the id {i} is {there!r}"
                raise UserError(f"{line} there and {here!r} here; {REMEDY}")

    async def prepare(self, server: RemoteServer) -> None:
        """Look at a server that was away: another model may have taken its place."""
        if server.fault:
            await self.examine(server)

    async def is_ours(self, server: RemoteServer) -> bool:
        """Return whether it is `python -m grpo.serve` with the built-in engine."""
        try:
            answer = await server.look("/info")
        except (Refused, UserError):
            return False
        return isinstance(answer, dict) and answer.get("engine") == "TransformersEngine"

    async def asked(self, server: RemoteServer, ids: Sequence[int], top: int) -> list[dict[str, Any]]:
        """Return what the server writes of each token and of the `top` likeliest ones, as vLLM's prompt_logprobs. Raises Lost, or
        UserError for a refusal."""
        body = {"model": self.names[server], "prompt": ids, "max_tokens": 0, "echo": True, "prompt_logprobs": top}
        body |= {} if self.heat == 1 else {"prompt_temperature": self.heat}
        try:
            answer = await server.ask(SCORES, body)
        except Refused as refused:
            if refused.status in (400, 422):
                raise UserError(f"the teacher at {server.url} refuses a request: {refused}") from refused
            raise Lost(f"{server.url}: {refused}") from refused
        with server.reading(SCORES, answer):
            return answer["choices"][0]["prompt_logprobs"]

    def rows(self, answer: list, ids: Sequence[int], places: Sequence[int], top: int) -> list[Row]:
        """Return what an answer says of the tokens at some places. Raises ValueError or another error if that is no number, or
        fewer of them than were asked for."""
        if len(answer) != len(ids):
            raise ValueError(f"with prompt_logprobs of {len(answer)} tokens, and {len(ids)} were sent")
        found: list[Row] = []
        for t in places:
            row = {int(i): entry["logprob"] for i, entry in answer[t].items()}
            own, wanted = None if top else row[ids[t]], min(top, self.width)
            if wrong := [value for value in (row.values() if top else [own]) if not is_number(value)]:
                raise ValueError(f"with {json.dumps(wrong[0])} as a log-probability of token {t}, id {ids[t]}")
            if not top and own <= IMPOSSIBLE:
                raise ValueError(f"with {own}, the probability 0, for token {t}, id {ids[t]}, which the policy wrote")
            if len(row) < wanted:
                line = f"with {len(row)} of the {wanted} likeliest entries that algo.teacher.top_k asks for"
                raise ValueError(f"{line} (vLLM gives --max-logprobs of them)")
            found.append(row)
        return found

    async def try_row(self, ids: Sequence[int]) -> None:
        """Ask each server for the last token of a row. Raises UserError if one does not score it."""
        for server in self.servers:
            try:
                answer = await self.asked(server, ids, self.top)
                with server.reading(SCORES, answer):
                    self.rows(answer, ids, [len(ids) - 1], self.top)
            except Lost as lost:
                raise UserError(f"a teacher does not score a row of {len(ids)} tokens: {lost}") from lost

    async def scores(self, read: TokenBatch, top: int) -> list[Row]:
        """Return what the servers say of each token of the mask, row by row."""
        rows = [(mask.nonzero()[:, 0].tolist(), *row) for mask, row in zip(read.mask, read.sequences(), strict=True)]
        rows = [([len(prompt) + t for t in places], [*prompt, *ids]) for places, prompt, ids in rows if places]

        async def ask(server: RemoteServer, _: str | None, r: int) -> list[Row]:
            places, ids = rows[r]
            answer = await self.asked(server, ids, top)
            with server.reading(SCORES, answer):
                return self.rows(answer, ids, places, top)

        of_rows = await self.share(Routes([ids for _, ids in rows], {}), ask) if rows else []
        return [token for row in of_rows for token in row]


def is_number(value: Any) -> bool:
    """Return whether a part of an answer is a log-probability."""
    return type(value) in (int, float) and is_logprob(value)


class Served(Teacher):
    """A model that one or more servers score tokens with.

    urls: their addresses; all serve the same model. student: the policy. timeout: seconds for one answer. concurrency: requests
    to one server at a time. wait: seconds without a working server after which the run ends. key_from: the variable of the
    environment that has the servers' key.
    """

    has_model = True

    @enforced("teacher")
    def __init__(
        self,
        urls: Sequence[str],
        student: Pretrained,
        timeout: Seconds = 120.0,
        concurrency: Count = 16,
        wait: Seconds = 60.0,
        key_from: str = "VLLM_API_KEY",
    ) -> None:
        if student.vision:
            raise UserError("teacher=server reads text only, and model.vision lets the policy see: take teacher=model")
        advice = "is it vLLM, or python -m grpo.serve?"
        urls, known = addresses(urls, "teacher.urls"), {"key_from": key_from, "alive": MODELS}
        servers = [RemoteServer(url, timeout, advice, **known) for url in urls]
        self.pool = Scorers(servers=servers, wait=wait, concurrency=concurrency, student=student)

    def check(self, teaching: Teaching, temperature: float) -> None:
        super().check(teaching, temperature)
        if teaching.of_distributions and not (teaching.top_k and teaching.top_of == "teacher"):
            line = "teacher=server gives a token's likeliest entries, not a whole distribution"
            raise UserError(f"{line}: set algo.teacher.top_of=teacher algo.teacher.top_k=20, or divergence=sampled")
        self.pool.heat, self.pool.top = temperature, teaching.top_k or 0 if teaching.of_distributions else 0

    def attach(self, policy: nn.Module) -> None:
        super().attach(policy)
        self.pool.width = policy.config.get_text_config().vocab_size
        outcome_of(self.pool.meet(self.pool.wait))
        self.pool.met = True

    def try_row(self, ids: Sequence[int]) -> None:
        """Ask each server for the last token of a row. Raises UserError if one does not score it."""
        outcome_of(self.pool.try_row(ids))

    @property
    def limit(self) -> int | None:
        """The smallest context among the servers."""
        return self.pool.context

    def logprobs(self, read: TokenBatch, passes: Passes) -> Tensor:
        self.check_lengths(read)
        targets = read.ids[:, read.prompt_width :][read.mask].tolist()
        rows = outcome_of(self.pool.scores(read, 0))
        values = [row[target] for row, target in zip(rows, targets, strict=True)]
        nothing = torch.zeros_like(read.rollout_logprobs)
        return nothing.masked_scatter(read.mask, nothing.new_tensor(values))

    def distributions(self, read: TokenBatch, passes: Passes) -> Likeliest:
        self.check_lengths(read)
        rows = outcome_of(self.pool.scores(read, passes.top_k or 0))
        tokens = [sorted(row.items()) for row in rows]
        widest = max(map(len, tokens), default=1)
        tokens = [[*token, *[(self.pool.width, -1e4)] * (widest - len(token))] for token in tokens]
        ids, values = torch.tensor(tokens, device=read.ids.device).view(-1, widest, 2).unbind(-1)
        return Likeliest(ids.long().clamp(max=self.pool.width), values, self.pool.width)
