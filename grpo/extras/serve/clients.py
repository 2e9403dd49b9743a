"""The endpoints that clients of OpenAI, Anthropic and vLLM call, see grpo.extras.serve.dialects, and the list of models.

The server has one model; a request for another one is refused. A stream is sent in pieces when the answer is complete.
"""

from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from grpo.extras.serve.dialects import DIALECTS
from grpo.extras.serve.dialects.anthropic import ANTHROPIC
from grpo.extras.serve.dialects.request import Dialect
from grpo.extras.serve.dialects.writing import sse
from grpo.extras.serve.service import Json, Service
from grpo.system.files import strict_json


def client_router(service: Service) -> APIRouter:
    """Return the endpoints for this service."""
    router = APIRouter(dependencies=[Depends(service.place, scope="function")])

    def add(path: str, dialect: Dialect) -> None:
        async def answer(body: Json = None) -> Response:
            request = dialect.read(body)
            service.check_name(body.get("model"))
            answers = await service.answers(request)

            def written() -> Response:
                content = dialect.written(request, answers, service.name)
                if request.stream:
                    return Response("".join(sse(dialect, content)), media_type="text/event-stream")
                return Response(strict_json(content), media_type="application/json")

            return await service.run_in_thread(written)

        router.post(path)(answer)

    for path, dialect in DIALECTS.items():
        add(path, dialect)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: Json = None) -> dict[str, int]:
        return {"input_tokens": len(await service.run_in_thread(service.rendered, ANTHROPIC.read(body)))}

    def described(name: str | None = None) -> dict[str, Any]:
        path = service.weights.pretrained.path
        model = {"id": name or service.name, "object": "model", "created": 0, "owned_by": "grpo", "root": path}
        return {**model, "max_model_len": service.batching.context}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described()]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_name(name)
        return described(name)

    return router
