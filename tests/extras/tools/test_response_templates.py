"""A tokenizer may describe its responses itself (transformers' `response_template`): its calls and thoughts are read by that."""

import re

import pytest
from helpers.families import FAMILIES, spelled

from grpo.env.messages import Message, ToolCall, ToolSpec
from grpo.env.thoughts import Tags
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.extras.tools.response_templates import form_described, tags_described, template_of
from grpo.extras.tools.tool_forms import message_of_text

ADD = ToolSpec("add", "Add.", {"type": "object", "properties": {k: {"type": "integer"} for k in "ab"}})
CALL = ToolCall("add", {"a": 1, "b": 2})
# calls in words of no family: @NAME{...}@ ; thoughts between [[ and ]]
OWN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "thinking": {"open": "[[", "close_pattern": r"\]\]\s*", "content": "text"},
        "tool_calls": {
            "open_pattern": r"@(?P<name>\w+)(?=\{)",
            "close_pattern": r"@\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{% for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}@{{ call.function.name }}{{ call.function.arguments | tojson }}@{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def renderer(own=OWN) -> TokenizerRenderer:
    tokenizer = FAMILIES["qwen25"].tokenizer()
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, own
    return TokenizerRenderer(tokenizer)


def test_calls_and_thoughts_are_read_as_the_tokenizer_says():
    own = renderer()
    assert own.form == "its own" and own._thoughts == Tags("[[", "", "]]")
    ask, thought = Message("user", "1 + 2?"), "[[\nMaybe @add{}@\n]]\n"
    said = f'{thought}I add.@add{{"a": 1, "b": 2}}@'
    before = own.prompt_ids([ask], [ADD]) + spelled(own.tokenizer, f"{said}<|im_end|>")
    message = own.parse(spelled(own.tokenizer, f"{said}<|im_end|>"), [ADD])
    assert message == Message("assistant", "<think>\nMaybe @add{}@\n</think>\nI add.", (CALL,))
    assert message.reasoning_content == "Maybe @add{}@"
    talk = [ask, message, Message("tool", "3", name="add")]
    assert own.prompt_ids(talk, [ADD], before)[: len(before)] == before
    assert own.parse(spelled(own.tokenizer, "[[a]]Three.")) == Message("assistant", "<think>a</think>Three.")


FORM = form_described(template_of(renderer().tokenizer))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Three.", "Three.", ()),
        ('@add{"a": 1, "b": 2}@\n@f{"x": null, "y": [true, "é"]}@ Done.', "Done.",
         (CALL, ToolCall("f", {"x": None, "y": [True, "é"]}))),
        ('@add{"a": 1, "b": 2}@<think>@add{"a": 5}@</think>', '<think>@add{"a": 5}@</think>', (CALL,)),
        ('<think>@add{"a": 1}@', '<think>@add{"a": 1}@', ()),
        ('@add{"a": "1", "b": 2}@', "", (CALL,)),  # the tool's schema has the types
    ],
)  # fmt: skip
def test_a_described_call_is_read(text, content, calls):
    message = message_of_text(text, FORM, [ADD])
    assert (message.error, message.content, message.tool_calls) == (None, content, calls)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('@add{"a": 1, "b"', "@ is missing after the last call"),
        ('@add{"a": 1}@ @add{"a": 1', "@ is missing after the last call"),
        ("@add{a}@", "a call is broken, .*JSON"),
        ('@add{"a": NaN}@', "NaN is no JSON"),
        ('@add{"a": "\\ud800"}@', "the JSON holds half a character"),
    ],
)
def test_a_described_call_that_cannot_be_read_is_one_line_for_the_policy(text, reason):
    message = message_of_text(text, FORM, [ADD])
    assert message.content == text and message.tool_calls == ()
    assert re.fullmatch(f"{reason}.*; a call is written between @ and @", message.error), message.error


def test_known_forms_go_first_and_a_template_that_describes_nothing_changes_nothing():
    tokenizer = FAMILIES["qwen25"].tokenizer()
    tokenizer.response_template = OWN
    assert TokenizerRenderer(tokenizer).form == "hermes"
    for broken in ({"fields": {}}, {"version": 9}, {**OWN, "start_anchor": ""}, "words", None):
        tokenizer.response_template = broken
        assert template_of(tokenizer) is None and TokenizerRenderer(tokenizer)._thoughts == Tags()
    only = {**OWN, "fields": {"content": OWN["fields"]["content"]}}
    template = template_of(renderer(only).tokenizer)
    assert form_described(template) is None and tags_described(template) is None
    ahead = {"open_pattern": r"(?=[\s\S]*?</think>)", "close_pattern": r"</think>\s*", "content": "text"}
    tokenizer.response_template = {**OWN, "fields": {**OWN["fields"], "thinking": ahead}}
    assert TokenizerRenderer(tokenizer)._thoughts == Tags()  # no plain mark


@pytest.mark.parametrize(("name", "call"), [
    ("qwen3", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
    ("qwen3_5", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
     "</tool_call>"),
    ("glm4moe", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"
     "</tool_call>"),
    ("gemma4", "<|tool_call>call:add{a:1,b:2}<tool_call|>"),
])  # fmt: skip
def test_templates_that_trl_writes_for_families_read_what_our_forms_read(name, call):
    """TRL sets them on a tokenizer that has none."""
    utils = pytest.importorskip("trl.chat_template_utils")
    tokenizer = renderer(getattr(utils, f"{name}_template")).tokenizer
    form = form_described(template_of(tokenizer))
    message = message_of_text(f"<think>a</think>I add.{call}", form, [ADD])
    assert message == Message("assistant", "<think>a</think>I add.", (CALL,))
    cut = message_of_text(call[: call.rindex("<")], form, [ADD])
    assert cut.error.startswith(("</tool_call> is missing", "<tool_call|> is missing"))
    assert set(form.marks) >= ({"<tool_call|>"} if name == "gemma4" else {"<tool_call>", "</tool_call>"})
