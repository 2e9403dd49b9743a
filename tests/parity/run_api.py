"""A stand-in of Atropos' run-api on the standard library, for the protocol of docs/sources.md, and an environment of it.

python run_api.py PORT PORT_OF_THE_ENGINE
"""

import json
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NOBODY = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
REGISTRATION = {
    **{"wandb_group": str, "wandb_project": str, "batch_size": int, "max_token_len": int, "starting_step": int},
    **{"checkpoint_dir": str, "save_checkpoint_interval": int, "num_steps": int},
}
KEYS = [
    *["tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs"],
    *["overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs"],
]


class RunApi:
    """Ready batches come out newest first; a batch has exactly `batch_size` sequences, of items in the order in which they came.
    calls: the paths that a trainer asked, but /batch and /status."""

    def __init__(self, port: int = 0) -> None:
        self.calls: list[str] = []
        self.forget()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = api.answer(self.path, json.loads(body or "{}"))
                text = answer if isinstance(answer, str) else json.dumps(answer)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_POST = do_GET

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def forget(self) -> None:
        """Restart: nothing is left."""
        self.config: dict[str, Any] | None = None
        self.queue: list[dict] = []
        self.ready: list[list[dict]] = []
        self.started, self.reset, self.step = False, False, 0

    def answer(self, path: str, body: dict) -> tuple[int, Any]:
        if path not in ("/batch", "/status", "/scored_data"):
            self.calls.append(path)
        if path == "/info":
            config = self.config or {"batch_size": -1, "max_token_len": -1}
            return 200, {name: config[name] for name in ("batch_size", "max_token_len")}
        if path == "/register":
            if not all(isinstance(body.get(name), kind) for name, kind in REGISTRATION.items()):
                return 422, {"detail": []}
            if self.config is None or self.reset:
                self.config, self.reset, self.step = body, False, body["starting_step"]
            return 200, {"uuid": uuid.uuid4().int}
        if path == "/reset_data":
            self.forget()
            self.reset, self.config = True, {"batch_size": -1, "max_token_len": -1}
            return 200, "Reset successful"
        if path == "/status":
            return 200, {"current_step": self.step, "queue_size": len(self.queue)}
        if path == "/scored_data":
            self.queue.append({name: body.get(name) for name in KEYS})
            return 200, {"status": "received"}
        if path == "/register-env":
            return 200, {"status": "success", "env_id": 0} if self.started else {"status": "wait for trainer to start"}
        return self.batch() if path == "/batch" else (404, {"detail": "Not Found"})

    def batch(self) -> tuple[int, Any]:
        if self.config is None:
            return 200, NOBODY
        if self.reset:
            return 500, "Internal Server Error"
        self.started = True
        size = self.config["batch_size"]
        while not self.ready or self.queue:
            lengths = [len(item["tokens"]) for item in self.queue]
            ends = [i + 1 for i in range(len(lengths)) if sum(lengths[: i + 1]) == size]
            if not ends:
                break
            self.ready.append(self.queue[: ends[0]])
            self.queue, self.step = self.queue[ends[0] :], self.step + 1
        return 200, {"batch": self.ready.pop() if self.ready else None}


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


class Environment(threading.Thread):
    """Samples groups from the trainer and sends them, with the number of tokens below 150 as score. change: changes an item."""

    def __init__(self, api: RunApi, engine: str, size: int = 4, change=lambda item, number: None) -> None:
        super().__init__(daemon=True)
        self.api, self.engine, self.size, self.change = api, engine, size, change
        self.over = False
        self.start()

    def run(self) -> None:
        number = 0
        while not self.over:
            try:
                if len(self.api.queue) + len(self.api.ready) < 4 and self.api.started:
                    self.group(number)
                    number += 1
            except (urllib.error.URLError, ConnectionError):
                pass  # the trainer is not there yet, or no longer
            time.sleep(0.02)

    def group(self, number: int) -> None:
        prompt = [1, 7, 9 + number % 40]
        asked = {
            "prompt": {"prompt_token_ids": prompt},
            "logprobs": 0,
            "n": self.size,
            "max_tokens": 6,
            "temperature": 1.0,
        }
        answers = [
            [next(iter(one[0].items())) for one in given]
            for given in post(f"{self.engine}/generate", asked)["logprobs"]
        ]
        ids = [[int(i) for i, _ in answer] for answer in answers]
        item = {
            "tokens": [prompt + own for own in ids],
            "masks": [[-100] * len(prompt) + own for own in ids],
            "inference_logprobs": [[1.0] * len(prompt) + [p for _, p in answer] for answer in answers],
            "scores": [float(sum(i < 150 for i in own)) for own in ids],
            "env_id": 0,
        }
        self.change(item, number)
        post(f"{self.api.url}/scored_data", item)


if __name__ == "__main__":
    served = RunApi(int(sys.argv[1]))
    Environment(served, f"http://127.0.0.1:{sys.argv[2]}")
    while not served.started:
        time.sleep(0.1)
    print(f"registered for batches of {served.config['batch_size']}", flush=True)
    time.sleep(3600)
