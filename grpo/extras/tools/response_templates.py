"""The form that a tokenizer itself describes: its `response_template`, with which transformers reads what a model wrote."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from grpo.env.messages import ToolCall, ToolSpec
from grpo.env.thoughts import CLOSED, FIELDS, OPENED, Tags
from grpo.extras.tools.tool_bodies import Parsed
from grpo.extras.tools.tool_forms import Form
from grpo.extras.tools.tool_parsers import Malformed, call_in
from grpo.system.errors import one_line


def template_of(tokenizer: Any) -> ResponseTemplate | None:
    """Return a tokenizer's template of responses, None if it has none that transformers can load."""
    template = getattr(tokenizer, "response_template", None)
    try:
        return load_response_template(dict(template)) if isinstance(template, Mapping) else None
    except (ValueError, KeyError, TypeError):
        return None


def form_described(template: ResponseTemplate) -> Form | None:
    """Return the form of the calls in a template, None if it has no calls. Its marks are the tags that begin and end a call."""
    field = template.fields.get("tool_calls")
    if field is None or field.open_re is None:
        return None
    begin, end = (literal_of(anchor) for anchor in (field.open_re, field.close_re))
    marks = re.findall(r"</?\|?[^<>\s|]+\|?>|\[/?[A-Z_]+\]", f"{begin} {end}")
    return Form(partial(read_described, template=template), f"between {begin} and {end or 'the end'}", tuple(marks))


def tags_described(template: ResponseTemplate) -> Tags | None:
    """Return how the model marks a thought, None if the template has no plain marks of one."""
    field = next((template.fields[name] for name in FIELDS if name in template.fields), None)
    if field is None or field.open_re is None or field.close_re is None:
        return None
    begin, end = literal_of(field.open_re), literal_of(field.close_re)
    exact = field.open_re.fullmatch(begin) and field.close_re.fullmatch(end)
    return Tags(begin, "", end) if begin and end and exact else None


def literal_of(anchor: Any) -> str:
    """Return the text that a mark's pattern begins with, without the space round it; "" for no mark."""
    literal = re.compile(r"(?:\\\W|[^\\()\[\]{}.*+?|^$])*").match(anchor.pattern if anchor else "")
    return re.sub(r"\\(.)", r"\1", literal[0]).strip() if literal else ""


def read_described(text: str, tools: Sequence[ToolSpec], start: int, template: ResponseTemplate) -> Parsed:
    """Reads the calls outside of thoughts."""
    said, calls = text[:start], []
    for i, piece in enumerate(re.split(f"({OPENED}.*?(?:{CLOSED}|\\Z))", text[start:], flags=re.DOTALL)):
        rest = piece if i % 2 else without_calls(piece, template)
        said += rest
        if rest == piece:
            continue
        try:
            message = parse_response(piece, template, prefix="", tools=[tool.as_dict() for tool in tools])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Malformed(f"a call is broken, {one_line(error, 200)}") from None
        calls += [one_call(call) for call in unnested(message.get("tool_calls") or ())]
    return (said, calls) if calls else (text, [])


def without_calls(text: str, template: ResponseTemplate) -> str:
    """Return what stands outside of the calls. Raises Malformed for a call without an end."""
    field, outside, at = template.fields["tool_calls"], "", 0
    while opened := field.open_re.search(text, at):
        closed = field.close_re.search(text, opened.end()) if field.close_re else None
        if field.close_re and not closed:
            raise Malformed(f"{literal_of(field.close_re)} is missing after the last call")
        end = closed.end() if closed else len(text)
        if end <= at:  # a template whose marks match nothing
            break
        outside, at = outside + text[at : opened.start()], end
    return outside + text[at:]


def unnested(calls: Sequence[Any]) -> Iterator[Any]:
    """Yield calls that stand in lists in this list, or in itself."""
    for call in calls:
        yield from call if isinstance(call, list) else [call]


def one_call(call: Any) -> ToolCall:
    """Converts a call as parse_response has it. Its arguments must be JSON."""
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    except (KeyError, TypeError, ValueError, RecursionError):
        raise Malformed("a call has no name, or no arguments") from None
    return call_in({"name": name, "arguments": arguments}, "arguments")
