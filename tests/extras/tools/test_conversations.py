"""Conversations that are JSON: which call an answer belongs to. Schemas of tools, calls of a message, variables of programs."""

import pytest

from grpo.env.messages import Message, ToolCall
from grpo.env.types import Action
from grpo.extras.tools.conversations import chat_message, messages_of
from grpo.extras.tools.env import ToolEnv
from grpo.extras.tools.programs import program_variables
from grpo.extras.tools.tool_parsers import kinds_in


def call(name: str, **more) -> dict:
    return {"function": {"name": name, "arguments": "{}"}, **more}


def read(calls: list[dict], answers: list[dict]) -> list[tuple[str, str | None]]:
    """The answers as the policy reads them, each with its tool's name."""
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    messages = messages_of([chat_message(each) for each in (asked, *({"role": "tool", **one} for one in answers))])
    return [(message.content, message.name) for message in messages[1:]]


def test_answers_stand_in_the_order_of_their_calls_with_the_names_of_these():
    calls = [call("search", id="a"), call("calc", id="b")]
    answers = [{"content": "4", "tool_call_id": "b"}, {"content": "found", "tool_call_id": "a"}]
    assert read(calls, answers) == [("found", "search"), ("4", "calc")]


def test_answers_of_calls_without_ids_are_those_of_the_calls_in_their_order():
    calls = [call("search"), call("calc")]
    assert read(calls, [{"content": "found"}, {"content": "4"}]) == [("found", "search"), ("4", "calc")]
    assert read(calls, [{"content": "found"}, {"content": "4"}, {"content": "?"}])[2] == ("?", None)
    mixed = [{"content": "found"}, {"content": "4", "tool_call_id": "b"}]
    assert read([call("calc", id="b"), call("search")], mixed) == [("4", "calc"), ("found", "search")]


def test_a_schema_may_have_nulls_where_lists_are_usual():
    assert kinds_in({"type": None, "anyOf": None, "enum": None}, {}) == set()
    assert kinds_in({"anyOf": [{"type": "integer"}, {"type": None}]}, {}) == {"integer"}


def double(number: int) -> int:
    """Double a number.

    Args:
        number: what to double
    """
    return 2 * number


def test_as_many_calls_of_a_message_as_are_allowed_are_answered():
    env = ToolEnv([Message("user", "?")], [double], max_calls=2)
    state = env.step(Action(Message("assistant", "", (ToolCall("double", {"number": 3}),) * 3)))
    told = [message.content for message in state.messages[2:]]
    assert told == ["6", "6", "Error: no more than 2 calls in one message"]


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_hosts_without_a_proxy_stay_so_in_programs(name, monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv(name, "internal.example")
    variables = program_variables()
    assert variables["no_proxy"] == variables["NO_PROXY"] == "127.0.0.1,internal.example"
