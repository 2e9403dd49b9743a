"""The run's own engine, open to environments over HTTP while the run waits for their samples."""

import logging
import re
import socket
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from grpo.engines.protocol import Done, Prompts, Sampling
from grpo.env.rendering import Renderer
from grpo.env.tokens import Completion, CompletionLike, completion_of
from grpo.extras.network.ports import check_port
from grpo.extras.serve.api import make_app
from grpo.extras.serve.batching import Batching
from grpo.extras.serve.gate import Gate
from grpo.extras.serve.served_weights import ServedWeights
from grpo.extras.serve.service import Service
from grpo.extras.sources.conversion import check_learnable
from grpo.models.pretrained import Pretrained
from grpo.rollout.rollouts import Rollouts
from grpo.system.errors import RolloutError

log = logging.getLogger(__name__)

OPEN = re.compile(r"/|/health|/generate|/version|/.*v1/.+")  # other paths change weights, or stop the engine
REMEMBERED = 8192  # completions


class OpenEngine:
    """Serves the run's engine at http://127.0.0.1:port. `Batching` uses it like an engine. Mutable: it remembers completions.

    answered: completions so far. refused: the errors that environments were given.
    """

    def __init__(self, rollouts: Rollouts, pretrained: Pretrained, renderer: Renderer, port: int) -> None:
        self.rollouts, self.engine, self.unwanted = rollouts, rollouts.engine, set[int]()
        self.known: dict[bytes, dict[tuple[float, tuple[float, ...]], Completion]] = {}
        self.answered, self.refused = 0, set[str]()
        self.batching = Batching(lambda: self)
        self.batching.paused = True
        weights, vocabulary = ServedWeights(pretrained, "cpu"), pretrained.config().get_text_config().vocab_size
        service = Service(self.batching, weights, renderer.tokenizer, renderer, vocabulary)
        self.app = make_app(service)
        check_port("127.0.0.1", port)
        listener = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        gate = Gate(self.answer, service.metrics, service.limits.body)
        config = uvicorn.Config(gate, ws="none", interface="asgi3", log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log an error once: environments repeat a refused request in silence."""
        status = 0

        async def seen(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            line = message.get("body", b"").decode(errors="replace")[:500] if status >= 400 else ""
            if line and line not in self.refused:
                self.refused.add(line)
                log.warning("a request of an environment was refused: %s %s", scope["path"], line)
            await send(message)

        closed = JSONResponse({"error": {"message": "the weights are those of a run that trains"}}, 404)
        await (self.app if OPEN.fullmatch(scope["path"]) else closed)(scope, receive, seen)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Answer requests inside the block; others wait. After it nothing is being sampled."""
        self.batching.pause(False).result()
        try:
            yield
        finally:
            self.batching.pause(True).result()

    def find(
        self,
        prompt: Sequence[int],
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        temperature: float | None = None,
    ) -> Completion | None:
        """Return a completion as it was sampled: the newest one with these log-probabilities and this temperature if there are
        several, or else with the run's temperature. Raises RolloutError if it was sampled at another temperature, or greedily."""
        if not (completions := self.known.get(key_of_ids(prompt, ids))):
            return None
        learned = self.rollouts.plan.sampling.temperature
        wanted = {key: done for key, done in completions.items() if temperature in (None, key[0])}
        wanted = {key: done for key, done in wanted.items() if key[1] == logprobs} or wanted
        wanted = {key: done for key, done in wanted.items() if key[0] == learned} or wanted
        if not wanted:
            line = f"it was sampled at temperature {next(iter(completions))[0]:g}, and the environment says {temperature:g}"
            raise RolloutError(f"{line}: mend its overrides")
        [(own, _), found] = [*wanted.items()][-1]
        check_learnable(own)
        return found if own == learned else replace(found, temperature=own)

    def end(self) -> None:
        """Refuse the waiting requests, and stop the server."""
        self.batching.stop()
        self.server.should_exit = True
        self.thread.join(5)

    # -- as an engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def sample(
        self, prompts: Prompts, sampling: Sampling, seeds: Sequence[int], done: Done
    ) -> Sequence[CompletionLike]:
        """Sample, and remember each completion with the version of the weights before anybody gets it."""
        self.engine.unwanted = self.unwanted

        def note(i: int, answer: CompletionLike) -> None:
            completion = completion_of(answer)
            versions = completion.versions or (self.engine.version,) * len(completion.ids)
            alike = self.known.setdefault(key_of_ids(prompts[i], completion.ids), {})
            alike[sampling.temperature, completion.logprobs] = replace(completion, versions=versions)
            done(i, completion)

        try:
            with self.rollouts.while_sampling():
                completions = self.engine.sample(prompts, sampling, seeds, note)
        finally:
            self.engine.unwanted = set()  # the run itself samples next
        for i, answer in enumerate(completions):  # some engines report none before all are there
            note(i, answer)
        self.answered += len(prompts)
        while len(self.known) > REMEMBERED:
            del self.known[next(iter(self.known))]
        return completions

    def close(self) -> None:
        """Do nothing: the run closes its engine itself."""


def key_of_ids(prompt: Sequence[int], ids: Sequence[int]) -> bytes:
    """Return a prompt and a completion in few bytes."""
    return array("q", (len(prompt), *prompt, *ids)).tobytes()
