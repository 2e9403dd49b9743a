"""Our endpoints, each a few lines on top of `Service`, and the server, which closes the engine when it ends."""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from grpo.engines.protocol import Engine
from grpo.env.tokens import Completion
from grpo.serve.batching import Batching
from grpo.serve.clients import client_router
from grpo.serve.dialects.calls import Call, Fields
from grpo.serve.gate import Gate, TimedConnection
from grpo.serve.refusals import refuse
from grpo.serve.served_weights import Adapter
from grpo.serve.service import RAW_TOKENS, Json, Service, own_call
from grpo.serve.trl import trl_router
from grpo.system.errors import UserError
from grpo.system.files import strict_json


def make_app(service: Service) -> FastAPI:
    """Return the FastAPI application with all endpoints."""
    app = FastAPI(title="grpo.serve")
    batching, weights = service.batching, service.weights
    queued = [Depends(service.place, scope="function")]
    refuse(app)
    app.include_router(client_router(service))
    app.include_router(trl_router(service))

    async def changed(function: Callable, *arguments: Any) -> int:
        """Change the weights, even if the client leaves, and return their version. Requests for samples wait meanwhile."""
        batching.check_ready()
        return await asyncio.shield(asyncio.wrap_future(batching.call(lambda engine: function(engine, *arguments))))

    @app.get("/")
    async def endpoints() -> dict[str, list[str]]:
        paths = app.openapi()["paths"]
        return {"endpoints": [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        if not batching.asleep:
            batching.check_ready()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health_generate", dependencies=queued)
    async def health_generate() -> dict[str, str]:
        await service.one_token()
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, int]:
        batching.check_ready()
        return {"version": batching.engine.version}

    @app.post("/generate", dependencies=queued)
    async def generate(body: Json = None) -> Any:
        """Answer `messages`, a list of conversations, or `prompt`: a text, or {"prompt_token_ids": [...]}."""
        fields = Fields(body)
        messages, prompt = fields.take("messages", list), fields.pop("prompt", None)
        if (messages is None) == (prompt is None):
            raise UserError("give either messages (a list of conversations) or prompt (a text or token ids)")
        call = own_call(fields, RAW_TOKENS if messages is None else None)
        return await (one_prompt(prompt, call) if messages is None else conversations(messages, call))

    async def conversations(messages: list, call: Call) -> Response:
        call = replace(call, settings={"temperature": 0.7, **call.settings})
        prompts = await service.read(service.chat_ids, messages, call.n)
        return await service.run_in_thread(of_conversations, prompts, await service.sample(prompts, call), call)

    def of_conversations(prompts: Sequence[tuple], completions: Sequence[Completion], call: Call) -> Response:
        content = {
            "prompt": [service.prompt_text(prompt) for prompt in prompts],
            "completion": [service.text(completion, call.stop) for completion in completions],
            "prompt_token_ids": prompts,
            "completion_token_ids": [completion.ids for completion in completions],
            "old_log_probs": [completion.logprobs for completion in completions],
            "finish_reasons": [completion.finish for completion in completions],
        }
        return Response(strict_json(content), media_type="application/json")

    async def one_prompt(prompt: Any, call: Call) -> Response:
        prompts = await service.read(service.prompt_ids, [prompt], call.n)
        return await service.run_in_thread(of_one_prompt, *prompts, await service.sample(prompts, call), call)

    def of_one_prompt(prompt: tuple[int, ...], completions: Sequence[Completion], call: Call) -> Response:
        """Return the answer in the form that Atropos reads from vLLM: for each token a list of one {id: log-probability}."""
        content = {
            "text": [service.text(completion, call.stop) for completion in completions],
            "prompt": service.prompt_text(prompt),
            "finish_reasons": [completion.finish for completion in completions],
            "logprobs": [[[{str(i): p}] for i, p in zip(c.ids, c.logprobs, strict=True)] for c in completions],
            "prompt_token_ids": prompt,
            "token_ids": [completion.ids for completion in completions],
        }
        return Response(strict_json(content), media_type="application/json")

    @app.post("/reload_weights")
    async def reload_weights(body: Json = None) -> dict[str, Any]:
        """Read the weights again, from the folder `path` with the same model, or from the current one."""
        fields = Fields(body or {})
        path = fields.take("path", str)
        fields.check_empty()
        path = path and weights.allowed(path)
        version = await changed(weights.read, path)
        return {"status": "ok", "message": "Weights reloaded", "version": version}

    @app.post("/lora/load")
    async def lora_load(body: Json = None) -> Any:
        """Serve a LoRA adapter: `adapter_path` is a PEFT folder, `adapter_name` by default the folder's name."""
        fields = Fields(body)
        path, name = fields.take("adapter_path", str, ""), fields.take("adapter_name", str)
        fields.check_empty()
        path = weights.allowed(path)
        if not (Path(path) / "adapter_config.json").is_file():
            line = f"adapter_path={path} is not an adapter: give a PEFT folder with adapter_config.json"
            raise HTTPException(404, line)
        adapter = Adapter(path, name or Path(path).name)
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
        await asyncio.shield(asyncio.wrap_future(batching.pause(paused)))
        return {"status": "ok", "is_paused": paused}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": batching.paused}

    @app.post("/sleep")
    @app.post("/wake_up")
    async def sleep(request: Request) -> dict[str, str]:
        """Free the memory that the engine can spare, and refuse requests; or read weights that it freed again, and resume."""
        asleep = request.url.path == "/sleep"

        def switch(engine: Engine) -> None:
            if asleep:
                getattr(engine, "sleep", lambda: None)()
            elif engine.version is None:
                weights.read(engine)
            batching.asleep = asleep

        await asyncio.shield(asyncio.wrap_future(batching.pause(asleep, switch)))
        return {"status": "sleeping" if asleep else "awake"}

    @app.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": batching.asleep}

    @app.get("/info")
    async def info() -> dict[str, Any]:
        pretrained = weights.pretrained
        return {
            "model": pretrained.path,
            "version": weights.version,
            "dtype": pretrained.dtype,
            "max_model_len": batching.context,
            "engine": type(batching.engine).__name__,
            "requests": {"running": len(batching.running), "waiting": len(batching.waiting)},
        }

    return app


class Server(uvicorn.Server):
    """A server that answers the running batch, refuses the waiting requests and closes the engine before it ends.

    api_key: requests need it as a bearer token; None: they need none.
    """

    def __init__(self, service: Service, api_key: str | None = None) -> None:
        limits = service.limits
        gate = Gate(make_app(service), service.metrics, limits.body, api_key)
        config = uvicorn.Config(
            gate,
            http=TimedConnection,
            ws="none",
            loop="asyncio",
            interface="asgi3",
            timeout_keep_alive=limits.seconds,
            log_level="error",
            lifespan="off",
        )
        super().__init__(config)
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
