"""Each family's own template, in its words for a call: the form is found by it, and what it writes is read as the same call."""

import pytest
from helpers.families import FAMILIES

from grpo.env.messages import Message, ToolCall, ToolSpec
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.extras.tools.tool_forms import message_of_text
from grpo.system.errors import UserError

KINDS = {"text": "string", "times": "integer", "loud": "boolean", "more": "object"}
SAY = ToolSpec(
    "say",
    "Say.",
    {
        "type": "object",
        "properties": {key: {"type": kind, "description": "It."} for key, kind in KINDS.items()}
        | {"mixed": {"type": ["string", "integer"], "description": "It."}},
    },
)
CALLS = (
    ToolCall(
        "say", {"text": 'é "q"\n{]<', "times": 2, "loud": True, "more": {"a": None, "b": [True, "ü", {"c": 1.5}]}}
    ),
    ToolCall("say", {"text": "3"}),
)

TALK = """{% for tool in tools or [] %}{{ tool.function.name }} ASKED{% endfor %}
{% for m in messages %}{{ m.role }}: {{ m.content or "" }}{% if m.tool_calls %}CALLS{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
NAME, ARGS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
ITEMS = "{% for key, value in call.function.arguments | items %}"
COMMA = "{% if not loop.last %}, {% endif %}"
OBJECT = f'{{"name": "{NAME}", "arguments": {ARGS}}}'


def each(call: str) -> str:
    return f"{{% for call in m.tool_calls %}}{call}{{% endfor %}}"


def dsml(section: str) -> str:
    kind = """{{ "true" if value is string else "false" }}"""
    value = "{{ value if value is string else value | tojson }}"
    one = f'<｜DSML｜parameter name="{{{{ key }}}}" string="{kind}">{value}</｜DSML｜parameter>\n'
    call = f'<｜DSML｜invoke name="{NAME}">\n{ITEMS}{one}{{% endfor %}}</｜DSML｜invoke>\n'
    return f"\n\n<｜DSML｜{section}>\n{each(call)}</｜DSML｜{section}>"


def pairs(key: str, value: str) -> str:
    shown = "{{ value if value is string else value | tojson }}"
    return f"{ITEMS}<{key}>{{{{ key }}}}</{key}>\n<{value}>{shown}</{value}>\n{{% endfor %}}"


GEMMA = """{% macro shown(value) %}{% if value is none %}NOTHING{% elif value is string %}QUOTE{{ value }}QUOTE
{%- elif value is boolean %}{{ "true" if value else "false" }}
{%- elif value is mapping %}{{ "{" }}{% for key, inner in value | items %}{{ key }}:{{ shown(inner) }}
{%- if not loop.last %},{% endif %}{% endfor %}{{ "}" }}
{%- elif value is iterable %}[{% for inner in value %}{{ shown(inner) }}{% if not loop.last %},{% endif %}{% endfor %}]
{%- else %}{{ value }}{% endif %}{% endmacro %}"""


def gemma(quote: str, nothing: str) -> str:
    """The macro of both Gemmas. nothing: what it writes for null."""
    return GEMMA.replace("QUOTE", quote).replace("NOTHING", nothing)


COHERE = f'    {{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": "{NAME}", "parameters": {ARGS}}}'
LINES = "{{ call.function.arguments | tojson(indent=4) | indent(8) }}"
COMMAND_R = f'    {{\n        "tool_name": "{NAME}",\n        "parameters": {LINES}\n    }}' + COMMA.replace(
    ", ", ",\n"
)
FENCED = f"<tool_call>{NAME}\n```json\n{ARGS}\n```</tool_call>"
HY3 = pairs("arg_key:opensource", "arg_value:opensource")
OWN = {
    "gemma4": gemma('<|"|>', "None")
    + each(f"<|tool_call>call:{NAME}{{{{ shown(call.function.arguments) }}}}<tool_call|>"),
    "functiongemma": gemma("<escape>", "null")
    + each(f"<start_function_call>call:{NAME}{{{{ shown(call.function.arguments) }}}}<end_function_call>"),
    "command": f"<|START_ACTION|>[\n{each(COHERE + COMMA.strip() + chr(10))}]<|END_ACTION|>",
    "command_r": f"\nAction:\n```json\n[\n{each(COMMAND_R)}\n]```\n",
    "apertus": f'<|tools_prefix|>[{each(f"""{{"{NAME}": {ARGS}}}{COMMA}""")}]<|tools_suffix|>',
    "nemotron2": f"<TOOLCALL>[{each(OBJECT + COMMA)}]</TOOLCALL>",
    "deepseek32": dsml("function_calls"),
    "deepseek4": dsml("tool_calls"),
    "hunyuan": f"<tool_calls>[{each(OBJECT + COMMA)}]</tool_calls>",
    "hunyuan, with fences": f"<tool_calls>{each(FENCED)}</tool_calls>",
    "hunyuan, on lines": f"<tool_calls>\n{each(OBJECT + chr(10))}</tool_calls>",
    "hy3": "<tool_calls:opensource>\n"
    + each(f"<tool_call:opensource>{NAME}<tool_sep:opensource>\n{HY3}</tool_call:opensource>\n")
    + "</tool_calls:opensource>",
    "longcat": each(f"<longcat_tool_call>\n{OBJECT}\n</longcat_tool_call>\n"),
    "longcat, in pairs": each(
        f"<longcat_tool_call>{NAME}\n{pairs('longcat_arg_key', 'longcat_arg_value')}</longcat_tool_call>\n"
    ),
    "phi4": each(f"<|tool_call|>{OBJECT}<|/tool_call|>"),
}


def renderer(calls: str, asked: str = "", **settings) -> TokenizerRenderer:
    tokenizer = FAMILIES["qwen25"].tokenizer()
    tokenizer.chat_template = TALK.replace("CALLS", calls).replace("ASKED", asked)
    return TokenizerRenderer(tokenizer, **settings)


def written(own: TokenizerRenderer, *messages: Message) -> str:
    ids = own.prompt_ids([Message("user", "Say."), *messages, Message("tool", "Done.", name="say")], [SAY])
    return own.tokenizer.decode(ids).partition("assistant: ")[2].partition("<|im_end|>")[0]


@pytest.mark.parametrize("family", OWN)
def test_what_a_template_writes_is_read_as_the_same_calls(family):
    own = renderer(OWN[family])
    form = family.partition(",")[0]
    assert own.form == form
    for calls in (CALLS[:1], CALLS):
        for said in ("", "I say it."):
            text = written(own, Message("assistant", said, calls))
            message = message_of_text(text, form, [SAY])
            assert message.error is None and message.tool_calls == calls and message.content.strip() == said
            thought = f"<think>\nMaybe {text}\n</think>\n\n"
            assert message_of_text(thought, form, [SAY]).tool_calls == ()
            assert message_of_text(thought + text, form, [SAY]).tool_calls == calls


@pytest.mark.parametrize("family", OWN)
def test_a_call_that_is_cut_off_anywhere_is_never_run_in_part(family):
    """Wherever it ends: it is text, or the policy hears what is missing. Calls before it do not run either."""
    own = renderer(OWN[family])
    form = family.partition(",")[0]
    text = written(own, Message("assistant", "", CALLS)).rstrip()
    errors = 0
    for end in range(1, len(text)):
        message = message_of_text(text[:end], form, [SAY])
        whole = message.tool_calls == CALLS[: len(message.tool_calls)]
        assert whole and (not message.error or message.content == text[:end])
        errors += message.error is not None
    assert errors > len(text) // 2


PLAIN, QUOTED = "{{ key }}={{ value }}", '{{ key }}="{{ value }}"'
ASKED = {
    "pythonic": (
        "Respond in the format [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
        f"[{each(f'{NAME}({ITEMS}{PLAIN}{COMMA}{{% endfor %}}){COMMA}')}]",
        """[say(text='é "q"\\n', times=2), say(loud=True)]""",
    ),
    "pythonic, with texts": (
        "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
        f"[{each(f'{NAME}({ITEMS}{QUOTED}{COMMA}{{% endfor %}}){COMMA}')}]",
        """[say(text='é "q"\\n', times="2"), say(loud="True")]""",
    ),
    "phi4": (
        'formatted as functools[{"name": [function name], "arguments": [function arguments as JSON]}, ...]',
        each(f'{{"name": "{NAME}", "arguments": {{{{ call.function.arguments }}}}}}'),
        'functools[{"name": "say", "arguments": {"text": "é \\"q\\"\\n", "times": 2}}, '
        '{"name": "say", "arguments": {"loud": true}}]',
    ),
}


@pytest.mark.parametrize("family", ASKED)
def test_a_template_that_spells_its_history_otherwise_has_the_form_that_it_asks_for(family):
    """Llama 3.2 has texts without quotation marks there, Llama 4 numbers with them, Phi-4-mini no marker."""
    asked, history, said = ASKED[family]
    own = renderer(history, asked)
    assert own.form == family.partition(",")[0]
    message = own.parse(own.tokenizer(said, add_special_tokens=False).input_ids, [SAY])
    expected = (ToolCall("say", {"text": 'é "q"\n', "times": 2}), ToolCall("say", {"loud": True}))
    assert message.tool_calls == expected, message.error
    assert "say" in written(own, message)
    assert renderer(history)._calling[0] != own.form  # it does not say how
    with pytest.raises(UserError, match="no form here reads"):
        _ = renderer("", asked).form  # its history has no calls


def test_a_text_of_a_pythonic_call_stays_one_where_the_schema_allows_it():
    [call] = message_of_text('[say(mixed="3", times="3", text="3", more="x", other="3")]', "pythonic", [SAY]).tool_calls
    assert call.arguments == {"mixed": "3", "times": 3, "text": "3", "more": "x", "other": "3"}


def test_a_template_that_knows_no_conversation_without_tools():
    """Command R and Hermes 2 Pro have such templates."""
    own = renderer(OWN["command_r"])
    own.tokenizer.chat_template = own.tokenizer.chat_template.replace("tools or []", "tools")
    assert TokenizerRenderer(own.tokenizer).form == "command_r"
