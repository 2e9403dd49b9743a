"""Our endpoints by subject, each a few lines on top of `Service`, and the server, which closes the engine when it ends."""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from grpo.engines.protocol import Engine
from grpo.env.tokens import Completion
from grpo.extras.serve.batching import Batching
from grpo.extras.serve.clients import client_router
from grpo.extras.serve.dialects.request import CompletionRequest, Fields
from grpo.extras.serve.dialects.writing import vllm_rows
from grpo.extras.serve.gate import Gate, TimedConnection
from grpo.extras.serve.refusals import refuse
from grpo.extras.serve.served_weights import Adapter
from grpo.extras.serve.service import RAW_TOKENS, Json, Service, own_request
from grpo.extras.serve.trl import trl_router
from grpo.system.errors import UserError
from grpo.system.files import strict_json
from grpo.system.ranges import Whole


def make_app(service: Service) -> FastAPI:
    """Return the FastAPI application with all endpoints."""
    app = FastAPI(title="grpo.serve")
    refuse(app)
    for router in (client_router, trl_router, status_router, generate_router, weights_router, pause_router):
        app.include_router(router(service))

    @app.get("/")
    async def endpoints() -> dict[str, list[str]]:
        paths = app.openapi()["paths"]
        return {"endpoints": [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]}

    return app


def status_router(service: Service) -> APIRouter:
    """Return the endpoints that tell how the server is."""
    router, batching, weights = APIRouter(), service.batching, service.weights

    @router.get("/health")
    async def health() -> dict[str, str]:
        if not batching.asleep:
            batching.check_ready()
        return {"status": "ok"}

    @router.get("/health_generate", dependencies=[Depends(service.place, scope="function")])
    async def health_generate() -> dict[str, str]:
        await service.one_token()
        return {"status": "ok"}

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> dict[str, int]:
        batching.check_ready()
        return {"version": batching.engine.version}

    @router.get("/info")
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

    return router


def generate_router(service: Service) -> APIRouter:
    """Return our own endpoint for samples."""
    router = APIRouter()

    @router.post("/generate", dependencies=[Depends(service.place, scope="function")])
    async def generate(body: Json = None) -> Any:
        """Answer `messages`, a list of conversations, or `prompt`: a text, or {"prompt_token_ids": [...]}."""
        fields = Fields(body)
        messages, prompt = fields.take("messages", list), fields.pop("prompt", None)
        likely = fields.take("prompt_logprobs", Whole)
        if (messages is None) == (prompt is None):
            raise UserError("give either messages (a list of conversations) or prompt (a text or token ids)")
        if messages is None:
            request = replace(own_request(fields, RAW_TOKENS), prompt_logprobs=likely)
            prompts = await service.read(service.prompt_ids, [prompt], request.n)
            written = of_one_prompt
        else:
            request = own_request(fields)
            settings = {"temperature": 0.7, **request.settings}
            request = replace(request, settings=settings, prompt_logprobs=likely)
            prompts = await service.read(service.chat_ids, messages, request.n)
            written = of_conversations
        scored = service.scored(request)
        completions = await service.sample(prompts, request)
        scores = await service.scores(request, prompts) if scored else []
        return await service.run_in_thread(written, service, prompts, completions, request, scores)

    return router


def of_conversations(
    service: Service, prompts: Sequence[tuple], done: Sequence[Completion], request: CompletionRequest, scores: Sequence
) -> Response:
    """Return the answer to conversations. done: the completions, n of each prompt. scores: of each prompt, or of none."""
    content = {
        "prompt": [service.prompt_text(prompt) for prompt in prompts],
        "completion": [service.text(completion, request.stop) for completion in done],
        "prompt_token_ids": prompts,
        "completion_token_ids": [completion.ids for completion in done],
        "old_log_probs": [completion.logprobs for completion in done],
        "finish_reasons": [completion.finish for completion in done],
    }
    if scores:
        content["prompt_logprobs"] = [vllm_rows(row, lambda i: service.prompt_text([i])) for row in scores]
    return Response(strict_json(content), media_type="application/json")


def of_one_prompt(
    service: Service, prompts: Sequence[tuple], done: Sequence[Completion], request: CompletionRequest, scores: Sequence
) -> Response:
    """Return the answer in the form that Atropos reads from vLLM: for each token a list of one {id: log-probability}."""
    (prompt,) = prompts
    content = {
        "text": [service.text(completion, request.stop) for completion in done],
        "prompt": service.prompt_text(prompt),
        "finish_reasons": [completion.finish for completion in done],
        "logprobs": [[[{str(i): p}] for i, p in zip(c.ids, c.logprobs, strict=True)] for c in done],
        "prompt_token_ids": prompt,
        "token_ids": [completion.ids for completion in done],
    }
    if scores:
        content["prompt_logprobs"] = vllm_rows(scores[0], lambda i: service.prompt_text([i]))
    return Response(strict_json(content), media_type="application/json")


def weights_router(service: Service) -> APIRouter:
    """Return the endpoints that change the weights."""
    router, weights = APIRouter(), service.weights

    async def changed(function: Callable, *arguments: Any) -> int:
        """Change the weights, even if the client leaves, and return their version. Requests for samples wait meanwhile."""
        service.batching.check_ready()
        call = service.batching.call(lambda engine: function(engine, *arguments))
        return await asyncio.shield(asyncio.wrap_future(call))

    @router.post("/reload_weights")
    async def reload_weights(body: Json = None) -> dict[str, Any]:
        """Read the weights again, from the folder `path` with the same model, or from the current one."""
        fields = Fields(body or {})
        path = fields.take("path", str)
        fields.check_empty()
        path = path and weights.allowed(path)
        version = await changed(weights.read, path)
        return {"status": "ok", "message": "Weights reloaded", "version": version}

    @router.post("/lora/load")
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

    @router.post("/lora/unload")
    async def lora_unload() -> dict[str, Any]:
        return {"status": "ok", "version": await changed(weights.take_off)}

    @router.get("/lora/status")
    async def lora_status() -> dict[str, Any]:
        adapter = weights.adapter
        status = {"adapter_name": adapter and adapter.name, "adapter_path": adapter and adapter.path}
        return {"active": adapter is not None, **status, "load_count": weights.load_count}

    return router


def pause_router(service: Service) -> APIRouter:
    """Return the endpoints that stop sampling for a while."""
    router, batching = APIRouter(), service.batching

    @router.post("/pause")
    @router.post("/resume")
    async def pause(request: Request) -> dict[str, Any]:
        """Pause or resume sampling. /pause answers when no batch is running; later requests wait for /resume."""
        paused = request.url.path == "/pause"
        await asyncio.shield(asyncio.wrap_future(batching.pause(paused)))
        return {"status": "ok", "is_paused": paused}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": batching.paused}

    @router.post("/sleep")
    @router.post("/wake_up")
    async def sleep(request: Request) -> dict[str, str]:
        """Free the memory that the engine can spare, and refuse requests; or read weights that it freed again, and resume."""
        asleep = request.url.path == "/sleep"

        def switch(engine: Engine) -> None:
            if asleep:
                getattr(engine, "sleep", lambda: None)()
            elif engine.version is None:
                service.weights.read(engine)
            batching.asleep = asleep

        await asyncio.shield(asyncio.wrap_future(batching.pause(asleep, switch)))
        return {"status": "sleeping" if asleep else "awake"}

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": batching.asleep}

    return router


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
