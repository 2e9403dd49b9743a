"""Reads conversations that are JSON, as rows of files and requests of clients have them, in the forms of OpenAI and its like."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from grpo.env.messages import Message, ToolCall, message_of, shown
from grpo.env.pictures import Picture
from grpo.extras.tools.tool_parsers import call_in
from grpo.system.errors import UserError


def messages_of(pairs: Sequence[tuple[dict[str, Any], str]]) -> tuple[Message, ...]:
    """Return a conversation's messages, answers of tools in the order of their calls and with the names of these.

    pairs: each message as `message_of` takes it, and the id of the call that it answers. Raises UserError if there is none.
    """
    if not pairs:
        raise UserError('there is no message: give [{"role": "user", "content": "..."}, ...]')
    conversation: list[Message] = []
    messages = ((message_of(message), call_id) for message, call_id in pairs)
    for of_tools, run in groupby(messages, lambda pair: pair[0].role == "tool"):
        if of_tools and conversation:
            conversation += answers_in_order(conversation[-1].tool_calls, [*run])
        else:
            conversation += (message for message, _ in run)
    return tuple(conversation)


def answers_in_order(calls: Sequence[ToolCall], answers: Sequence[tuple[Message, str]]) -> list[Message]:
    """Return the messages of tools in the order of the calls, each with its tool's name. answers: (message, id of its call).
    Calls without an id are answered in their order."""
    places = {call.id: i for i, call in enumerate(calls) if call.id}
    others = (i for i, call in enumerate(calls) if not call.id)
    placed = [(places[i] if i in places else next(others, len(calls)), message) for message, i in answers]
    placed.sort(key=lambda pair: pair[0])
    return [replace(m, name=m.name or (calls[i].name if i < len(calls) else None)) for i, m in placed]


def chat_message(message: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a message as `message_of` takes it, and the id of the call that it answers."""
    calls = [call_written(call["function"], call.get("id")) for call in message.get("tool_calls") or ()]
    role = "system" if message.get("role") == "developer" else message.get("role")
    read = {**message, "role": role, "content": text_in(message.get("content")), "tool_calls": calls, "error": None}
    # no client names a file
    read["pictures"] = [one for one in message.get("pictures") or () if isinstance(one, Picture)]
    return read, message.get("tool_call_id", "")


def text_in(content: Any) -> Any:
    """Return a message's text, which may come in parts, one line each. Raises UserError for pictures, sounds and files."""
    if content is None or isinstance(content, str | dict):  # which `message_of` refuses
        return content
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if other := [part["type"] for part in texts if part["type"] not in ("text", "input_text", "output_text")]:
        raise UserError(f"a message has a part of type {shown(other[0])}: the policy reads text only")
    return "\n".join(part["text"] for part in texts)


def call_written(function: Mapping[str, Any], call_id: Any) -> ToolCall:
    """Return the call that OpenAI's clients send back. Raises Malformed for arguments that are no JSON object."""
    fields = {"name": function["name"], "arguments": function.get("arguments") or {}, "id": call_id}
    return call_in(fields, "arguments")
