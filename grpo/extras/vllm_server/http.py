"""One server behind its HTTP routes, and what may go wrong: it is lost, it lacks a route, it refuses the request, or its answer
cannot be read."""

import asyncio
import functools
import json
import logging
import re
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from grpo.extras.network.answers import reading
from grpo.system.errors import UserError, one_line
from grpo.system.output.secrets import bearer

log = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
LOAD_ADAPTER = "/v1/load_lora_adapter"
MODELS, HEALTH, INFO = "/v1/models", "/health", "/server_info?config_format=json"
CONNECT = 5.0  # seconds to open a connection
LOOK = 30.0  # seconds for an answer about the server itself, which takes it a step of vLLM at most
START = 900.0  # seconds for a server to load, even a large model from a slow disk; if it dies, that is noticed at once
STARTS = 3  # of a server that ends without a completion


class Lost(Exception):
    """A server does not answer as expected. Its request goes to another server, and it is left out until it is back."""


class Odd(Lost):
    """A server's answer cannot be read."""


class Refused(Exception):
    """A server answers with an error. status: the HTTP status; words: the server's message."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@functools.cache
def certificates() -> ssl.SSLContext:
    """Return the TLS certificates, read once, because that takes a tenth of a second."""
    return ssl.create_default_context()


@dataclass(eq=False)
class RemoteServer:
    """A server. Mutable: holds its present state.

    timeout: seconds for one answer. advice: the end of errors, how it must be started. key_from: the variable of the environment
    that has its key, if it needs one. alive: the route that says whether it answers. For a server that this process started:
    `ended` returns one line if it has ended, else None, `start` starts it again, `starts` counts this since its latest
    completion, `loads_until` is when it must answer.
    ready: whether it may be asked for completions; fault: why not. context: its limit of tokens, None before `labels`.
    exact: see `fleet.check_exact`; False until it was checked. dtypes: of its head and of its other layers; None for one that
    this process started. slots: for requests at a time, of all threads. recompute: see `VLLMServerEngine`.
    """

    url: str
    timeout: float
    advice: str
    ended: Callable[[], str | None] = lambda: None
    start: Callable[[], None] | None = None
    starts: int = 0
    loads_until: float = 0.0
    ready: bool = False
    fault: Exception | None = None
    context: int | None = None
    exact: bool = False
    dtypes: tuple[str, str] | None = None
    slots: threading.Semaphore = field(default_factory=threading.Semaphore)
    recompute: bool = True
    key_from: str = "VLLM_API_KEY"
    alive: str = HEALTH

    async def ask(self, route: str, body: dict | None = None, post: bool = True, limit: float | None = None) -> Any:
        """Return the JSON of a route's answer; its text if it is not JSON; None if it is empty. limit: seconds, if less than
        `timeout`. Raises Lost, Refused, or UserError if the server has no such route or wants another key.

        Every request opens its own connection: vLLM drops connections, for example after an error.
        """
        most, headers = min(self.timeout, limit or self.timeout), bearer(self.key_from)
        timeout = httpx2.Timeout(most, connect=min(most, CONNECT))
        try:
            async with httpx2.AsyncClient(timeout=timeout, trust_env=False, verify=certificates()) as http:
                response = await http.request("POST" if post else "GET", self.url + route, json=body, headers=headers)
        except httpx2.HTTPError as error:
            raise Lost(f"{self.url}{route}: {type(error).__name__} {error}".strip()) from error
        try:
            content = response.json()
        except (ValueError, RecursionError):
            content = response.text or None
        if response.is_success:
            return content
        fault = content.get("error") if isinstance(content, dict) else None
        if response.status_code == 401:
            line = (
                f"the server at {self.url} answers 401: {'its key is not that of' if headers else 'it needs a key in'}"
            )
            raise UserError(f"{line} the environment's ${self.key_from}")
        if response.status_code in (403, 405) or (response.status_code == 404 and not fault):
            line = f"the server at {self.url} has no {route} (it answers {response.status_code})"
            raise UserError(f"{line}: {self.advice}")
        words = str(fault.get("message") if isinstance(fault, dict) else response.text)
        if inner := re.search(r"Worker failed with error '(.*)', please check", words, re.DOTALL):
            words = inner[1] or "an assertion failed, see the server's log"
        raise Refused(response.status_code, one_line(words, 500))

    def reading(self, route: str, answer: Any) -> AbstractContextManager[None]:
        """Raises Odd if the block cannot read this answer."""
        return reading(self.url + route, answer, Odd)

    async def look(self, route: str) -> Any:
        """Return the answer of a route that says how the server is; one that hangs does not hold up the others for long."""
        return await self.ask(route, post=False, limit=LOOK)

    def start_again(self, reason: str, limit: float) -> None:
        """Start the server again, at most STARTS times without a completion. reason: why it ended; limit: seconds to load."""
        self.loads_until = 0.0
        if self.start and self.starts < STARTS:
            self.starts += 1
            log.warning("%s; it is started again (%d of %d times)", reason, self.starts, STARTS)
            self.start()
            self.loads_until = time.monotonic() + limit

    async def answers(self, limit: float) -> None:
        """Wait until the server answers. Raises Lost after `limit` seconds, UserError if it has ended."""
        started = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(max(limit + started - time.monotonic(), CONNECT)):
                    return await self.look(self.alive)
            except (Lost, Refused, TimeoutError) as error:
                if line := self.ended():
                    raise UserError(line) from error
                if time.monotonic() - started > limit:
                    raise Lost(f"{self.url} did not answer within {limit:g} s: {str(error) or 'silence'}") from error
            await asyncio.sleep(0.3)

    async def labels(self) -> list[str]:
        """Return the label of the weights that it holds, then the names of its models and adapters. Sets `context`."""
        names = await self.models()
        weights = await self.look("/weight_info")
        with self.reading("/weight_info", weights):
            return [weights["weight_version"], *names]

    async def models(self) -> list[str]:
        """Return the names of its models and adapters. Sets `context`."""
        answer = await self.look(MODELS)
        with self.reading(MODELS, answer):
            names = [model["id"] for model in answer["data"]]
            self.context = int_of(answer["data"][0]["max_model_len"] or 0) or None
            return names


def int_of(value: Any) -> int:
    """Return a whole number of an answer. Raises ValueError for anything else."""
    if type(value) is not int:
        raise ValueError(f"with {json.dumps(value)} in place of a whole number")
    return value
