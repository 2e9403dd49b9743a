"""Reads what a policy writes when it calls a tool, piece by piece: JSON, Python, XML and typed values. `tool_forms` has the forms
of the models."""

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import chain
from types import NoneType
from typing import Any, NamedTuple

from grpo.env.messages import ToolCall, ToolSpec, shown

DEPTH = 32  # of nested JSON: whoever writes it again does so by recursion


class Malformed(Exception):
    """A text that looks like a call and cannot be read. The message is for the policy."""


class Reader:
    """A text, and the place up to which it is read: at first, the end of the thinking that a message begins with."""

    def __init__(self, text: str, at: int = 0) -> None:
        self.text, self.at = text, at

    def take(self, pattern: str) -> re.Match | None:
        """Reads the pattern if it comes next, after any space."""
        if match := re.compile(rf"\s*(?:{pattern})").match(self.text, self.at):
            self.at = match.end()
        return match

    def need(self, pattern: str, complaint: str = "") -> re.Match:
        """Reads the pattern, or raises Malformed."""
        if not (match := self.take(pattern)):
            raise Malformed(complaint or f"{shown(self.text[self.at :].lstrip(), 40)} stands after the call")
        return match

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
            level = [value]
            for _ in range(DEPTH):
                level = inside(level)
            if level:
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


def inside(values: Sequence[Any]) -> list[Any]:
    """Return the elements of the lists and the values of the objects among these values."""
    groups = (
        value.values() if isinstance(value, dict) else value for value in values if isinstance(value, dict | list)
    )
    return [*chain.from_iterable(groups)]


class Xml(NamedTuple):
    """How a call with one element per argument is written. name, key: patterns. broken: the complaint about a name that cannot be
    read. value_end, end: what ends a value, and the call. line: values stand on lines of their own. A second group of `key` tells
    whether the value is a text (true) or JSON (false)."""

    name: str
    broken: str
    key: str
    value_end: str
    end: str
    line: bool = False


def xml_call(reader: Reader, tools: Sequence[ToolSpec], xml: Xml) -> ToolCall:
    """Reads the next call. Values get the types of the tool's schema."""
    name = reader.need(xml.name, xml.broken)[1].strip()
    arguments: dict[str, Any] = {}
    schema, schemas = schemas_of(name, tools)
    while opened := reader.take(xml.key):
        key, start, end = opened[1].strip(), opened.end(), reader.text.find(xml.value_end, opened.end())
        if end < 0:
            raise Malformed(f"{xml.value_end} is missing after {shown(opened[0].strip())}")
        value = reader.text[start:end]
        value = value.removeprefix("\n").removesuffix("\n") if xml.line else value
        told = opened[2] if opened.re.groups > 1 else None
        if told:
            arguments[key] = value if told == "true" else decoded(value)
        else:
            arguments[key] = converted(value, schemas.get(key, {}), schema)
        reader.at = end + len(xml.value_end)
    reader.need(xml.end, f"{xml.end} is missing after the parameters of {shown(name)}")
    return ToolCall(name, arguments)


def schemas_of(name: str, tools: Sequence[ToolSpec]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the schema of a tool's arguments, and those of each argument; empty ones for an unknown tool."""
    schema = {tool.name: tool.parameters for tool in tools}.get(name, {})
    return schema, schema.get("properties", {})


def typed(call: ToolCall, tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """Return the arguments of a call in which values may be written as texts: a text becomes what its schema wants, unless that
    may be a text."""
    schema, schemas = schemas_of(call.name, tools)

    def as_wanted(value: Any, wanted: Any) -> Any:
        kept = not isinstance(value, str) or "string" in kinds_in(wanted, schema)
        return value if kept else converted(value, wanted, schema)

    return {key: as_wanted(value, schemas.get(key, {})) for key, value in call.arguments.items()}


def python_calls(text: str) -> Iterator[ToolCall]:
    """Reads calls written as in Python, in a list or on lines of their own. Arguments have names, and values as in JSON."""
    for source in (text, text.replace("\n", "\\n")):  # LFM2.5 writes the line breaks of a text as they are
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            lines = [getattr(line, "value", None) for line in ast.parse(source.strip()).body]
            break
    else:
        raise Malformed("the calls cannot be read as Python")
    for call in (call for line in lines for call in (line.elts if isinstance(line, ast.List) else [line])):
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            raise Malformed("a call has a name, and arguments with names")
        try:
            values = {k.arg: ast.literal_eval(AsJson().visit(k.value)) for k in call.keywords}
            arguments = decoded(json.dumps(values))
        except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
            raise Malformed(f"the arguments of {shown(ast.unparse(call.func))} are no plain values") from None
        yield ToolCall(ast.unparse(call.func), arguments)


class AsJson(ast.NodeTransformer):
    """Gives JSON's names of values their meaning in Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return true, false or null as Python's value."""
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


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
        node = waiting.pop()
        if not isinstance(node, Mapping) or any(node is other for other in seen):
            continue
        seen.append(node)
        types = node.get("type") or ()
        kinds |= {types} if isinstance(types, str) else {*types}
        values = [*(node.get("enum") or ()), *([node["const"]] if "const" in node else ())]
        kinds |= {KINDS[type(value)] for value in values} | ({"null"} if node.get("nullable") else set())
        waiting += [other for name in ("anyOf", "oneOf", "allOf") for other in node.get(name) or ()]
        if place := node.get("$ref"):  # "#/$defs/NAME"
            waiting.append(reduce(lambda inner, name: inner.get(name, {}), place.split("/")[1:], whole))
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
