"""Anthropic's messages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo.env.messages import ToolCall, tool_of
from grpo.extras.serve.dialects import writing
from grpo.extras.serve.dialects.request import Answer, CompletionRequest, Dialect, Fields, offered_tools
from grpo.extras.tools.conversations import messages_of, text_in

KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip


def read_anthropic(fields: Fields) -> CompletionRequest:
    """Read a request. A conversation that ends with the assistant's message is continued."""
    system = text_in(fields.pop("system", None))
    conversation: list[tuple[dict[str, Any], str]] = [({"role": "system", "content": system}, "")] if system else []
    for message in fields.take("messages", list, []):
        conversation += messages_in(message)
    described = [tool | {"parameters": tool["input_schema"]} for tool in fields.take("tools", list, [])]
    return CompletionRequest(
        messages_of(conversation),
        offered_tools([tool_of({"function": tool}) for tool in described], fields.pop("tool_choice", None)),
        **fields.sampling("stop_sequences"),
    )


def messages_in(message: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the messages that one message of the API is: first the results of tools, then its text and its calls."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for block in blocks:
        if block["type"] == "tool_result":
            yield {"role": "tool", "content": text_in(block.get("content")) or ""}, block["tool_use_id"]
    used = [ToolCall(b["name"], b["input"], b["id"]) for b in blocks if b["type"] == "tool_use"]
    texts = [block for block in blocks if block["type"] not in ("tool_result", "tool_use")]
    if texts or used:
        yield {"role": message["role"], "content": text_in(texts), "tool_calls": used}, ""


def anthropic_written(request: CompletionRequest, answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """Return the answer as Anthropic's message."""
    (answer,) = answers
    message = answer.message
    called = [
        {
            "type": "tool_use",
            "id": tool_call.id or writing.new_id("toolu_"),
            "name": tool_call.name,
            "input": dict(tool_call.arguments),
        }
        for tool_call in message.tool_calls
    ]
    spoken = [{"type": "text", "text": message.content}] if message.content or not called else []
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    read, wrote = writing.written_usage(request, answers)
    return {
        "id": writing.new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": spoken + called,
        "stop_reason": "stop_sequence" if answer.stop else reasons[answer.finish],
        "stop_sequence": answer.stop,
        "usage": {"input_tokens": read, "output_tokens": wrote},
    }


def anthropic_events(answer: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of each block, its text in pieces, its arguments in one."""
    end = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    yield writing.event("message_start", message={**answer, "content": [], "stop_reason": None, "stop_sequence": None})
    for i, block in enumerate(answer["content"]):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in writing.words_of(block["text"])]
        else:
            empty = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": writing.arguments_of(block["input"])}]
        yield writing.event("content_block_start", index=i, content_block=empty)
        for delta in deltas:
            yield writing.event("content_block_delta", index=i, delta=delta)
        yield writing.event("content_block_stop", index=i)
    yield writing.event("message_delta", delta=end, usage=answer["usage"])
    yield writing.event("message_stop")


def anthropic_failure(status: int, line: str) -> dict[str, Any]:
    """Return an error as Anthropic's clients read it."""
    return {"type": "error", "error": {"type": KINDS.get(status, "api_error"), "message": line}}


ANTHROPIC = Dialect(read_anthropic, anthropic_written, anthropic_events, anthropic_failure)
