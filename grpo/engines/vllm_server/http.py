"""VLLM's HTTP routes, and the three ways in which one does not answer: gone, not there, or against it."""

import asyncio
import functools
import re
import ssl
import time
from collections.abc import Callable
from typing import Any

import httpx2

from grpo.system.errors import UserError

GENERATE = "/inference/v1/generate"
LOAD_ADAPTER = "/v1/load_lora_adapter"
MODELS, HEALTH = "/v1/models", "/health"
CONNECT = 5.0  # seconds
DEVELOPER = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
MISSING = {  # what to do about a server that does not know a route
    GENERATE: "start it with --enable-scale-out",
    LOAD_ADAPTER: "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, and --enable-lora",
    MODELS: "is it vLLM?",
    HEALTH: "is it vLLM?",
}


class Lost(Exception):
    """A server that does not answer as one in step does: what it was asked is somebody else's to do, until it is back."""


class Refused(Exception):
    """A server that says no, in its own words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def client(timeout: float) -> httpx2.AsyncClient:
    """timeout: seconds for any one answer. Every request has a connection of its own: vLLM drops them, after an error for one."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    timeouts = httpx2.Timeout(timeout, connect=CONNECT)
    return httpx2.AsyncClient(timeout=timeouts, limits=limits, trust_env=False, verify=certificates())


@functools.cache
def certificates() -> ssl.SSLContext:
    """They take a tenth of a second to read."""
    return ssl.create_default_context()


async def ask(http: httpx2.AsyncClient, url: str, route: str, body: dict | None = None, post: bool = True) -> Any:
    """The JSON of a route's answer, None if it is none. Raises Lost, Refused, or UserError if the server has no such route."""
    try:
        response = await http.request("POST" if post else "GET", url + route, json=body)
    except httpx2.HTTPError as error:
        raise Lost(f"{url}{route}: {type(error).__name__} {error}".strip()) from error
    try:
        given = response.json()
    except ValueError:
        given = None
    if response.is_success:
        return given
    said = given.get("error") if isinstance(given, dict) else None
    if response.status_code in (403, 405) or (response.status_code == 404 and not said):
        advice = MISSING.get(route, DEVELOPER)
        raise UserError(f"the server at {url} has no {route} (it answers {response.status_code}): {advice}")
    words = str(said.get("message") if isinstance(said, dict) else response.text)
    if inner := re.search(r"Worker failed with error '(.*)', please check", words, re.DOTALL):
        words = inner[1] or "an assertion failed, its log says which"
    raise Refused(response.status_code, " ".join(words.split())[:500])


async def answers(
    http: httpx2.AsyncClient, url: str, limit: float, ended: Callable[[], str | None] = lambda: None
) -> None:
    """Wait until a server is there. limit: seconds. ended: one line where it never will be, a UserError then. Raises Lost."""
    started = time.monotonic()
    while True:
        try:
            await ask(http, url, HEALTH, post=False)
            return
        except (Lost, Refused) as error:
            why = str(error)
        if line := ended():
            raise UserError(line)
        if time.monotonic() - started > limit:
            raise Lost(f"{url} did not answer within {limit:g} s: {why}")
        await asyncio.sleep(0.3)
