"""The endpoints that clients of TRL expect beside those of vLLM.

Older versions of TRL have a server of their own, with /generate/ and /chat/; the client of newer ones, as 1.16, speaks to /v1. A
trainer of TRL cannot send its weights here, because an engine takes whole models.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException

from grpo.extras.serve.dialects.request import Fields
from grpo.extras.serve.service import RAW_TOKENS, Json, Service, own_request

UNSENT = (
    'this server reads weights from a folder: save them and POST /reload_weights {"path": FOLDER}; servers that a trainer sends '
    "weights to are those of engine=vllm_server (docs/engines.md)"
)
SENDING = (  # of TRL's own server, then of vLLM's
    "init_communicator update_named_param batch_update_named_params close_communicator "
    "init_weight_transfer_engine start_weight_update update_weights finish_weight_update"
)


def lists_of_one(rows: Sequence[Sequence]) -> list[list[list]]:
    """Return rows of tokens' values with a list for each token, as if it held the likeliest ones."""
    return [[[value] for value in row] for row in rows]


def trl_router(service: Service) -> APIRouter:
    """Return the endpoints for this service.

    /generate/ has prompts: texts or token ids. /chat/ has messages: conversations. Each gets n samples.
    """
    router = APIRouter()

    @router.post("/generate/", dependencies=[Depends(service.place, scope="function")])
    @router.post("/chat/", dependencies=[Depends(service.place, scope="function")])
    async def generate(request: Request, body: Json = None) -> dict[str, Any]:
        """A client that asks for `logprobs` gets a list of the likeliest tokens at each place, here only of the sampled one."""
        fields, of_chat = Fields(body), request.url.path == "/chat/"
        likely = "logprobs" in fields
        inputs = fields.take("messages" if of_chat else "prompts", list, [])
        wanted = own_request(fields, RAW_TOKENS)
        prompts = await service.read(service.chat_ids if of_chat else service.prompt_ids, inputs, wanted.n)
        completions = await service.sample(prompts, wanted)
        ids = [completion.ids for completion in completions]
        logprobs = [completion.logprobs for completion in completions]
        answer = {"prompt_ids": prompts, "completion_ids": ids}
        if not likely:
            return answer | {"logprobs": logprobs}
        return answer | {"logprobs": lists_of_one(logprobs), "logprob_token_ids": lists_of_one(ids)}

    @router.get("/get_world_size")
    @router.get("/get_tensor_parallel_size")
    async def size() -> dict[str, int]:
        return {"world_size": 1, "tensor_parallel_size": 1}

    @router.post("/reset_prefix_cache")
    async def reset() -> dict[str, bool]:
        return {"success": True}  # no engine keeps a cache of older weights

    async def unsent() -> None:
        raise HTTPException(501, UNSENT)

    for name in SENDING.split():
        router.post(f"/{name}")(unsent)
    router.get("/server_info")(unsent)  # TRL's client reads it before it sends weights
    return router
