"""The endpoints /v1/completions and /v1/chat/completions of OpenAI's API, as far as an engine can answer them.

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


class Complete(Asked):
    """A request of /v1/completions.

    prompt: a text, token ids, or a list of either.
    return_token_ids: add the token ids to each choice, as vLLM does.
    """

    prompt: Any
    return_token_ids: bool = False


class Chat(Asked):
    """A request of /v1/chat/completions. max_tokens is 256 by default, so that requests without it can share a batch."""

    messages: list[Any]
    max_tokens: int = Field(256, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    logprobs: bool = False


def router(service: Service) -> APIRouter:
    """Return the two endpoints for this service."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(service.place, scope="function")])

    def answer(kind: str, prompts: Sequence, completions: Sequence[Completion], choices: list[dict]) -> JSONResponse:
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
        return JSONResponse(content)

    def pieces(completion: Completion) -> list[str]:
        return [service.tokenizer.decode([i]) for i in completion.ids]

    @router.post("/completions")
    async def completions(asked: Complete) -> Any:
        several = isinstance(asked.prompt, list) and any(isinstance(part, (str, list)) for part in asked.prompt)
        prompts = await service.read(service.prompt_ids, asked.prompt if several else [asked.prompt], asked)
        return await service.apart(completed, asked, prompts, await service.sample(prompts, asked))

    def completed(asked: Complete, prompts: Sequence, found: Sequence[Completion]) -> JSONResponse:
        choices = []
        for i, completion in enumerate(found):
            logprobs = {"tokens": pieces(completion), "token_logprobs": completion.logprobs}
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
            tokens = zip(pieces(completion), completion.logprobs, strict=True)
            content = [{"token": piece, "logprob": p, "top_logprobs": []} for piece, p in tokens]
            choices.append({"message": message, "logprobs": {"content": content} if asked.logprobs else None})
        return answer("chat.completion", prompts, found, choices)

    return router
