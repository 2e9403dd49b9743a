"""OpenAI's Responses. Nothing is stored: each request has its whole conversation."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo.env.messages import shown, tool_of
from grpo.extras.serve.dialects import writing
from grpo.extras.serve.dialects.chat import chat_logprobs
from grpo.extras.serve.dialects.request import Answer, CompletionRequest, Dialect, Fields, offered_tools
from grpo.extras.tools.conversations import call_written, messages_of, text_in
from grpo.system.errors import UserError
from grpo.system.ranges import Whole


def read_responses(fields: Fields) -> CompletionRequest:
    """Read a request. `instructions` are a system message before the input."""
    conversation: list[tuple[dict[str, Any], str]] = []
    items = fields.take("input", str | list, [])
    start = [{"role": "system", "content": fields.pop("instructions")}] if "instructions" in fields else []
    for item in start + ([{"role": "user", "content": items}] if isinstance(items, str) else items):
        add_item(conversation, item)
    tools = [tool_of({"function": tool}) for tool in fields.take("tools", list, [])]
    top = fields.take("top_logprobs", Whole)
    fields["response_format"] = fields.take("text", dict, {}).get("format", {"type": "text"})
    tools = offered_tools(tools, fields.pop("tool_choice", None))
    return CompletionRequest(
        messages_of(conversation), tools, logprobs=top, **fields.sampling("stop", "max_output_tokens")
    )


def add_item(conversation: list[tuple[dict[str, Any], str]], item: Mapping[str, Any]) -> None:
    """Add an item of the input to the conversation. A call belongs to the assistant's message before it."""
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        conversation.append(({"role": role, "content": text_in(item["content"]), "tool_calls": []}, ""))
    elif kind == "function_call":
        if not conversation or conversation[-1][0]["role"] != "assistant":
            conversation.append(({"role": "assistant", "content": None, "tool_calls": []}, ""))
        conversation[-1][0]["tool_calls"].append(call_written(item, item["call_id"]))
    elif kind == "function_call_output":
        conversation.append(({"role": "tool", "content": text_in(item["output"])}, item["call_id"]))
    else:
        raise UserError(f"the input has an item of type {shown(kind)}: give messages, function calls and their outputs")


def responses_written(request: CompletionRequest, answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """Return the answer as OpenAI's response."""
    (answer,) = answers
    message, cut_short = answer.message, answer.completion.finish == "length"
    end = {"status": "incomplete" if cut_short else "completed"}
    output: list[dict[str, Any]] = []
    if message.content or not message.tool_calls:
        logprobs = (chat_logprobs(request, answer) or {"content": []})["content"]
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": logprobs}
        output.append({"id": writing.new_id("msg_"), "type": "message", "role": "assistant", "content": [part], **end})
    for tool_call in message.tool_calls:
        call_id, arguments = tool_call.id or writing.new_id("call_"), writing.arguments_of(tool_call.arguments)
        called = {"call_id": call_id, "name": tool_call.name, "arguments": arguments}
        output.append({"id": writing.new_id("fc_"), "type": "function_call", **called, **end})
    read, wrote = writing.written_usage(request, answers)
    usage = {"input_tokens": read, "output_tokens": wrote, "total_tokens": read + wrote}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": writing.new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        **end,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_short else None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage | details,
    }


def responses_events(answer: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of each item, its text in pieces, its arguments in one."""
    for number, (name, data) in enumerate(response_steps(answer)):
        yield name, {**data, "sequence_number": number}


def response_steps(answer: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events without their numbers."""
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield writing.event("response.created", response=begun)
    yield writing.event("response.in_progress", response=begun)
    for i, item in enumerate(answer["output"]):
        spoken = item["type"] == "message"
        empty = {**item, "status": "in_progress", **({"content": []} if spoken else {"arguments": ""})}
        yield writing.event("response.output_item.added", output_index=i, item=empty)
        place: dict[str, Any] = {"output_index": i, "item_id": item["id"]}
        if spoken:
            (part,) = item["content"]
            place["content_index"] = 0
            whole = {"text": part["text"], "logprobs": part["logprobs"]}
            yield writing.event("response.content_part.added", **place, part={**part, "text": "", "logprobs": []})
            for n, piece in enumerate(writing.words_of(part["text"])):
                logprobs = [] if n else part["logprobs"]  # all of them with the first piece
                yield writing.event("response.output_text.delta", **place, delta=piece, logprobs=logprobs)
            yield writing.event("response.output_text.done", **place, **whole)
            yield writing.event("response.content_part.done", **place, part=part)
        else:
            written = item["arguments"]
            yield writing.event("response.function_call_arguments.delta", **place, delta=written)
            yield writing.event("response.function_call_arguments.done", **place, arguments=written, name=item["name"])
        yield writing.event("response.output_item.done", output_index=i, item=item)
    yield writing.event(f"response.{answer['status']}", response=answer)


RESPONSES = Dialect(read_responses, responses_written, responses_events, writing.openai_failure)
