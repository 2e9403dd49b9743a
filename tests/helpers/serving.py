"""A server in this process, with a real engine and real HTTP on the loopback address, and a client of it."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Engine
from grpo.env.rendering import Renderer
from grpo.extras.serve.api import Server
from grpo.extras.serve.batching import Batching
from grpo.extras.serve.limits import RequestLimits
from grpo.extras.serve.served_weights import ServedWeights
from grpo.extras.serve.service import Service
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.models.pretrained import Pretrained

PROMPT = [1, 7, 9, 22, 23]
POISON = 13


class Counting(TransformersEngine):
    """The built-in engine, which also counts its calls and fails if a prompt has the token POISON."""

    calls = 0

    def sample(self, prompts, *rest):
        self.calls += 1
        if any(POISON in prompt for prompt in prompts):
            raise RuntimeError("no such kernel")
        return super().sample(prompts, *rest)


class Client:
    def __init__(self, port: int, server: Server) -> None:
        self.url, self.server, self.batching = f"http://127.0.0.1:{port}", server, server.batching

    def __call__(self, path: str, body: object = None, status: int = 200) -> dict:
        """Send GET, or POST if there is a body, check the status, and return the answer."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            found, text = error.code, error.read()
        assert found == status, text
        return json.loads(text)

    def refused(self, path: str, body: object = None, status: int = 400) -> str:
        """Send a request that must fail with this status, and return the line of its error."""
        return line_of(self(path, body, status))

    def generate(self, prompt: object = PROMPT, **more: object) -> dict:
        return self("/generate", {"prompt": {"prompt_token_ids": prompt}, **more})

    def raw(self, *parts: bytes) -> socket.socket:
        """Open a connection and send these bytes."""
        connection = socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=60)
        for part in parts:
            connection.sendall(part)
        return connection

    def head(self, line: str, **headers: str) -> bytes:
        """Return the head of a request. line: as POST /generate. headers: with _ for -; replaces Host if it is given."""
        given = {"Host": self.url.removeprefix("http://"), "Content-Type": "application/json"} | headers
        fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items())
        return f"{line} HTTP/1.1\r\n{fields}\r\n".encode()

    def answer(self, *parts: bytes) -> tuple[int, dict[str, str], dict]:
        """Send these bytes, and return the status, the headers in lower case, and the JSON of the answer."""
        with self.raw(*parts) as connection, connection.makefile("rb") as file:
            status = int(file.readline().split()[1])
            fields = (field.partition(": ") for field in iter(lambda: file.readline().decode().strip(), ""))
            headers = {name.lower(): value for name, _, value in fields}
            length = headers.get("content-length")
            return status, headers, json.loads(file.read(int(length) if length else -1))

    def ready(self) -> None:
        until(lambda: self.batching.engine is not None and self.batching.engine.version == 0)

    def waiting(self, count: int) -> None:
        until(lambda: len(self.batching.waiting) == count)


def line_of(answer: dict) -> str:
    """Check that an answer is an error in OpenAI's form, with one line, and return the line."""
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    line = answer["error"]["message"]
    assert line and "\n" not in line
    return line


def until(true: Callable[[], bool]) -> None:
    for _ in range(6000):
        if true():
            return
        time.sleep(0.01)
    raise TimeoutError


@contextmanager
def served(
    folder: Path,
    make_engine: Callable[[], Engine] = Counting,
    api_key: str | None = None,
    weights_from: Sequence[Path] = (),
    make_renderer: Callable[..., Renderer] = TokenizerRenderer,
    names: Sequence[str] = ("*",),
    **limits: float,
) -> Iterator[Client]:
    pretrained = Pretrained(str(folder))
    tokenizer = pretrained.tokenizer()
    batching, weights = Batching(make_engine), ServedWeights(pretrained, "cpu", weights_from)
    batching.call(weights.read)
    renderer = make_renderer(tokenizer)
    service = Service(batching, weights, tokenizer, renderer, len(tokenizer), RequestLimits(**limits), names)
    server = Server(service, api_key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield Client(listener.getsockname()[1], server)
        finally:
            server.should_exit = True
            thread.join()
    assert not batching.alive
