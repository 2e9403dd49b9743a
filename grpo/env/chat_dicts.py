"""Messages as the dictionaries that chat templates take, and conversations with which a template is tried."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from grpo.env.messages import Message, ToolCall, ToolSpec
from grpo.env.thoughts import Written

# messages and tools of trials
ASKED = (Message("user", "1 + 2?"),)
ADD = ToolSpec("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def called(count: int) -> list[Message]:
    """Return one message with so many calls, and their answers."""
    calls = (ToolCall("add", {"a": 1}),) * count
    return [Message("assistant", "", calls), *[Message("tool", "3", name="add")] * count]


def as_dicts(
    messages: Sequence[Message], way: Callable[[Written], Written] | None = None, how: Mapping[str, bool] | None = None
) -> list[Written]:
    """Return messages in the form that chat templates take. A call whose id is not nine letters or digits, as
    Mistral's templates want it, gets one made of its place. An answer gets the id of its call.

    way: rewrites a message of the policy with its thought; a last message is left as it is, since it is
    continued. how: how calls are written. text: arguments as JSON text. empty: no content beside a call.
    named: ids as Kimi's.
    """
    how = how or {}
    dicts = [message.as_dict() for message in messages]
    if way is not None:
        dicts = [
            way(message) if message["role"] == "assistant" and message is not dicts[-1] else message
            for message in dicts
        ]
    waiting: list[str] = []
    places = count()
    for written in dicts:
        if calls := written.get("tool_calls"):
            for call in calls:
                place = next(places)
                if how.get("named"):
                    call["id"] = f"functions.{call['function']['name']}:{place}"
                elif not re.fullmatch("[a-zA-Z0-9]{9}", call.get("id", "")):
                    call["id"] = f"call{place:05d}"
                if how.get("text"):
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            if how.get("empty") and not written["content"]:
                written["content"] = None
            waiting = [call["id"] for call in calls]
        elif written["role"] == "tool" and waiting:
            written["tool_call_id"] = waiting.pop(0)
    return dicts
