"""The APIs share this code to write an answer: ids, the numbers of tokens, errors, streams."""

import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo.extras.serve.dialects.request import Answer, CompletionRequest, Dialect, Scores
from grpo.system.files import strict_json


def arguments_of(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON text."""
    return strict_json(arguments, ensure_ascii=False)


def new_id(kind: str) -> str:
    """Return a fresh id."""
    return f"{kind}{uuid.uuid4().hex[:24]}"


def written_usage(request: CompletionRequest, answers: Sequence[Answer]) -> tuple[int, int]:
    """Return the numbers of tokens of the prompts, each counted once, and of the completions."""
    return sum(len(a.prompt_ids) for a in answers[:: request.n]), sum(len(a.completion.ids) for a in answers)


def openai_answer(
    kind: str, request: CompletionRequest, answers: Sequence[Answer], model: str, choices: Iterable[dict[str, Any]]
) -> dict[str, Any]:
    """Return what the answers of OpenAI's two older APIs have in common."""
    read, wrote = written_usage(request, answers)
    usage = {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}
    ends = [{"index": i, "finish_reason": answer.finish} for i, answer in enumerate(answers)]
    return {
        "id": new_id("chatcmpl-" if kind == "chat.completion" else "cmpl-"),
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [end | choice for end, choice in zip(ends, choices, strict=True)],
        **({"usage": usage} if request.usage or not request.stream else {}),
    }


def prompt_scores(request: CompletionRequest, answer: Answer) -> dict[str, Any]:
    """Return the field `prompt_logprobs`, if it is wanted: log-probabilities of the prompt's tokens in vLLM's form."""
    if request.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": vllm_rows(answer.scores[: len(answer.prompt_ids)], lambda i: answer.piece(i, request))}


def vllm_rows(scores: Iterable[Scores], piece: Callable[[int], str]) -> list[dict[str, Any] | None]:
    """Return the scores of tokens in vLLM's form. piece: the text of a token. Nothing precedes the first one: None."""
    return [{str(i): {"logprob": p, "decoded_token": piece(i)} for i, p in row.items()} or None for row in scores]


def openai_failure(status: int, line: str) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": line, "type": kind, "param": None, "code": None}}


def event(kind: str, **data: Any) -> tuple[str, dict[str, Any]]:
    """Return a named event, whose data has its name too."""
    return kind, {"type": kind, **data}


def words_of(text: str) -> list[str]:
    """Return a text in the pieces of a stream: words of at most 16 characters, each with the blanks before it. An empty text is
    one piece."""
    return re.findall(r"\s*\S{1,16}(?:\s+$)?|\s+$", text) or [text]


def sse(dialect: Dialect, answer: dict[str, Any]) -> Iterator[str]:
    """Yield an answer as server-sent events. APIs without names of events end with [DONE]."""
    name = None
    for name, data in dialect.events(answer):
        yield f"event: {name}\ndata: {strict_json(data)}\n\n" if name else f"data: {strict_json(data)}\n\n"
    if name is None:
        yield "data: [DONE]\n\n"
