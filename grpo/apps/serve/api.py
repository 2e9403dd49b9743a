"""Our endpoints, each a few lines on top of `Service`, and the server, which closes the engine when it ends."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from grpo.apps.serve import openai
from grpo.apps.serve.batching import Batching, Unavailable
from grpo.apps.serve.served_weights import Adapter
from grpo.apps.serve.service import Asked, Service
from grpo.system.errors import UserError, told


class Generate(Asked):
    """A request for samples of several conversations or of one prompt.

    messages: a list of conversations.
    prompt: a text, or {"prompt_token_ids": [...]}.
    max_tokens, temperature: by default 256 and 0.7 for conversations, 16 and 1 for a prompt.
    """

    messages: list[Any] | None = None
    prompt: Any = None


class Reload(BaseModel, extra="forbid"):
    """A request to reload the weights. path: another folder with the same model; null reads the current folder again."""

    path: str | None = None


class Load(BaseModel, extra="forbid"):
    """A request to serve a LoRA adapter. adapter_path: a PEFT folder. adapter_name: by default the folder's name."""

    adapter_path: str
    adapter_name: str | None = None


def make_app(service: Service) -> FastAPI:
    """Return the FastAPI application with all endpoints."""
    app = FastAPI(title="grpo.serve")
    batching, weights = service.batching, service.weights
    refuse(app)
    app.include_router(openai.router(service))

    async def changed(function: Callable, *arguments: Any) -> int:
        """Change the weights and return their version. Requests for samples wait meanwhile."""
        batching.check_ready()
        return await asyncio.wrap_future(batching.call(lambda engine: function(engine, *arguments)))

    @app.get("/")
    async def endpoints() -> dict[str, list[str]]:
        paths = app.openapi()["paths"]
        return {"endpoints": [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        batching.check_ready()
        return {"status": "ok"}

    @app.get("/health_generate")
    async def health_generate() -> dict[str, str]:
        await service.one_token()
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, int]:
        batching.check_ready()
        return {"version": batching.engine.version}

    @app.post("/generate")
    async def generate(asked: Generate) -> dict[str, Any]:
        if (asked.messages is None) == (asked.prompt is None):
            raise UserError("give either messages (a list of conversations) or prompt (a text or token ids)")
        return await (one_prompt(asked) if asked.messages is None else conversations(asked))

    async def conversations(asked: Generate) -> dict[str, Any]:
        defaults = {"max_tokens": 256, "temperature": 0.7}
        asked = asked.model_copy(update={k: v for k, v in defaults.items() if k not in asked.model_fields_set})
        prompts = [service.chat_ids(messages) for messages in asked.messages]
        completions = await service.sample(prompts, asked)
        return {
            "prompt": [service.prompt_text(prompt) for prompt in prompts],
            "completion": [service.text(completion) for completion in completions],
            "prompt_token_ids": prompts,
            "completion_token_ids": [completion.ids for completion in completions],
            "old_log_probs": [completion.logprobs for completion in completions],
            "finish_reasons": [completion.finish for completion in completions],
        }

    async def one_prompt(asked: Generate) -> dict[str, Any]:
        """Return the answer in the form that Atropos reads from vLLM: for each token a list of one {id: log-probability}."""
        prompt = service.prompt_ids(asked.prompt)
        completions = await service.sample([prompt], asked)
        return {
            "text": [service.text(completion) for completion in completions],
            "prompt": service.prompt_text(prompt),
            "finish_reasons": [completion.finish for completion in completions],
            "logprobs": [[[{str(i): p}] for i, p in zip(c.ids, c.logprobs, strict=True)] for c in completions],
            "prompt_token_ids": prompt,
            "token_ids": [completion.ids for completion in completions],
        }

    @app.post("/reload_weights")
    async def reload_weights(asked: Reload | None = None) -> dict[str, Any]:
        version = await changed(weights.read, asked and asked.path)
        return {"status": "ok", "message": "Weights reloaded", "version": version}

    @app.post("/lora/load")
    async def lora_load(asked: Load) -> Any:
        if not (Path(asked.adapter_path) / "adapter_config.json").is_file():
            line = f"adapter_path={asked.adapter_path} is not an adapter: give a PEFT folder with adapter_config.json"
            return JSONResponse({"error": line}, 404)
        adapter = Adapter(asked.adapter_path, asked.adapter_name or Path(asked.adapter_path).name)
        version = await changed(weights.put_on, adapter)
        return {"status": "ok", "adapter_name": adapter.name, "version": version}

    @app.post("/lora/unload")
    async def lora_unload() -> dict[str, Any]:
        return {"status": "ok", "version": await changed(weights.take_off)}

    @app.get("/lora/status")
    async def lora_status() -> dict[str, Any]:
        adapter = weights.adapter
        status = {"adapter_name": adapter and adapter.name, "adapter_path": adapter and adapter.path}
        return {"active": adapter is not None, **status, "load_count": weights.load_count}

    @app.post("/pause")
    @app.post("/resume")
    async def pause(request: Request) -> dict[str, Any]:
        """Pause or resume sampling. /pause answers when no batch is running; later requests wait for /resume."""
        paused = request.url.path == "/pause"
        await asyncio.wrap_future(batching.pause(paused))
        return {"status": "ok", "is_paused": paused}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": batching.paused}

    return app


def refuse(app: FastAPI) -> None:
    """Make every error of the application one line: {"error": LINE}."""

    def of_a_field(error: RequestValidationError) -> str:
        first = error.errors()[0]
        kind, where = first["type"], ".".join(str(part) for part in first["loc"] if part != "body")
        if kind == "json_invalid":
            return "the request is not JSON"
        if kind == "extra_forbidden":
            return f"there is no field {where!r} here: /docs lists the fields"
        return ": ".join(filter(None, [where, first["msg"].removeprefix("Value error, ")]))

    answers = {UserError: (400, str), RequestValidationError: (400, of_a_field), Unavailable: (503, str)}
    for kind, (status, words) in (answers | {Exception: (500, told)}).items():
        app.exception_handler(kind)(lambda _, error, s=status, w=words: JSONResponse({"error": w(error)}, s))


class Server(uvicorn.Server):
    """A server that answers the running batch, refuses the waiting requests and closes the engine before it ends."""

    def __init__(self, service: Service) -> None:
        super().__init__(uvicorn.Config(make_app(service), log_level="warning", lifespan="off"))
        self.batching: Batching = service.batching

    async def shutdown(self, sockets: Any = None) -> None:
        self.batching.stop()
        if self.server_state.tasks:
            print("stopping after the running batch; Ctrl-C again stops at once", file=sys.stderr, flush=True)
        await super().shutdown(sockets)
        while self.batching.alive and not self.force_exit:
            await asyncio.sleep(0.05)
        if self.force_exit:
            os._exit(130)  # the only way to end a thread that is inside torch
