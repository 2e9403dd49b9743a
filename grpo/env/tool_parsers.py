"""Parsers for tool calls in the formats that models use natively. They read text, not tokens.

hermes: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> (Hermes, Qwen 2.5, Qwen 3), or between the same tags the
    XML of Qwen3-Coder and Qwen 3.5: <function=add><parameter=a>1</parameter></function>
llama3: the whole message is {"name": "add", "parameters": {"a": 1}}, maybe after <|python_tag|>, several with ; between
mistral: [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "123456789"}], or [TOOL_CALLS]add[ARGS]{"a": 1}

A form is a function of the text and the tools that gives the text outside of the calls, and the calls. It raises Malformed.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from types import NoneType
from typing import Any

from grpo.env.messages import Message, ToolCall, ToolSpec, shown
from grpo.env.thoughts import after_thinking

# tokens that a reader needs to see; a tokenizer may count them among its special ones
SPELLED = "<tool_call> </tool_call> <|python_tag|> [TOOL_CALLS] [CALL_ID] [ARGS] <think> </think>"
MARKERS = tuple(SPELLED.split())
DEPTH = 32  # of nested JSON: whoever writes it again does so by recursion

Said = tuple[str, list[ToolCall]]


class Malformed(Exception):
    """A text that looks like a call and cannot be read. The message is for the policy."""


def message_of_text(text: str, form: str, tools: Sequence[ToolSpec] = ()) -> Message:
    """The policy's message. Where a call is malformed the text is the content and `error` says, in one line, what was wrong and
    how a call is written. Calls in a block of <think> are thoughts. Never raises, whatever the text."""
    try:
        content, calls = FORMS[form](text, tools)
    except Malformed as error:
        written = "xml" if form == "hermes" and "<function=" in text else form
        return Message("assistant", text, error=f"{error}; a call is written {WRITTEN[written]}")
    return Message("assistant", content, tuple(calls))


def form_of(template: str) -> str | None:
    """The form that a chat template writes calls in; None where it is none of ours."""
    if "<tool_call>" in template:
        return None if "<arg_key>" in template else "hermes"  # GLM has a form of its own between these tags
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3" if "ipython" in template and '"parameters' in template else None


class Reader:
    """A text, and the place up to which it is read: at first, the end of the thinking that a message begins with."""

    def __init__(self, text: str, at: int = 0) -> None:
        self.text, self.at = text, at

    def take(self, pattern: str) -> re.Match | None:
        """Reads the pattern if it comes next, after any space."""
        if found := re.compile(rf"\s*{pattern}").match(self.text, self.at):
            self.at = found.end()
        return found

    def need(self, pattern: str, complaint: str = "") -> re.Match:
        """Reads the pattern, or raises Malformed."""
        if not (found := self.take(pattern)):
            raise Malformed(complaint or f"{shown(self.text[self.at :].lstrip(), 40)} stands after the call")
        return found

    def find(self, marks: str) -> re.Match | None:
        """Finds the next match outside a block of <think>."""
        pattern = re.compile(f"<think>|{marks}")
        while mark := pattern.search(self.text, self.at):
            self.at = mark.end()
            if mark[0] != "<think>":
                return mark
            self.at = self.text.find("</think>", self.at)
            if self.at < 0:
                return None
        return None

    def json(self) -> Any:
        """Reads the next JSON value."""
        self.take("")
        try:
            value, self.at = DECODER.raw_decode(self.text, self.at)
            inner = [value]
            for _ in range(DEPTH):
                inner = [
                    v for o in inner if isinstance(o, dict | list) for v in (o.values() if isinstance(o, dict) else o)
                ]
            if inner:
                raise RecursionError
            json.dumps(value, ensure_ascii=False).encode()
        except RecursionError:
            raise Malformed(f"the JSON is nested more than {DEPTH} deep") from None
        except json.JSONDecodeError as error:
            place = shown(self.text[error.pos : error.pos + 20]) if error.pos < len(self.text) else "the end"
            raise Malformed(f"the JSON is broken, {error.msg} at {place}") from None
        except UnicodeEncodeError:
            raise Malformed("the JSON holds half a character (a surrogate without its other half)") from None
        except ValueError:  # of int(), which refuses thousands of digits
            raise Malformed("a number has too many digits") from None
        return value


def hermes(text: str, tools: Sequence[ToolSpec] = ()) -> Said:
    """Reads calls in the form of Hermes and Qwen."""
    outside, calls, reader, last = [], [], Reader(text, after_thinking(text)), 0
    while mark := reader.find("</?tool_call>"):
        if mark[0] == "</tool_call>":
            raise Malformed("</tool_call> stands without <tool_call>")
        calls.append(xml_call(reader, tools) if reader.take("(?=<function)") else call_in(reader.json(), "arguments"))
        reader.need("</tool_call>", f"</tool_call> is missing after the call of {shown(calls[-1].name)}")
        outside.append(text[last : mark.start()])
        last = reader.at
    if not calls:
        return text, []
    first = outside[0].removesuffix("\n")  # one line break is the template's, a second one the policy's
    rest = (piece.strip() for piece in (*outside[1:], text[last:]))
    return "\n".join(piece for piece in (first, *rest) if piece), calls


def xml_call(reader: Reader, tools: Sequence[ToolSpec]) -> ToolCall:
    """Reads the next call, which begins with <function=. Values get the types of the tool's schema."""
    name = reader.need(r"<function=([^<>\n]+)>", "<function=NAME> is broken")[1].strip()
    arguments = {}
    schema = {tool.name: tool.parameters for tool in tools}.get(name, {})
    schemas = schema.get("properties", {})
    while opened := reader.take(r"<parameter=([^<>\n]+)>\n?"):
        key, start, end = opened[1].strip(), opened.end(), reader.text.find("</parameter>", opened.end())
        if end < 0:
            raise Malformed(f"</parameter> is missing after {shown(opened[0].strip())}")
        arguments[key] = converted(reader.text[start:end].removesuffix("\n"), schemas.get(key, {}), schema)
        reader.at = end + len("</parameter>")
    reader.need("</function>", f"</function> is missing after the parameters of {shown(name)}")
    return ToolCall(name, arguments)


