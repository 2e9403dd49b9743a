"""The forms in which models write tool calls. They read text, not tokens.

A form reads a text into what stands outside of its calls, and the calls; it raises Malformed. Which form a model has is found by
trying: the call that its chat template writes must come back (`renderer`).
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from grpo.env.messages import Message, ToolCall, ToolSpec, shown
from grpo.env.thoughts import CLOSED, OPENED, after_thinking, unopened
from grpo.extras.tools.tool_parsers import Malformed, Reader, Xml, call_in, decoded, python_calls, xml_call

Parsed = tuple[str, list[ToolCall]]  # the text outside of the calls, and the calls
Body = Callable[[Reader, Sequence[ToolSpec]], list[ToolCall]]


class Form(NamedTuple):
    """read(text, tools, start): returns the text outside of the calls, and the calls, which stand after `start`, the end of a
    thought. written: how a call is written, for the policy. marks: tokens that the reader needs to see; a tokenizer may count
    them among its special ones."""

    read: Callable[[str, Sequence[ToolSpec], int], Parsed]
    written: str
    marks: tuple[str, ...] = ()


def message_of_text(text: str, form: str, tools: Sequence[ToolSpec] = ()) -> Message:
    """Return the policy's message. If a call is malformed, the content is the whole text, and `error` says in one line what was
    wrong and how a call is written. Calls in a block of <think> are thoughts, and so are those before a </think> that nothing
    opens and that stands in none of them. Never raises, whatever the text."""
    read = FORMS[form].read
    try:
        content, calls = read(text, tools, after_thinking(text))
        if calls and unopened(content):
            content, calls = read(text, tools, unopened(text))
    except Malformed as error:
        written = XML_WRITTEN if form == "hermes" and "<function=" in text else FORMS[form].written
        return Message("assistant", text, error=f"{error}; a call is written {written}")
    return Message("assistant", content, tuple(calls))


def tagged(text: str, tools: Sequence[ToolSpec], start: int, opening: str, closing: str, body: Body) -> Parsed:
    """Reads calls that stand between two tags. body: reads at least one call."""
    outside, calls, reader, last = [], [], Reader(text, start), 0
    while mark := reader.find(f"{re.escape(opening)}|{re.escape(closing)}"):
        if mark[0] == closing:
            raise Malformed(f"{closing} stands without {opening}")
        calls += body(reader, tools)
        if not calls:
            raise Malformed(f"no call stands after {opening}")
        reader.need(re.escape(closing), f"{closing} is missing after the call of {shown(calls[-1].name)}")
        outside.append(text[last : mark.start()])
        last = reader.at
    if not calls:
        return text, []
    first = outside[0].removesuffix("\n")  # one line break is the template's, a second one the policy's
    rest = (piece.strip() for piece in (*outside[1:], text[last:]))
    return "\n".join(piece for piece in (first, *rest) if piece), calls


FUNCTION = Xml(
    r"<function=([^<>\n]+)>",
    "<function=NAME> is broken",
    r"<parameter=([^<>\n]+)>",
    "</parameter>",
    "</function>",
    line=True,
)
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


def hermes_body(reader: Reader, tools: Sequence[ToolSpec]) -> list[ToolCall]:
    """Reads the call of Hermes and Qwen 2.5 and 3, in JSON, or of Qwen3-Coder and Qwen 3.5, in XML."""
    return [xml_call(reader, tools, FUNCTION) if reader.take("(?=<function)") else call_in(reader.json(), "arguments")]


def xml_body(reader: Reader, tools: Sequence[ToolSpec], xml: Xml, again: str = r"\Z(?!)") -> list[ToolCall]:
    """Reads a call in XML, and further ones while `again` comes next."""
    calls = [xml_call(reader, tools, xml)]
    while reader.take(f"(?={again})"):
        calls.append(xml_call(reader, tools, xml))
    return calls


def python_body(reader: Reader, tools: Sequence[ToolSpec], closing: str) -> list[ToolCall]:
    """Reads calls written as in Python."""
    end = reader.text.find(closing, reader.at)
    start, reader.at = reader.at, end if end >= 0 else len(reader.text)
    return [*python_calls(reader.text[start : reader.at])]


def gemma_body(reader: Reader, tools: Sequence[ToolSpec]) -> list[ToolCall]:
    """Reads the call of Gemma 4: keys without quotation marks, texts between two tokens."""
    name = reader.need(r"call:([^\s{}]+)", "call:NAME is missing")[1]
    pieces, place = reader.text[reader.at :].split('<|"|>'), reader.at
    written = ""
    for i, piece in enumerate(pieces):
        if i % 2:
            written += json.dumps(piece)
        else:
            plain, closed, _ = piece.partition("<tool_call|>")
            written += re.sub(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:', r'\1"\2":', plain)
            if closed:
                reader.at = place + len(plain)
                break
        place += len(piece) + len('<|"|>')
    else:
        raise Malformed(f"<tool_call|> is missing after the call of {shown(name)}")
    return [call_in({"name": name, "arguments": decoded(written)}, "arguments")]


def named_body(reader: Reader, tools: Sequence[ToolSpec], start: str, fence: str, end: str) -> list[ToolCall]:
    """Reads calls whose name stands before their JSON. start: the name is the first of its groups that matches. fence: what may
    stand after the JSON."""
    calls = []
    while opened := reader.take(start):
        name = next(group for group in opened.groups() if group)
        calls.append(call_in({"name": name.strip(), "arguments": reader.json()}, "arguments"))
        reader.take(fence)
        reader.need(re.escape(end), f"{end} is missing after the call of {shown(name)}")
    return calls


def llama3(text: str, tools: Sequence[ToolSpec], start: int) -> Parsed:
    """Reads calls in the form of Llama 3."""
    reader = Reader(text, start)
    if tag := reader.find(r"<\|python_tag\|>"):
        start = tag.start()
    else:
        reader.at = start
        if not (reader.take(r"(?=\{)") and re.compile(r'"(parameters|arguments)"\s*:').search(text, reader.at)):
            return text, []
    calls = []
    while not calls or reader.need(";"):
        calls.append(call_in(reader.json(), "parameters", "arguments"))
        if reader.take(r"\Z"):
            break
    return text[:start], calls


def listed(text: str, tools: Sequence[ToolSpec], start: int, mark: str, shown_mark: str) -> Parsed:
    """Reads a list of calls that ends the message, as those of Mistral and Granite."""
    reader, calls = Reader(text, start), []
    if not (opened := reader.find(mark)):
        return text, []
    while not calls or reader.need(mark):
        if named := reader.take(r"([^\[\]{}\s]+)(?:\[CALL_ID\](\w*))?\[ARGS\]"):
            values = [{"name": named[1], "arguments": reader.json(), "id": named[2]}]
        else:
            values = reader.json()
        if not isinstance(values, list) or not values:
            raise Malformed(f"after {shown_mark} there is no list of calls")
        calls += [call_in(value, "arguments") for value in values]
        if reader.take(r"(<\|/tool_call\|>)?\s*\Z"):
            break
    return text[: opened.start()], calls


CHANNEL = r"( to=\S+)?<\|channel\|>(analysis|commentary|final)( to=[^\s<]+)?\s*(<\|constrain\|>)?\s*\w*\s*"


def harmony(text: str, tools: Sequence[ToolSpec], start: int) -> Parsed:
    """Reads the channels of gpt-oss: the analysis is a thought, the commentary to a function is a call, the rest is the text."""
    if "<|message|>" not in text:
        return text, []
    thoughts, content, calls, thinking = [], [], [], False
    for message in re.split(r"<\|start\|>assistant(?=[^<>]*<\|)", text):
        if not message:
            continue
        header, opened, body = message.partition("<|message|>")
        if not opened:
            raise Malformed("<|message|> is missing after a channel")
        if not re.fullmatch(CHANNEL, header):
            raise Malformed(f"a message begins with its channel, not with {shown(header, 40)}")
        words, closed, _ = re.split(r"(<\|end\|>|<\|call\|>|<\|return\|>|\Z)", body, maxsplit=1)
        thinking = "<|channel|>analysis" in header and not closed
        if to := re.search(r"to=(?:functions\.)?([^\s<]+)", header):
            calls.append(call_in({"name": to[1], "arguments": decoded(words)}, "arguments"))
        else:
            (thoughts if "<|channel|>analysis" in header else content).append(words)
    thought = OPENED + "\n".join(thoughts) + ("" if thinking else CLOSED) if thoughts else ""
    return thought + "\n".join(content), calls


def between(opening: str, closing: str, body: Body, written: str, *marks: str) -> Form:
    """Return the form of calls that stand between two tags. marks: further tokens that the reader needs to see."""
    return Form(
        partial(tagged, opening=opening, closing=closing, body=body),
        f"{opening}{written}{closing}",
        (opening, closing, *marks),
    )


DEEPSEEK = partial(
    named_body,
    start=r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\n<]+)\n```json\n|([^\n<]+)<｜tool▁sep｜>)",
    fence="```",
    end="<｜tool▁call▁end｜>",
)
KIMI = partial(
    named_body,
    start=r"<\|tool_call_begin\|>\s*(?:functions\.)?([^\s<]+):\d+\s*<\|tool_call_argument_begin\|>",
    fence="",
    end="<|tool_call_end|>",
)
LISTED = '[{"name": "NAME", "arguments": {"KEY": VALUE}}]'
PARAMETERS = "<function=NAME><parameter=KEY>VALUE</parameter></function>"
XML_WRITTEN = f"<tool_call>{PARAMETERS}</tool_call>"
FORMS: dict[str, Form] = {
    "hermes": between("<tool_call>", "</tool_call>", hermes_body, '{"name": "NAME", "arguments": {"KEY": VALUE}}'),
    "llama3": Form(
        llama3, '{"name": "NAME", "parameters": {"KEY": VALUE}}, with nothing else in the message', ("<|python_tag|>",)
    ),
    "mistral": Form(
        partial(listed, mark=r"\[TOOL_CALLS\]", shown_mark="[TOOL_CALLS]"),
        f"[TOOL_CALLS] {LISTED}",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "granite": Form(
        partial(listed, mark=r"<\|?tool_call\|?>", shown_mark="<|tool_call|>"),
        f"<|tool_call|>{LISTED}",
        ("<|tool_call|>", "<|/tool_call|>", "<tool_call>"),
    ),
    "glm": between(
        "<tool_call>",
        "</tool_call>",
        partial(xml_body, xml=ARGS),
        "NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "gemma4": between("<|tool_call>", "<tool_call|>", gemma_body, 'call:NAME{KEY:<|"|>TEXT<|"|>}', '<|"|>'),
    "lfm2": between(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        partial(python_body, closing="<|tool_call_end|>"),
        "[NAME(KEY=VALUE)]",
    ),
    "olmo3": between(
        "<function_calls>", "</function_calls>", partial(python_body, closing="</function_calls>"), "NAME(KEY=VALUE)"
    ),
    "deepseek": between(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        DEEPSEEK,
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{KEY: VALUE}<｜tool▁call▁end｜>",
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
    "seed": between(
        "<seed:tool_call>", "</seed:tool_call>", partial(xml_body, xml=FUNCTION, again="<function"), PARAMETERS
    ),
    "minimax": between(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        partial(xml_body, xml=INVOKE, again="<invoke"),
        '<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>',
    ),
    "kimi": between(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        KIMI,
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{KEY: VALUE}<|tool_call_end|>",
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "harmony": Form(
        harmony,
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{KEY: VALUE}<|call|>",
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    ),
}
