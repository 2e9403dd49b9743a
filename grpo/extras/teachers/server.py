"""A teacher behind HTTP (teacher=server): vLLM or `python -m grpo.serve`, asked for the log-probabilities of a prompt's tokens.

A request has one row of token ids. vLLM scores prompts at temperature 1; grpo.serve with its built-in engine at any. The servers
share the rows as those of an engine share prompts (`extras/vllm_server/pool.py`): one that fails is left out until it is back.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grpo.engines.logprobs import is_logprob
from grpo.extras.network.answers import addresses
from grpo.extras.teachers.early import Beforehand, Entries, Key
from grpo.extras.teachers.kinds import REMEDY, Passes, Teacher
from grpo.extras.teachers.teaching import Teaching
from grpo.extras.vllm_server.http import MODELS, Lost, Refused, RemoteServer
from grpo.extras.vllm_server.pool import ServerPool
from grpo.extras.vllm_server.routing import Routes
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.rollout.rollouts import Rollouts
from grpo.system.errors import UserError
from grpo.system.memory import sent
from grpo.system.ranges import Count, Seconds, enforced
from grpo.system.threads import outcome_of
from grpo.training.batch import RolloutBatch

SCORES = "/v1/completions"
IMPOSSIBLE = -9999.0  # what vLLM writes for the log-probability of a token whose probability is 0
PROBED = 256  # ids whose texts are compared
POLL = 0.02  # seconds between two looks whether a server has a free slot


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
    turn: int = 0  # requests of `at_once`

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

    async def scores(self, read: TokenBatch, top: int, known: dict[Key, Entries]) -> Entries:
        """Return the entries of each token of the mask, row by row. known: answers by the tokens up to the end of a completion;
        those are added that had to be asked for, one request for a row."""
        rows = [(ids, spans) for ids, spans in map(spans_of, read.mask.tolist(), read.sequences()) if spans]
        missing = [(ids, spans) for ids, spans in rows if any(span_of(known, ids, span) is None for span in spans)]

        async def ask(server: RemoteServer, _: str | None, r: int) -> list[Entries]:
            ids, spans = missing[r]
            answer = await self.asked(server, ids, top)
            with server.reading(SCORES, answer):
                return [self.entries(answer, ids, span, top) for span in spans]

        of_rows = await self.share(Routes([ids for ids, _ in missing], {}), ask) if missing else []
        for (ids, spans), found in zip(missing, of_rows, strict=True):
            known.update({ids[: span.stop]: entries for span, entries in zip(spans, found, strict=True)})
        pieces = [known[ids[: span.stop]] for ids, spans in rows for span in spans]
        pieces = pieces or [(np.zeros((0, top + 1), np.int64), np.zeros((0, top + 1), np.float32))]
        return tuple(map(np.concatenate, zip(*pieces, strict=True)))

    def entries(self, answer: list, ids: Sequence[int], span: range, top: int) -> Entries:
        """Return what an answer says of a span of tokens; an entry that is not there is V, with -1e4. Raises as `rows`."""
        rows = self.rows(answer, ids, span, top)
        rows = [row if top else {i: row[i]} for row, i in zip(rows, ids[span.start : span.stop], strict=True)]
        most = top + 1  # the token itself may not be among the likeliest
        likely = [sorted(row.items(), key=lambda entry: -entry[1])[:most] for row in rows]
        found = np.array([[*row, *[(self.width, -1e4)] * (most - len(row))] for row in likely], np.float64)  # [n, k, 2]
        return found[..., 0].astype(np.int64).clip(max=self.width), found[..., 1].astype(np.float32)

    async def at_once(self, ids: Key, count: int) -> Entries | None:
        """Return the entries of the last `count` tokens, by one request to one of the servers; None if it fails, so that they are
        asked for with the rollout, where failures are dealt with."""
        there = [server for server in self.servers if server.fault is None]
        if not there:
            return None
        self.turn += 1
        server = there[self.turn % len(there)]
        while not server.slots.acquire(blocking=False):
            await asyncio.sleep(POLL)
        try:
            if server.fault is None:
                answer = await self.asked(server, ids, self.top)
                with server.reading(SCORES, answer):
                    return self.entries(answer, ids, range(len(ids) - count, len(ids)), self.top)
        except Lost as lost:
            if not isinstance(lost.__cause__, Refused):  # it does not answer, so the others must not wait for it
                self.leave_out(server, lost)
        except UserError:
            pass
        finally:
            server.slots.release()
        return None


def spans_of(mask: Sequence[bool], sequence: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Key, list[range]]:
    """Return the ids of a row, and where its masked tokens are in them, completion by completion."""
    (prompt, ids), n = sequence, len(sequence[0])
    runs = [[*places] for seen, places in groupby(range(len(ids)), mask.__getitem__) if seen]
    return (*prompt, *ids), [range(n + run[0], n + run[-1] + 1) for run in runs]


def span_of(known: dict[Key, Entries], ids: Key, span: range) -> Entries | None:
    """Return the answer about a span of a row, if there is one of as many tokens."""
    found = known.get(ids[: span.stop])
    return found if found is not None and len(found[0]) == len(span) else None


def is_number(value: Any) -> bool:
    """Return whether a part of an answer is a log-probability."""
    return type(value) in (int, float) and is_logprob(value)


class Served(Teacher):
    """A model that one or more servers score tokens with.

    urls: their addresses; all serve the same model. student: the policy. timeout: seconds for one answer. concurrency: requests
    to one server at a time. wait: seconds without a working server after which the run ends. key_from: the variable of the
    environment that has the servers' key. early: whether a completion is scored as soon as it ends, from the second rollout on.
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
        early: bool = True,
    ) -> None:
        if student.vision:
            raise UserError("teacher=server reads text only, and model.vision lets the policy see: take teacher=model")
        advice = "is it vLLM, or python -m grpo.serve?"
        urls, known = addresses(urls, "teacher.urls"), {"key_from": key_from, "alive": MODELS}
        servers = [RemoteServer(url, timeout, advice, **known) for url in urls]
        self.pool = Scorers(servers=servers, wait=wait, concurrency=concurrency, student=student)
        self.early = Beforehand(self.pool.at_once) if early else None
        self.known: dict[Key, Entries] = {}  # answers about the completions of this rollout

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

    def extended(self, tokens: TokenBatch, batch: RolloutBatch, rollouts: Rollouts) -> tuple[TokenBatch, Tensor | None]:
        if self.early and rollouts is not None:
            if self.early.loop is None:
                rollouts.play = self.early.around(rollouts.play)
            turns = (turn.ids for group in batch.groups for sample in group for turn in sample.turns)
            self.known = self.early.claim(turns, rollouts.plan.most_stale)
        return tokens, None

    def close(self) -> None:
        if self.early:
            self.early.close()

    def entries(self, read: TokenBatch, top: int, known: dict[Key, Entries]) -> tuple[Tensor, Tensor]:
        """Return the ids and the log-probabilities of n tokens' entries, [n, k] each. known: see `Scorers.scores`."""
        self.check_lengths(read)
        ids, values = map(torch.from_numpy, outcome_of(self.pool.scores(read, top, known)))
        return ids.to(read.ids.device), values.to(read.ids.device)

    def logprobs(self, read: TokenBatch, passes: Passes) -> Tensor:
        nothing, known = torch.zeros_like(read.rollout_logprobs), {} if self.pool.top else {**self.known}
        return nothing.masked_scatter(read.mask, self.entries(read, 0, known)[1].to(nothing.dtype))

    def prepare(self, read: TokenBatch, passes: Passes) -> None:
        self.entries(read, passes.top_k or 0, self.known)

    def forget(self) -> None:
        self.known = {}

    def distributions(self, read: TokenBatch, passes: Passes) -> Likeliest:
        return Likeliest(*self.entries(read, passes.top_k or 0, {**self.known}), self.pool.width)
