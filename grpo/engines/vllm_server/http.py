"""One vLLM server behind its HTTP routes, and what may go wrong: it is lost, it lacks a route, or it refuses the request."""

import asyncio
import functools
import logging
import re
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from grpo.system.errors import UserError, one_line

log = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
LOAD_ADAPTER = "/v1/load_lora_adapter"
MODELS, HEALTH = "/v1/models", "/health"
CONNECT = 5.0  # seconds to open a connection
LOOK = 30.0  # seconds for an answer about the server itself, which takes it a step of vLLM at most
STARTS = 3  # of a server that ends without a completion


class Lost(Exception):
    """A server does not answer as expected. Its request goes to another server, and it is left out until it is back."""


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
    """A vLLM server. Mutable: holds its present state.

    timeout: seconds for one answer. advice: the end of errors, how it must be started. For a server that this process started:
    `ended` returns one line if it has ended, else None, `start` starts it again, `starts` counts this since its latest
    completion, `loads_until` is when it must answer.
    ready: whether it may be asked for completions; fault: why not. context: its limit of tokens, None before `labels`.
    exact: see `fleet.check_exact`; False until it was checked. slots: for requests at a time, of all threads. recompute: see
    `VLLMServerEngine`.
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
    slots: threading.Semaphore = field(default_factory=threading.Semaphore)
    recompute: bool = True

    async def ask(self, route: str, body: dict | None = None, post: bool = True, limit: float | None = None) -> Any:
        """Return the JSON of a route's answer; None if the answer is not JSON. limit: seconds, if less than `timeout`. Raises
        Lost, Refused, or UserError if the server has no such route.

        Every request opens its own connection: vLLM drops connections, for example after an error.
        """
        most = min(self.timeout, limit or self.timeout)
        timeout = httpx2.Timeout(most, connect=min(most, CONNECT))
        try:
            async with httpx2.AsyncClient(timeout=timeout, trust_env=False, verify=certificates()) as http:
                response = await http.request("POST" if post else "GET", self.url + route, json=body)
        except httpx2.HTTPError as error:
            raise Lost(f"{self.url}{route}: {type(error).__name__} {error}".strip()) from error
        try:
            content = response.json()
        except ValueError:
            content = None
        if response.is_success:
            return content
        fault = content.get("error") if isinstance(content, dict) else None
        if response.status_code in (403, 405) or (response.status_code == 404 and not fault):
            line = f"the server at {self.url} has no {route} (it answers {response.status_code})"
            raise UserError(f"{line}: {self.advice}")
        words = str(fault.get("message") if isinstance(fault, dict) else response.text)
        if inner := re.search(r"Worker failed with error '(.*)', please check", words, re.DOTALL):
            words = inner[1] or "an assertion failed, see the server's log"
        raise Refused(response.status_code, one_line(words, 500))

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
                    return await self.look(HEALTH)
            except (Lost, Refused, TimeoutError) as error:
                if line := self.ended():
                    raise UserError(line) from error
                if time.monotonic() - started > limit:
                    raise Lost(f"{self.url} did not answer within {limit:g} s: {str(error) or 'silence'}") from error
            await asyncio.sleep(0.3)

    async def labels(self) -> list[str]:
        """Return the label of the weights that it holds, then the names of its models and adapters. Sets `context`."""
        models = (await self.look(MODELS))["data"]
        self.context = models[0]["max_model_len"]
        weights = await self.look("/weight_info")
        return [weights["weight_version"], *(model["id"] for model in models)]

    def out(self, fault: Exception) -> None:
        """Leave the server out until it is back; the first fault is logged."""
        if self.ready or self.fault is None:
            log.warning("a vLLM server is left out until it is back: %s", fault)
        self.ready, self.fault = False, fault
