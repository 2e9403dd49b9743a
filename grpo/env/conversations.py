"""Reads conversations that are JSON, as rows of files and requests of clients have them, in the forms of OpenAI and its like."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from grpo.env.messages import Message, ToolCall, message_of, shown
from grpo.env.tool_parsers import call_in
from grpo.system.errors import UserError


def messages_of(said: Sequence[tuple[dict[str, Any], str]]) -> tuple[Message, ...]:
    """Return a conversation's messages, answers of tools in the order of their calls and with the names of these.

    said: each message as `message_of` takes it, and the id of the call that it answers. Raises UserError if there is none.
    """
    if not said:
        raise UserError('there is no message: give [{"role": "user", "content": "..."}, ...]')
    found: list[Message] = []
    messages = ((message_of(given), answers) for given, answers in said)
    for of_tools, run in groupby(messages, lambda one: one[0].role == "tool"):
        if of_tools and found:
            calls = {call.id: (i, call.name) for i, call in enumerate(found[-1].tool_calls)}
            run = sorted(run, key=lambda one: calls.get(one[1], (len(calls), ""))[0])
            run = ((replace(one, name=one.name or calls.get(to, (0, None))[1]), to) for one, to in run)
        found += (one for one, _ in run)
    return tuple(found)


def chat_message(given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a message as `message_of` takes it, and the id of the call that it answers."""
    called = [call_written(one["function"], one.get("id")) for one in given.get("tool_calls") or ()]
    role = "system" if given.get("role") == "developer" else given.get("role")
    text = text_in(given.get("content"))
    return {**given, "role": role, "content": text, "tool_calls": called, "error": None}, given.get("tool_call_id", "")


def text_in(content: Any) -> Any:
    """Return a message's text, which may come in parts, one line each. Raises UserError for pictures, sounds and files."""
    if content is None or isinstance(content, str | dict):  # which `message_of` refuses
        return content
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if other := [part["type"] for part in texts if part["type"] not in ("text", "input_text", "output_text")]:
        raise UserError(f"a message has a part of type {shown(other[0])}: the policy reads text only")
    return "\n".join(part["text"] for part in texts)


def call_written(given: Mapping[str, Any], name: Any) -> ToolCall:
    """Return the call that OpenAI's clients send back. name: its id. Raises Malformed for arguments that are no JSON object."""
    return call_in({"name": given["name"], "arguments": given.get("arguments") or {}, "id": name}, "arguments")