def converted(text: str, schema: Any, whole: Mapping[str, Any]) -> Any:
    """The value that a text stands for: the first of null, integer, number, boolean, object and array that the schema allows and
    the text can be, as in vLLM's parsers; else the text. whole: the schema of all arguments, with its definitions."""
    kinds = kinds_in(schema, whole)
    for kind in (kind for kind in READERS if kind in kinds):
        with suppress(Malformed, ValueError, LookupError, SyntaxError, TypeError, RecursionError, MemoryError):
            value = READERS[kind](text.strip())
            if not isinstance(value, float) or math.isfinite(value):
                return value
    return text


def kinds_in(schema: Any, whole: Mapping[str, Any]) -> set[str]:
    """The types that a JSON schema allows, by their names there."""
    kinds: set[str] = set()
    waiting, seen = [schema], []
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping) or any(one is other for other in seen):
            continue
        seen.append(one)
        given = one.get("type", ())
        kinds |= {given} if isinstance(given, str) else {*given}
        values = [*one.get("enum", ()), *([one["const"]] if "const" in one else ())]
        kinds |= {KINDS[type(value)] for value in values} | ({"null"} if one.get("nullable") else set())
        waiting += [other for name in ("anyOf", "oneOf", "allOf") for other in one.get(name, ())]
        if place := one.get("$ref"):  # "#/$defs/NAME"
            waiting.append(reduce(lambda found, name: found.get(name, {}), place.split("/")[1:], whole))
    return kinds


def structure(text: str, kind: type) -> Any:
    """Reads an object or an array, in JSON or as Python writes it."""
    try:
        value = decoded(text)
    except Malformed:
        value = decoded(json.dumps(ast.literal_eval(text)))
    if not isinstance(value, kind):
        raise TypeError
    return value


def numeric(text: str) -> int | float:
    """Reads a number; one without a fraction stays exact."""
    with suppress(ValueError):
        return int(text)
    return float(text)


KINDS = {
    NoneType: "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
READERS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: {"null": None, "None": None}[text],
    "integer": int,
    "number": numeric,
    "boolean": lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()],
    "object": partial(structure, kind=dict),
    "array": partial(structure, kind=list),
}


def llama3(text: str, tools: Sequence[ToolSpec] = ()) -> Said:
    """Reads calls in the form of Llama 3."""
    start = after_thinking(text)
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


def mistral(text: str, tools: Sequence[ToolSpec] = ()) -> Said:
    """Reads calls in the form of Mistral."""
    reader, calls = Reader(text, after_thinking(text)), []
    if not (mark := reader.find(r"\[TOOL_CALLS\]")):
        return text, []
    while not calls or reader.need(r"\[TOOL_CALLS\]"):
        if named := reader.take(r"([^\[\]{}\s]+)(?:\[CALL_ID\](\w*))?\[ARGS\]"):
            values = [{"name": named[1], "arguments": reader.json(), "id": named[2]}]
        else:
            values = reader.json()
        if not isinstance(values, list) or not values:
            raise Malformed("after [TOOL_CALLS] there is no list of calls")
        calls += [call_in(value, "arguments") for value in values]
        if reader.take(r"\Z"):
            break
    return text[: mark.start()], calls


FORMS: dict[str, Callable[[str, Sequence[ToolSpec]], Said]] = {"hermes": hermes, "llama3": llama3, "mistral": mistral}
WRITTEN = {
    "hermes": '<tool_call>{"name": "NAME", "arguments": {"KEY": VALUE}}</tool_call>',
    "xml": "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
    "llama3": '{"name": "NAME", "parameters": {"KEY": VALUE}}, with nothing else in the message',
    "mistral": '[TOOL_CALLS] [{"name": "NAME", "arguments": {"KEY": VALUE}}]',
}


def no_number(name: str) -> Any:
    """Refuses NaN and Infinity, which Python's parser would accept."""
    raise Malformed(f"{name} is no JSON")


def number(digits: str) -> float:
    """Refuses what a float cannot hold: Python's parser would read infinity."""
    if not math.isfinite(value := float(digits)):
        raise Malformed(f"{shown(digits, 40)} is too large for a number")
    return value


DECODER = json.JSONDecoder(parse_constant=no_number, parse_float=number)


def decoded(text: str) -> Any:
    """Parses a JSON text."""
    reader = Reader(text)
    value = reader.json()
    reader.need(r"\Z", f"{shown(text[reader.at :], 40)} stands after the JSON")
    return value


def call_in(value: Any, *keys: str) -> ToolCall:
    """Converts a JSON object to a call. keys: names of its arguments, an object or its JSON text."""
    if not isinstance(value, dict):
        raise Malformed(f"a call is an object, not {shown(value, 40)}")
    name, key = value.get("name"), next((key for key in keys if key in value), None)
    if not isinstance(name, str) or not name.strip():
        raise Malformed("the call has no name")
    if key is None:
        raise Malformed(f"the call of {shown(name, 40)} has no {keys[0]}")
    arguments = decoded(value[key]) if isinstance(value[key], str) else value[key]
    if not isinstance(arguments, dict):
        raise Malformed(f"the {key} must be an object, not {shown(arguments, 40)}")
    return ToolCall(name, arguments, value["id"] if isinstance(value.get("id"), str) else "")
