"""Sessions: programs call the policy over HTTP, each by an address of its own, and their calls wait for an environment's answers.

POST /SESSION/v1/chat/completions, ...   a call, by the dialects
POST /SESSION/reward                     the reward of the episode
POST /sessions                           opens a session for an external program; needs the API key

A session is an environment with `ask(request)`, which waits for the answer, and `post(reward)`.
"""

import hmac
import json
import queue
import secrets
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from grpo.env.messages import shown
from grpo.env.scoring import LARGEST
from grpo.env.types import Reward
from grpo.extras.network.ports import check_port
from grpo.extras.serve.dialects import DIALECTS
from grpo.extras.serve.dialects.request import CompletionRequest
from grpo.extras.serve.dialects.writing import sse
from grpo.system.errors import UserError, error_line
from grpo.system.files import strict_json

HOST = "127.0.0.1"
BODY = 1 << 23  # bytes of a request
PATIENCE = 30.0  # seconds in which an external program waits for an episode
MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "grpo"}]}


class NoAnswer(UserError):
    """A request that gets no answer, and the status of HTTP that says so."""

    def __init__(self, line: str, status: int = 400) -> None:
        super().__init__(line)
        self.status = status


def check_request(request: CompletionRequest) -> None:
    """Raise NoAnswer for a request that a session cannot honour. Temperature and the like are the run's, whatever it asks for."""
    reasons = {
        "n above 1": request.count > 1,
        "a form of the answer": "guided" in request.settings,
        ", ".join(request.settings.get("vllm", ())): "vllm" in request.settings,
        "chat_template_kwargs": request.template,
        "echo or prompt_logprobs": request.echo or request.prompt_logprobs is not None,
        "max_tokens=0": request.max_tokens == 0,
    }
    for name, wanted in reasons.items():
        if wanted:
            raise NoAnswer(f"a session that is trained does not take {name}: leave it out")


def posted(body: Any, solved: float) -> Reward | None:
    """Return the reward that a program sends; None if it leaves that to the task. solved: right from here on, unless it says."""
    fields = body if isinstance(body, dict) else {}
    value, parts = fields.get("reward", ""), fields.get("parts") or {}
    numbers = list(parts.values()) if isinstance(parts, dict) else [parts]
    if value is not None:
        numbers.append(value)
    if not all(type(number) in (int, float) and abs(number) <= LARGEST for number in numbers):
        form = '{"reward": NUMBER or null, "correct": true or false, "parts": {NAME: NUMBER}}'
        raise NoAnswer(f"{shown(body)} is no reward: send {form}, with finite numbers")
    return None if value is None else Reward(float(value), bool(fields.get("correct", value >= solved)), parts)


class Sessions(ThreadingHTTPServer):
    """The server of all sessions of this process. key: the one that external programs must send; empty: they get no session.

    open: the sessions by their names, random secrets. waiting: those for external programs, each with its name and data.
    """

    daemon_threads = True
    request_queue_size = 1024  # connections of programs that start together

    def __init__(self, port: int, key: str) -> None:
        check_port(HOST, port)
        super().__init__((HOST, port), Handler)
        self.key, self.open = key, dict[str, Any]()
        self.waiting: queue.SimpleQueue[tuple[str, dict]] = queue.SimpleQueue()
        threading.Thread(target=self.serve_forever, name="sessions", daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        """Say nothing: a client has closed its connection."""

    def opened(self, session: Any) -> tuple[str, dict[str, str]]:
        """Return the name of a new session, and its addresses as variables of a program's environment."""
        name = secrets.token_hex(16)
        self.open[name], url = session, f"http://{HOST}:{self.server_port}/{name}"
        addresses = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url, "GRPO_REWARD_URL": f"{url}/reward"}
        return name, addresses | dict.fromkeys(["OPENAI_API_KEY", "ANTHROPIC_API_KEY"], name)

    def taken(self, key: str) -> dict[str, Any]:
        """Wait for the next session for an external program, and return its addresses and data. Raises NoAnswer."""
        if not (self.key and hmac.compare_digest(key.encode(), f"Bearer {self.key}".encode())):
            raise NoAnswer("POST /sessions needs the header Authorization: Bearer KEY, the run's $GRPO_AGENT_KEY", 401)
        name = None
        while name not in self.open:
            try:
                name, addresses = self.waiting.get(timeout=PATIENCE)
            except queue.Empty:
                raise NoAnswer("no episode waits for a program: ask again", 503) from None
        return addresses

    def reply(self, path: str, key: str, body: Any) -> str:
        """Return the answer to a request, as JSON or as server-sent events. Raises UserError."""
        name, _, route = path.partition("/")
        if path == "sessions":
            return strict_json(self.taken(key), default=str)
        if (session := self.open.get(name)) is None:
            raise NoAnswer("there is no such session, or it has ended", 404)
        if route == "v1/models":
            return strict_json(MODELS)
        if route.startswith("v1/models/"):  # any name is the policy's, as in requests
            return strict_json({**MODELS["data"][0], "id": route.removeprefix("v1/models/")})
        if route == "reward":
            session.post(reward := posted(body, session.solved))
            return strict_json({"reward": reward and reward.value})
        if (dialect := DIALECTS.get(f"/{route}")) is None:
            raise NoAnswer(f"there is no /{shown(route)} in a session, but {', '.join(DIALECTS)}, /reward", 404)
        check_request(request := dialect.read(body))
        written = dialect.written(request, [session.ask(request)], str(body.get("model", "policy")))
        return "".join(sse(dialect, written)) if request.stream else strict_json(written)


@cache
def sessions(port: int = 0, key: str = "") -> Sessions:
    """Return the server of this process at a port, which the first call starts. port: 0 is any free one."""
    return Sessions(port, key)


class Handler(BaseHTTPRequestHandler):
    """The requests of one connection, in a thread of its own. timeout: seconds in which a client sends what it has begun."""

    server: Sessions
    protocol_version, timeout = "HTTP/1.1", 600.0
    wbufsize, disable_nagle_algorithm = -1, True  # an answer goes in one piece, at once

    def do_POST(self) -> None:
        """Answer a request, with an error in the client's own form."""
        path, status = self.path.partition("?")[0].strip("/"), 200
        try:
            text = self.server.reply(path, self.headers.get("Authorization", ""), self.body())
        except Exception as error:
            status = getattr(error, "status", 400 if isinstance(error, UserError) else 500)
            dialect = DIALECTS.get(f"/{path.partition('/')[2]}", DIALECTS["/v1/chat/completions"])
            text = strict_json(dialect.failure(status, error_line(error) if status == 500 else str(error)))
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if text[0] == "{" else "text/event-stream")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST  # of the list of models

    def body(self) -> Any:
        """Return the JSON of a request."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise NoAnswer("a request has a Content-Length, and comes in one piece", 411)
        if not length.isdecimal() or int(length) > BODY:
            self.close_connection = True  # what follows is not read
            raise NoAnswer(f"a request has a Content-Length of at most {BODY} bytes", 413)
        try:
            return json.loads(self.rfile.read(int(length)) or "{}")
        except (ValueError, RecursionError) as error:
            raise NoAnswer(f"the body of the request is no JSON: {error}") from error

    def log_message(self, *_: Any) -> None:
        """Say nothing of single requests."""
