"""The endpoints /v1/models, /v1/completions and /v1/chat/completions of OpenAI's API, as far as an engine can answer them.

Not supported: streaming, tools, and log-probabilities of tokens that were not sampled. `model` may be any name, because the
server has one model.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import AliasChoices, Field

from grpo.apps.serve.service import Asked, Service
from grpo.env.tokens import Completion


class WithIds(Asked):
    """Fields of vLLM. return_token_ids: add the token ids to the answer. return_tokens_as_token_ids: write each token of
    `logprobs` as token_id:ID, in place of its text."""

    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class Complete(WithIds):
    """A request of /v1/completions. prompt: a text, token ids, or a list of either."""

    prompt: Any


class Chat(WithIds):
    """A request of /v1/chat/completions. max_tokens is 256 by default, so that requests without it can share a batch."""

    messages: list[Any]
    max_tokens: int = Field(256, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=0)


def router(service: Service) -> APIRouter:
    """Return the three endpoints for this service."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(service.place, scope="function")])

    def answer(
        kind: str, prompts: Sequence, completions: Sequence[Completion], choices: list[dict], **more
    ) -> JSONResponse:
        read, written = sum(map(len, prompts)), sum(len(completion.ids) for completion in completions)
        ends = [{"index": i, "finish_reason": completion.finish} for i, completion in enumerate(completions)]
        content = {
            "id": f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": service.weights.pretrained.path,
            "choices": [end | choice for end, choice in zip(ends, choices, strict=True)],
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
        }
        return JSONResponse(content | more)

    def pieces(asked: WithIds, completion: Completion) -> list[str]:
        as_ids = asked.return_tokens_as_token_ids
        return [f"token_id:{i}" if as_ids else service.tokenizer.decode([i]) for i in completion.ids]

    @router.get("/models")
    async def models() -> dict[str, Any]:
        model = {"id": service.weights.pretrained.path, "object": "model", "created": 0, "owned_by": "grpo"}
        return {"object": "list", "data": [model]}

    @router.post("/completions")
    async def completions(asked: Complete) -> Any:
        several = isinstance(asked.prompt, list) and any(isinstance(part, (str, list)) for part in asked.prompt)
        prompts = await service.read(service.prompt_ids, asked.prompt if several else [asked.prompt], asked)
        return await service.apart(completed, asked, prompts, await service.sample(prompts, asked))

    def completed(asked: Complete, prompts: Sequence, found: Sequence[Completion]) -> JSONResponse:
        choices = []
        for i, completion in enumerate(found):
            tokens, values = pieces(asked, completion), completion.logprobs
            top = [{token: value} for token, value in zip(tokens, values, strict=True)]
            logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": top}
            choice = {"text": service.text(completion), "logprobs": None if asked.logprobs is None else logprobs}
            if asked.return_token_ids:
                choice |= {"token_ids": completion.ids, "prompt_token_ids": prompts[i // asked.n]}
            choices.append(choice)
        return answer("text_completion", prompts, found, choices)

    @router.post("/chat/completions")
    async def chat(asked: Chat) -> Any:
        prompts = await service.read(service.chat_ids, [asked.messages], asked)
        return await service.apart(chatted, asked, prompts, await service.sample(prompts, asked))

    def chatted(asked: Chat, prompts: Sequence, found: Sequence[Completion]) -> JSONResponse:
        choices: list[dict[str, Any]] = []
        for completion in found:
            message = {"role": "assistant", "content": service.text(completion)}
            tokens = zip(pieces(asked, completion), completion.logprobs, strict=True)
            content = [{"token": piece, "logprob": p, "top_logprobs": []} for piece, p in tokens]
            choice = {"message": message, "logprobs": {"content": content} if asked.logprobs else None}
            choices.append(choice | ({"token_ids": completion.ids} if asked.return_token_ids else {}))
        of_prompt = {"prompt_token_ids": prompts[0]} if asked.return_token_ids else {}
        return answer("chat.completion", prompts, found, choices, **of_prompt)

    return router
