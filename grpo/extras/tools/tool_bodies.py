"""Reads the calls in a policy's text, family by family: those between two tags, those that end a message, and those that are one.
`tool_forms` names the families."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpo.env.messages import ToolCall, ToolSpec, shown
from grpo.env.thoughts import CLOSED, OPENED
from grpo.extras.tools.tool_parsers import Malformed, Reader, Xml, call_in, decoded, python_calls, typed, xml_call

Parsed = tuple[str, list[ToolCall]]  # the text outside of the calls, and the calls
Body = Callable[[Reader, Sequence[ToolSpec]], list[ToolCall]]


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


def gemma_body(reader: Reader, tools: Sequence[ToolSpec], quote: str, closing: str) -> list[ToolCall]:
    """Reads the call of Gemma 4 and FunctionGemma: keys without quotation marks, texts between two tokens. Where a value is
    nothing, some of their templates write None."""
    name = reader.need(r"call:([^\s{}]+)", "call:NAME is missing")[1]
    pieces, place = reader.text[reader.at :].split(quote), reader.at
    written = ""
    for i, piece in enumerate(pieces):
        if i % 2:
            written += json.dumps(piece)
        else:
            plain, closed, _ = piece.partition(closing)
            keyed = re.sub(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:', r'\1"\2":', plain)
            written += re.sub(r"(?<=[:,\[])\s*None(?=\s*[,}\]])", "null", keyed)
            if closed:
                reader.at = place + len(plain)
                break
        place += len(piece) + len(quote)
    else:
        raise Malformed(f"{closing} is missing after the call of {shown(name)}")
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


def json_body(reader: Reader, tools: Sequence[ToolSpec], as_call: Callable[[Any], ToolCall]) -> list[ToolCall]:
    """Reads calls in JSON: a list of them, or one after the other. as_call: converts one."""
    calls, more = [], True
    while more:
        values = reader.json()
        calls += [as_call(value) for value in (values if isinstance(values, list) else [values])]
        more = bool(reader.take(r"(?=\{)"))
    return calls


def either_body(reader: Reader, tools: Sequence[ToolSpec], xml: Xml) -> list[ToolCall]:
    """Reads a call in JSON or in XML, as the releases of LongCat differ."""
    return [call_in(reader.json(), "arguments") if reader.take(r"(?=\{)") else xml_call(reader, tools, xml)]


def fenced_body(reader: Reader, tools: Sequence[ToolSpec]) -> list[ToolCall]:
    """Reads the calls of Hunyuan: a list in JSON, or a name and its JSON between two fences."""
    if reader.take("(?=<tool_call>)"):
        return named_body(reader, tools, r"<tool_call>\s*([^\n<{]+)\n```json", "```", "</tool_call>")
    return json_body(reader, tools, in_json)


def in_json(value: Any) -> ToolCall:
    """Converts {"name": NAME, "arguments": {...}}."""
    return call_in(value, "arguments")


def in_cohere(value: Any) -> ToolCall:
    """Converts {"tool_name": NAME, "parameters": {...}}."""
    return call_in({**value, "name": value.get("tool_name")} if isinstance(value, dict) else value, "parameters")


def in_apertus(value: Any) -> ToolCall:
    """Converts {NAME: {...}}."""
    if not isinstance(value, dict) or len(value) != 1:
        raise Malformed(f"a call is an object whose one key is the tool's name, not {shown(value, 40)}")
    [(name, arguments)] = value.items()
    return call_in({"name": name, "arguments": arguments}, "arguments")


def action(text: str, tools: Sequence[ToolSpec], start: int) -> Parsed:
    """Reads the list of calls that ends a message of Command R."""
    reader = Reader(text, start)
    if not (opened := reader.find(r"Action:\s*```json")):
        return text, []
    if not (calls := json_body(reader, tools, in_cohere)):
        raise Malformed("no call stands after Action:")
    reader.need("```", f"``` is missing after the call of {shown(calls[-1].name)}")
    reader.need(r"\Z")
    return text[: opened.start()].removesuffix("\n"), calls


def pythonic(text: str, tools: Sequence[ToolSpec], start: int) -> Parsed:
    """Reads a message that is a list of calls as in Python: those of Llama 3.2 and 4. A template of Llama 4 writes every value as
    a text, so a text is read as what the schema wants."""
    reader = Reader(text, start)
    if not reader.take(r"(?:<\|python_start\|>)?\s*(?=\[\s*[A-Za-z_][\w.]*\(\s*(?:\)|[A-Za-z_]\w*\s*=(?!=)))"):
        return text, []
    calls = python_calls(text[reader.at :].rstrip().removesuffix("<|python_end|>"))
    return text[:start], [replace(call, arguments=typed(call, tools)) for call in calls]


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


def listed(
    text: str, tools: Sequence[ToolSpec], start: int, mark: str, shown_mark: str, single: bool = False
) -> Parsed:
    """Reads lists of calls that end the message, as those of Mistral, Granite and Phi-4-mini. single: a call may stand alone."""
    reader, calls = Reader(text, start), []
    if not (opened := reader.find(mark)):
        return text, []
    while not calls or reader.need(mark):
        if named := reader.take(r"([^\[\]{}\s]+)(?:\[CALL_ID\](\w*))?\[ARGS\]"):
            values = [{"name": named[1], "arguments": reader.json(), "id": named[2]}]
        else:
            values = reader.json()
            values = [values] if single and isinstance(values, dict) else values
        if not isinstance(values, list) or not values:
            raise Malformed(f"after {shown_mark} there is no list of calls")
        calls += [call_in(value, "arguments") for value in values]
        reader.take(r"<\|/tool_call\|>")
        if reader.take(r"\Z"):
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
