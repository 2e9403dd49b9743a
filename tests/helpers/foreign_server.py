"""A server that answers as vLLM's does, without vLLM."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ROUTES = (
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/resume",
)  # routes whose answers do not matter here
MODELS = {"data": [{"id": "x", "max_model_len": 100}]}


def generated(logprobs, version="default", finish="length"):
    """Return an answer of /inference/v1/generate. logprobs: log-probabilities of the first token's alternatives."""
    top = [{"token_id": i, "logprob": logprob} for i, logprob in enumerate(logprobs)]
    content = [{**top[0], "top_logprobs": top}]
    spans = [{"version": version, "start": 0, "end": 1}]
    choice = {"token_ids": [0], "finish_reason": finish, "logprobs": {"content": content}, "weight_versions": spans}
    return {"choices": [choice]}


def info(dtype: str, **overrides: str) -> dict:
    """Return what a server answers whose layers have this number type. overrides: of its model's config.json."""
    return {"vllm_config": {"model_config": {"dtype": f"torch.{dtype}", "hf_overrides": overrides or None}}}


class Foreign:
    """A server with given answers. routes: for each route (status, JSON or bytes), or a function from the request to that.

    key: what it wants as a bearer token. port: of its address, once it has one.
    """

    key: str | None = None
    port = 0

    def __init__(self, **routes) -> None:
        self.label = "default"
        self.routes = {
            "/health": (200, None),
            "/v1/models": (200, MODELS),
            "/weight_info": lambda _: (200, {"weight_version": self.label}),
            "/server_info": (200, info("float32")),
            "/reset_prefix_cache": (200, {"success": True}),
            "/update_weight_version": self.take,
            "/inference/v1/generate": lambda body: (
                self.generate(body) if body else (400, {"error": {"message": "empty"}})
            ),
            **{route: (200, {}) for route in ROUTES},
            **routes,
        }

    def take(self, body):
        self.label = body["new_version"]
        return 200, {}

    def generate(self, body):
        width = body["sampling_params"]["temperature"]  # doubling the temperature halves the distance
        return 200, generated([-1.0, -1.0 - 1 / width], self.label)

    def __enter__(self):
        foreign = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                given = foreign.routes.get(self.path.partition("?")[0], (404, {"detail": "Not Found"}))
                if foreign.key and self.headers.get("Authorization") != f"Bearer {foreign.key}":
                    given = 401, {"error": "Unauthorized"}
                status, words = given(json.loads(body) if body else None) if callable(given) else given
                if status is None:
                    return  # hang up
                if not isinstance(words, bytes):
                    words = b"" if words is None else json.dumps(words).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(words)))
                self.end_headers()
                self.wfile.write(words)

            do_GET = do_POST = answer

            def log_message(self, *_) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()


SCORES = "/v1/completions"


def logprob(token: int) -> float:
    return -1 - token / 1000


class Scorer(Foreign):
    """A teacher that finds a token the less likely the larger its id; the likeliest ones are the first ids."""

    def __init__(self, **routes) -> None:
        model = {"id": "t", "owned_by": "vllm", "max_model_len": 512}
        routes = {"/v1/models": (200, {"data": [model]}), SCORES: self.score} | routes
        super().__init__(**{"/health": (404, {"error": {"message": "no"}})} | routes)
        self.asked = 0  # rows

    def score(self, body):
        self.asked += 1
        return 200, answer(body["prompt"], body["prompt_logprobs"])


def answer(ids, top=0, change=lambda rows: rows):
    rows = [{str(i): {"logprob": logprob(i)} for i in [*range(top), token]} for token in ids]
    return {"choices": [{"prompt_logprobs": change([None, *rows[1:]])}]}
