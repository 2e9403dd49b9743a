"""The forms in which models write tool calls. They read text, not tokens.

A form reads a text into what stands outside of its calls, and the calls; it raises Malformed. Which form a model has is found by
trying: the call that its chat template writes must come back (`renderer`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from grpo.env.messages import Message, ToolSpec
from grpo.env.thoughts import after_thinking, unopened
from grpo.extras.tools import tool_bodies as bodies
from grpo.extras.tools.tool_bodies import Body, Parsed
from grpo.extras.tools.tool_parsers import Malformed, Xml


class Form(NamedTuple):
    """read(text, tools, start): returns the text outside of the calls, and the calls, which stand after `start`, the end of a
    thought. written: how a call is written, for the policy. marks: tokens that the reader needs to see; a tokenizer may count
    them among its special ones. asked: what a template says to the policy that asks for this form, in case its own call is not
    written so."""

    read: Callable[[str, Sequence[ToolSpec], int], Parsed]
    written: str
    marks: tuple[str, ...] = ()
    asked: str = ""


def message_of_text(text: str, form: str | Form, tools: Sequence[ToolSpec] = ()) -> Message:
    """Return the policy's message. If a call is malformed, the content is the whole text, and `error` says in one line what was
    wrong and how a call is written. Calls in a block of <think> are thoughts, and so are those before a </think> that nothing
    opens and that stands in none of them. Never raises, whatever the text."""
    form = FORMS[form] if isinstance(form, str) else form
    read = form.read
    try:
        content, calls = read(text, tools, after_thinking(text))
        if calls and unopened(content):
            content, calls = read(text, tools, unopened(text))
    except Malformed as error:
        written = XML_WRITTEN if form is FORMS["hermes"] and "<function=" in text else form.written
        return Message("assistant", text, error=f"{error}; a call is written {written}")
    return Message("assistant", content, tuple(calls))


INVOKE = Xml(
    r'<invoke name="([^"<>\n]+)">',
    '<invoke name="NAME"> is broken',
    r'<parameter name="([^"<>\n]+)">',
    "</parameter>",
    "</invoke>",
)
ARGS = Xml(
    r"([^\s<>{}]+)(?=\s|<)", "the call has no name", r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>", "</arg_value>", ""
)
LONGCAT = ARGS._replace(
    name=r"([^\s<>{}\[\]]+)(?=\s|<)",
    key=r"<longcat_arg_key>([^<>]+)</longcat_arg_key>\s*<longcat_arg_value>",
    value_end="</longcat_arg_value>",
)
HY3 = Xml(
    r"<tool_call:opensource>\s*([^\s<>{}]+)\s*<tool_sep:opensource>",
    "<tool_call:opensource>NAME<tool_sep:opensource> is broken",
    r"<arg_key:opensource>([^<>]+)</arg_key:opensource>\s*<arg_value:opensource>",
    "</arg_value:opensource>",
    "</tool_call:opensource>",
)
DSML = Xml(
    r'<｜DSML｜invoke name="([^"<>\n]+)">',
    '<｜DSML｜invoke name="NAME"> is broken',
    r'<｜DSML｜parameter name="([^"<>\n]+)"(?: string="(true|false)")?>',
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
)


def between(opening: str, closing: str, body: Body, written: str, *marks: str) -> Form:
    """Return the form of calls that stand between two tags. marks: further tokens that the reader needs to see."""
    return Form(
        partial(bodies.tagged, opening=opening, closing=closing, body=body),
        f"{opening}{written}{closing}",
        (opening, closing, *marks),
    )


DEEPSEEK = partial(
    bodies.named_body,
    start=r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\n<]+)\n```json\n|([^\n<]+)<｜tool▁sep｜>)",
    fence="```",
    end="<｜tool▁call▁end｜>",
)
KIMI = partial(
    bodies.named_body,
    start=r"<\|tool_call_begin\|>\s*(?:functions\.)?([^\s<]+):\d+\s*<\|tool_call_argument_begin\|>",
    fence="",
    end="<|tool_call_end|>",
)
DSML_BODY = partial(bodies.xml_body, xml=DSML, again="<｜DSML｜invoke")
DSML_WRITTEN = (
    '<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">TEXT</｜DSML｜parameter></｜DSML｜invoke>'
)
JSON_BODY = partial(bodies.json_body, as_call=bodies.in_json)
HY3_WRITTEN = (
    "<tool_call:opensource>NAME<tool_sep:opensource><arg_key:opensource>KEY</arg_key:opensource>"
    "<arg_value:opensource>VALUE</arg_value:opensource></tool_call:opensource>"
)
TAGS = ("<tool_call>", "</tool_call>")
HY3_TAGS = tuple(
    f"<{end}{name}:opensource>" for name in ("tool_call", "tool_sep", "arg_key", "arg_value") for end in ("", "/")
)
LISTED = '[{"name": "NAME", "arguments": {"KEY": VALUE}}]'
PARAMETERS = "<function=NAME><parameter=KEY>VALUE</parameter></function>"
XML_WRITTEN = f"<tool_call>{PARAMETERS}</tool_call>"
FORMS: dict[str, Form] = {
    "hermes": between(
        "<tool_call>", "</tool_call>", bodies.hermes_body, '{"name": "NAME", "arguments": {"KEY": VALUE}}'
    ),
    "llama3": Form(
        bodies.llama3,
        '{"name": "NAME", "parameters": {"KEY": VALUE}}, with nothing else in the message',
        ("<|python_tag|>",),
    ),
    "mistral": Form(
        partial(bodies.listed, mark=r"\[TOOL_CALLS\]", shown_mark="[TOOL_CALLS]"),
        f"[TOOL_CALLS] {LISTED}",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "granite": Form(
        partial(bodies.listed, mark=r"<\|?tool_call\|?>", shown_mark="<|tool_call|>"),
        f"<|tool_call|>{LISTED}",
        ("<|tool_call|>", "<|/tool_call|>", "<tool_call>"),
    ),
    "glm": between(
        "<tool_call>",
        "</tool_call>",
        partial(bodies.xml_body, xml=ARGS),
        "NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "gemma4": between(
        "<|tool_call>",
        "<tool_call|>",
        partial(bodies.gemma_body, quote='<|"|>', closing="<tool_call|>"),
        'call:NAME{KEY:<|"|>TEXT<|"|>}',
        '<|"|>',
    ),
    "functiongemma": between(
        "<start_function_call>",
        "<end_function_call>",
        partial(bodies.gemma_body, quote="<escape>", closing="<end_function_call>"),
        "call:NAME{KEY:<escape>TEXT<escape>}",
        "<escape>",
    ),
    "lfm2": between(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        partial(bodies.python_body, closing="<|tool_call_end|>"),
        "[NAME(KEY=VALUE)]",
    ),
    "olmo3": between(
        "<function_calls>",
        "</function_calls>",
        partial(bodies.python_body, closing="</function_calls>"),
        "NAME(KEY=VALUE)",
    ),
    "deepseek": between(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        DEEPSEEK,
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{KEY: VALUE}<｜tool▁call▁end｜>",
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
    "seed": between(
        "<seed:tool_call>",
        "</seed:tool_call>",
        partial(bodies.xml_body, xml=bodies.FUNCTION, again="<function"),
        PARAMETERS,
    ),
    "minimax": between(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        partial(bodies.xml_body, xml=INVOKE, again="<invoke"),
        '<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>',
    ),
    "kimi": between(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        KIMI,
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{KEY: VALUE}<|tool_call_end|>",
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "deepseek32": between("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", DSML_BODY, DSML_WRITTEN, "｜DSML｜"),
    "deepseek4": between("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", DSML_BODY, DSML_WRITTEN, "｜DSML｜"),
    "command": between(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        partial(bodies.json_body, as_call=bodies.in_cohere),
        '[{"tool_name": "NAME", "parameters": {"KEY": VALUE}}]',
    ),
    "command_r": Form(bodies.action, 'Action: ```json [{"tool_name": "NAME", "parameters": {"KEY": VALUE}}]```'),
    "apertus": between(
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        partial(bodies.json_body, as_call=bodies.in_apertus),
        '[{"NAME": {"KEY": VALUE}}]',
    ),
    "nemotron2": between("<TOOLCALL>", "</TOOLCALL>", JSON_BODY, LISTED),
    "hunyuan": between("<tool_calls>", "</tool_calls>", bodies.fenced_body, LISTED, *TAGS),
    "hy3": between(
        "<tool_calls:opensource>",
        "</tool_calls:opensource>",
        partial(bodies.xml_body, xml=HY3, again="<tool_call:"),
        HY3_WRITTEN,
        *HY3_TAGS,
    ),
    "longcat": between(
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        partial(bodies.either_body, xml=LONGCAT),
        '{"name": "NAME", "arguments": {"KEY": VALUE}}',
        *("<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
    ),
    "phi4": Form(
        partial(bodies.listed, mark=r"<\|tool_call\|>|functools(?=\[)", shown_mark="functools", single=True),
        f"functools{LISTED}",
        ("<|tool_call|>", "<|/tool_call|>"),
        asked="functools[",
    ),
    "pythonic": Form(
        bodies.pythonic,
        "[NAME(KEY=VALUE)], with nothing else in the message",
        ("<|python_start|>", "<|python_end|>"),
        asked="[func_name1(",
    ),
    "harmony": Form(
        bodies.harmony,
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{KEY: VALUE}<|call|>",
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    ),
}
