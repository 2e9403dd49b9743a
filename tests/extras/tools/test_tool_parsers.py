"""Tool calls in the models' native forms: well-formed calls are read, malformed ones are reported."""

import random
import re
from dataclasses import replace
from typing import get_args

import pytest
from helpers.families import FAMILIES, shipped

from grpo.env.messages import Message, ToolCall, ToolSpec
from grpo.extras.tools.renderer import FormName, TokenizerRenderer
from grpo.extras.tools.tool_forms import FORMS, message_of_text
from grpo.system.errors import UserError

WRITE = ToolSpec(
    "write",
    "Write.",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"}, "times": {"type": "integer"}, "size": {"type": "number", "nullable": True},
            "loud": {"type": "boolean"}, "tags": {"type": "array"}, "more": {"type": "object"},
            "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "any": {}, "all": {"allOf": [{"type": "integer"}]},
            "one": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, "of": {"enum": [1, "b"]}, "five": {"const": 5},
            "list": {"type": ["string", "integer", "null"]}, "point": {"$ref": "#/$defs/P"}, "deep": {"$ref": "#/$defs/Q"},
            "nowhere": {"$ref": "#/$defs/Z/Y"},
        },
        "$defs": {"P": {"type": "object"}, "Q": {"anyOf": [{"$ref": "#/$defs/Q"}, {"$ref": "#/$defs/P"}]}},
    },
)  # fmt: skip
A, B = ToolCall("f", {"x": 1}), ToolCall("g", {"y": "{]"})
JSON_A, JSON_B = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "arguments": {"y": "{]"}}'
BLOCK_A, BLOCK_B = f"<tool_call>\n{JSON_A}\n</tool_call>", f"<tool_call>{JSON_B}</tool_call>"
LLAMA_A, LLAMA_B = JSON_A.replace("arguments", "parameters"), JSON_B


def said(content: str, *calls: ToolCall) -> Message:
    return Message("assistant", content, calls)


def xml(parameters: str, name: str = "write") -> str:
    return f"<tool_call>\n<function={name}>\n{parameters}\n</function>\n</tool_call>"


def glm(key: str, value: str) -> str:
    return f"<tool_call>write\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


def deepseek(*calls: str) -> str:
    written = "".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def kimi(name: str, arguments: str) -> str:
    call = f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


V3, V3_B = ('function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```', 'function<｜tool▁sep｜>g\n```json\n{"y": "{]"}\n```')
V31 = 'f<｜tool▁sep｜>{"x": 1}'
F = "<function=f></function>"


def dsml(*parameters: str) -> str:
    """A call of `write` in DeepSeek 3.2's form. parameters: the name, whether it is a text, and the value."""
    mark, each = "｜DSML｜", zip(*[iter(parameters)] * 3, strict=True)
    inside = "".join(f'<{mark}parameter name="{k}" string="{t}">{v}</{mark}parameter>\n' for k, t, v in each)
    return f'<{mark}function_calls>\n<{mark}invoke name="write">\n{inside}</{mark}invoke>\n</{mark}function_calls>'


def hy3(*pairs: str) -> str:
    """A call of `write` in Hy3's form. pairs: keys and values."""
    end = ":opensource>"
    inside = "".join(
        f"<arg_key{end}{k}</arg_key{end}\n<arg_value{end}{v}</arg_value{end}\n"
        for k, v in zip(*[iter(pairs)] * 2, strict=True)
    )
    return f"<tool_calls{end}\n<tool_call{end}write<tool_sep{end}\n{inside}</tool_call{end}\n</tool_calls{end}"


COHERE_A, COHERE_B = (
    '{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}',
    '{"tool_name": "g", "parameters": {"y": "{]"}}',
)
NESTED = {"more": {"a": None, "b": [True, "é"]}}
JSON_NESTED = '{"name": "write", "arguments": {"more": {"a": null, "b": [true, "é"]}}}'
GOOD = [
    ("hermes", "There are 3.", said("There are 3.")),
    ("hermes", BLOCK_A, said("", A)),
    ("hermes", f"Let me see.\n{BLOCK_A}\n{BLOCK_B}", said("Let me see.", A, B)),
    ("hermes", f"Let me see.\n\n{BLOCK_A}", said("Let me see.\n", A)),  # the second line break is the policy's
    ("hermes", f"One {BLOCK_A} two {BLOCK_B}\nthree\n", said("One \ntwo\nthree", A, B)),
    ("hermes", BLOCK_A.replace('{"x": 1}', '"{\\"x\\": 1}"'), said("", A)),
    ("hermes", BLOCK_B.replace("{]", "</tool_call>"), said("", ToolCall("g", {"y": "</tool_call>"}))),
    ("hermes", BLOCK_B.replace("{]", "</think>"), said("", ToolCall("g", {"y": "</think>"}))),
    ("hermes", f"<think>\n{BLOCK_A}\n</think>\n\n{BLOCK_B}", said(f"<think>\n{BLOCK_A}\n</think>\n", B)),
    ("hermes", f"{BLOCK_A}<think>{BLOCK_B}</think>", said(f"<think>{BLOCK_B}</think>", A)),
    (
        "hermes",
        f"Hm. {BLOCK_A} No.\n</think>\n{BLOCK_B}",
        said(f"Hm. {BLOCK_A} No.\n</think>", B),
    ),  # opened by the prompt
    ("hermes", f"<think>Should it be {BLOCK_A}", said(f"<think>Should it be {BLOCK_A}")),
    (
        "hermes",
        xml("<parameter=x>\n1\n</parameter>", "f"),
        said("", ToolCall("f", {"x": "1"})),
    ),  # an unknown tool
    ("hermes", xml("", "f"), said("", ToolCall("f", {}))),
    ("hermes", xml("<parameter=text>\n\n a <b>\n\n</parameter>"), said("", ToolCall("write", {"text": "\n a <b>\n"}))),
    ("llama3", LLAMA_A, said("", A)),
    ("llama3", f"<|python_tag|>{LLAMA_A}; {LLAMA_B}\n", said("", A, B)),
    ("llama3", f"Let me see. <|python_tag|>{LLAMA_A}", said("Let me see. ", A)),
    ("llama3", f"<think>{LLAMA_A}</think>{LLAMA_B}", said(f"<think>{LLAMA_A}</think>", B)),
    ("llama3", f"It would be {LLAMA_A}", said(f"It would be {LLAMA_A}")),
    ("llama3", '{"answer": 4}', said('{"answer": 4}')),
    ("llama3", "{1, 2} is a set", said("{1, 2} is a set")),
    ("mistral", "There are 3.", said("There are 3.")),
    ("mistral", f"[TOOL_CALLS] [{JSON_A}]", said("", A)),
    (
        "mistral",
        f'Let me see.[TOOL_CALLS][{JSON_A[:-1]}, "id": "abcDEF123"}}, {JSON_B}]',
        said("Let me see.", replace(A, id="abcDEF123"), B),
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}', said("", A)),
    (
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{"y": "{]"}',
        said("", replace(A, id="abcDEF123"), B),
    ),
    ("mistral", f"<think>[TOOL_CALLS] [{JSON_A}]", said(f"<think>[TOOL_CALLS] [{JSON_A}]")),
    ("granite", f"<|tool_call|>[{JSON_A}, {JSON_B}]", said("", A, B)),
    ("granite", f"<tool_call>[{JSON_A}]", said("", A)),  # Granite 3.1
    ("granite", f"Hm.<|tool_call|>[{JSON_A}]<|/tool_call|>", said("Hm.", A)),  # Phi-4-mini
    ("glm", glm("text", "a <b>\n"), said("", ToolCall("write", {"text": "a <b>\n"}))),
    ("glm", f"<think></think>\n{glm('times', '3')}", said("<think></think>", ToolCall("write", {"times": 3}))),
    ("glm", "<tool_call>f</tool_call><tool_call>g\n</tool_call>", said("", ToolCall("f", {}), ToolCall("g", {}))),
    (
        "gemma4",
        'See.<|tool_call>call:write{list:<|"|>a "b", {c:1}\n<|"|>,more:{x:{y:null}},tags:[1.5,true,<|"|>}<|"|>]}<tool_call|>',
        said(
            "See.", ToolCall("write", {"list": 'a "b", {c:1}\n', "more": {"x": {"y": None}}, "tags": [1.5, True, "}"]})
        ),
    ),
    (
        "gemma4",
        "<|tool_call>call:f{x:1}<tool_call|><|tool_call>call:g{}<tool_call|>",
        said("", A, ToolCall("g", {})),
    ),
    (
        "lfm2",
        "<|tool_call_start|>[f(x=1), g(y='{]', z=[None, true], w=-1.5, v={'a': False})]<|tool_call_end|>Done.",
        said("Done.", A, ToolCall("g", {"y": "{]", "z": [None, True], "w": -1.5, "v": {"a": False}})),
    ),
    ("lfm2", "<|tool_call_start|>[f(x='a\nb')]<|tool_call_end|>", said("", ToolCall("f", {"x": "a\nb"}))),
    ("lfm2", "<|tool_call_start|>[a.f(x=1)]<|tool_call_end|>", said("", ToolCall("a.f", {"x": 1}))),
    ("olmo3", "I call.\n<function_calls>\nf(x=1)\ng(y='{]')\n</function_calls>", said("I call.", A, B)),
    ("deepseek", deepseek(V3, V3_B), said("", A, B)),
    ("deepseek", "<think>a</think>Hm." + deepseek(V31), said("<think>a</think>Hm.", A)),
    ("seed", f"<seed:tool_call>{F}{F}</seed:tool_call>", said("", ToolCall("f", {}), ToolCall("f", {}))),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="write">\n<parameter name="text">a\n</parameter>\n'
        '<parameter name="times">2</parameter>\n</invoke>\n<invoke name="f"></invoke>\n</minimax:tool_call>',
        said("", ToolCall("write", {"text": "a\n", "times": 2}), ToolCall("f", {})),
    ),
    ("kimi", kimi("functions.f:0", '{"x": 1}') + " ", said("", A)),
    ("kimi", kimi("g:12", '{"y": "{]"}'), said("", B)),
    (
        "gemma4",
        '<|tool_call>call:write{more:{a:None,b:[true,None]},text:<|"|>None<|"|>}<tool_call|>',
        said("", ToolCall("write", {"more": {"a": None, "b": [True, None]}, "text": "None"})),
    ),
    (
        "functiongemma",
        "Hm.<start_function_call>call:write{more:{a:None,b:[true,<escape>é{,}<escape>]},times:2}<end_function_call>",
        said("Hm.", ToolCall("write", {"more": {"a": None, "b": [True, "é{,}"]}, "times": 2})),
    ),
    (
        "functiongemma",
        "<start_function_call>call:f{x:1}<end_function_call><start_function_call>call:g{y:<escape>{]<escape>}"
        "<end_function_call>",
        said("", A, B),
    ),
    (
        "deepseek32",
        "I look.\n\n" + dsml("text", "true", "3", "times", "false", "3", "more", "false", '{"a": null}'),
        said("I look.\n", ToolCall("write", {"text": "3", "times": 3, "more": {"a": None}})),
    ),
    (
        "deepseek32",
        dsml("text", "true", '<b> "é"\n', "loud", "false", "true"),
        said("", ToolCall("write", {"text": '<b> "é"\n', "loud": True})),
    ),
    (
        "deepseek32",
        dsml().replace("</｜DSML｜function", '<｜DSML｜invoke name="f"></｜DSML｜invoke></｜DSML｜function'),
        said("", ToolCall("write", {}), ToolCall("f", {})),
    ),
    (
        "deepseek4",
        dsml("times", "false", "3").replace("function_calls", "tool_calls"),
        said("", ToolCall("write", {"times": 3})),
    ),
    (
        "command",
        f"<think>p</think><|START_ACTION|>[\n    {COHERE_A},\n    {COHERE_B}\n]<|END_ACTION|>",
        said("<think>p</think>", A, B),
    ),
    (
        "command_r",
        f"Plan: I look.\nAction:\n```json\n[\n    {COHERE_A},\n    {COHERE_B}\n]```\n",
        said("Plan: I look.", A, B),
    ),
    ("command_r", f"Action: ```json\n[{COHERE_B}]\n```", said("", B)),
    ("command_r", "Action: none is needed.", said("Action: none is needed.")),
    ("apertus", 'See.<|tools_prefix|>[{"f": {"x": 1}}, {"g": {"y": "{]"}}]<|tools_suffix|>', said("See.", A, B)),
    ("apertus", '<|tools_prefix|>[{"f": "{\\"x\\": 1}"}]<|tools_suffix|>', said("", A)),
    ("nemotron2", f"<think>\na</think>\n<TOOLCALL>[{JSON_A}, {JSON_B}]</TOOLCALL>\n", said("<think>\na</think>", A, B)),
    ("hunyuan", f"Hm.<tool_calls>[{JSON_A}, {JSON_NESTED}]</tool_calls>", said("Hm.", A, ToolCall("write", NESTED))),
    ("hunyuan", f"<tool_calls>\n{JSON_A}\n{JSON_B}\n</tool_calls>", said("", A, B)),  # MiniMax M1
    (
        "hunyuan",
        '<tool_calls><tool_call>f\n```json\n{"x": 1}\n```</tool_call><tool_call>g\n```json\n{"y": "{]"}\n```</tool_call>'
        "</tool_calls>",
        said("", A, B),
    ),
    (
        "hy3",
        "Hm." + hy3("text", " a <b>", "times", "3", "more", '{"a": null}'),
        said("Hm.", ToolCall("write", {"text": " a <b>", "times": 3, "more": {"a": None}})),
    ),
    (
        "longcat",
        f"Hm.\n<longcat_tool_call>\n{JSON_A}\n</longcat_tool_call>\n<longcat_tool_call>{JSON_B}</longcat_tool_call>",
        said("Hm.", A, B),
    ),
    (
        "longcat",
        "<longcat_tool_call>write\n<longcat_arg_key>times</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n"
        "<longcat_arg_key>text</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>",
        said("", ToolCall("write", {"times": 3, "text": "3"})),
    ),
    ("phi4", f"functools[{JSON_A}, {JSON_B}]", said("", A, B)),
    ("phi4", f"functools[{JSON_A}]\nfunctools[{JSON_B}]", said("", A, B)),
    ("phi4", f"Hm.<|tool_call|>[{JSON_A}]<|/tool_call|>", said("Hm.", A)),
    (
        "phi4",
        f"<|tool_call|>{JSON_A}<|/tool_call|><|tool_call|>{JSON_NESTED}<|/tool_call|>",
        said("", A, ToolCall("write", NESTED)),
    ),
    ("phi4", "functools has reduce.", said("functools has reduce.")),
    ("pythonic", "[f(x=1), g(y='{]')]", said("", A, B)),
    (
        "pythonic",
        '<|python_start|>[write(times="3", text="3", loud="True", more={"a": None, "b": [true, "é"]})]<|python_end|>',
        said("", ToolCall("write", {"times": 3, "text": "3", "loud": True, **NESTED})),
    ),
    ("pythonic", "<think>[f(x=2)]</think>\n[f(x=1)]", said("<think>[f(x=2)]</think>", A)),
    ("pythonic", "[f()]", said("", ToolCall("f", {}))),
    ("pythonic", "I call [f(x=1)]", said("I call [f(x=1)]")),
    ("pythonic", "[f(x) = 1] is an equation", said("[f(x) = 1] is an equation")),
    ("harmony", "<|channel|>final<|message|>There are 3.<|return|>", said("There are 3.")),
    (
        "harmony",
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>final<|message|>3",
        said("<think>I add.</think>3"),
    ),
    ("harmony", "<|channel|>analysis<|message|>I ad", said("<think>I ad")),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"x": 1}<|call|>',
        said("I look.", A),
    ),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>', said("", A)),
    ("harmony", "There are 3.", said("There are 3.")),
]


@pytest.mark.parametrize(("form", "text", "message"), GOOD)
def test_calls_are_read(form, text, message):
    assert message_of_text(text, form, [WRITE]) == message


BAD = [
    ("hermes", BLOCK_A.removesuffix("</tool_call>"), "</tool_call> is missing after the call of 'f'"),
    ("hermes", f"{BLOCK_A}\n</tool_call>", "</tool_call> stands without <tool_call>"),
    ("hermes", f"{BLOCK_A}\n<tool_call>", "the JSON is broken"),
    ("hermes", "<tool_call>\n{'name': 'f'}\n</tool_call>", "the JSON is broken"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "the call has no name"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "the call has no name"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "the call of 'f' has no arguments"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', r"the arguments must be an object, not \[1\]"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "the JSON is broken"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "3"}</tool_call>', "the arguments must be an object, not 3"),
    ("hermes", f"<tool_call>[{JSON_A}]</tool_call>", "a call is an object, not"),
    ("hermes", BLOCK_A.replace("1", "NaN"), "NaN is no JSON"),
    ("hermes", BLOCK_A.replace("1", "1" * 5000), "too many digits"),
    ("hermes", BLOCK_A.replace("1", "-1e999"), "'-1e999' is too large for a number"),
    ("mistral", f"[TOOL_CALLS] [{JSON_A}]".replace("1", "[NaN]"), "NaN is no JSON"),
    ("hermes", BLOCK_A.replace("1", '"\\ud800"'), "half a character"),
    ("hermes", BLOCK_A.replace("1", "[" * 40 + "]" * 40), "nested more than 32 deep"),
    ("hermes", xml("<parameter=x>\n1"), "</parameter> is missing after '<parameter=x>'"),
    ("hermes", xml("<parameter=x>1</parameter> then"), "</function> is missing after the parameters of 'write'"),
    ("hermes", xml("").replace("</tool_call>", ""), "</tool_call> is missing after the call of 'write'"),
    ("hermes", "<tool_call><function></tool_call>", "<function=NAME> is broken"),
    ("llama3", LLAMA_A + " I hope.", "'I hope.' stands after the call"),
    ("llama3", LLAMA_A[:-1], "the JSON is broken, Expecting ',' delimiter at the end"),
    ("llama3", "<|python_tag|>f.call(x=1)", "the JSON is broken"),
    ("llama3", '{"parameters": {}}', "the call has no name"),
    ("llama3", f"{LLAMA_A};", "the JSON is broken"),
    ("mistral", "[TOOL_CALLS]", "the JSON is broken"),
    ("mistral", f"[TOOL_CALLS] [{JSON_A}", "the JSON is broken"),
    ("mistral", f"[TOOL_CALLS] {JSON_A}", "there is no list of calls"),
    ("mistral", "[TOOL_CALLS] []", "there is no list of calls"),
    ("mistral", f"[TOOL_CALLS] [{JSON_A}] then", "'then' stands after the call"),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]", r"the arguments must be an object, not \[1\]"),
    ("granite", f"<|tool_call|>{JSON_A}", r"after <\|tool_call\|> there is no list of calls"),
    ("glm", f"<tool_call>{JSON_A}</tool_call>", "the call has no name"),
    ("glm", "<tool_call>f<arg_key>x</arg_key></tool_call>", "</tool_call> is missing after the call of 'f'"),
    ("glm", "<tool_call>f<arg_key>x</arg_key><arg_value>1</tool_call>", "</arg_value> is missing"),
    ("gemma4", "<|tool_call>call:f{x:1}", r"<tool_call\|> is missing after the call of 'f'"),
    ("gemma4", "<|tool_call>f{x:1}<tool_call|>", "call:NAME is missing"),
    ("gemma4", "<|tool_call>call:f{x:a}<tool_call|>", "the JSON is broken"),
    ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "a call has a name, and arguments with names"),
    ("lfm2", "<|tool_call_start|>[f(x=y)]<|tool_call_end|>", "the arguments of 'f' are no plain values"),
    ("lfm2", "<|tool_call_start|>[f(x={1})]<|tool_call_end|>", "the arguments of 'f' are no plain values"),
    ("lfm2", "<|tool_call_start|>[f(x=1e999)]<|tool_call_end|>", "Infinity is no JSON"),
    ("lfm2", "<|tool_call_start|>[f(x=1]<|tool_call_end|>", "the calls cannot be read as Python"),
    ("lfm2", "<|tool_call_start|>[f(x=1)]", r"<\|tool_call_end\|> is missing after the call of 'f'"),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", r"no call stands after <\|tool_call_start\|>"),
    ("olmo3", "<function_calls>x = 1</function_calls>", "a call has a name"),
    ("deepseek", deepseek(), "no call stands after"),
    (
        "deepseek",
        deepseek(V3).replace("<｜tool▁call▁end｜>", ""),
        "<｜tool▁call▁end｜> is missing after the call of 'f'",
    ),
    ("seed", f"<seed:tool_call>{F}", "</seed:tool_call> is missing after the call of 'f'"),
    ("minimax", "<minimax:tool_call><invoke name=f></invoke></minimax:tool_call>", '<invoke name="NAME"> is broken'),
    ("kimi", kimi("f", "{}"), "no call stands after"),
    ("kimi", kimi("f:0", "[]"), r"the arguments must be an object, not \[\]"),
    ("gemma4", "<|tool_call>call:f{x:Nothing}<tool_call|>", "the JSON is broken"),
    (
        "functiongemma",
        "<start_function_call>call:f{x:<escape>a",
        "<end_function_call> is missing after the call of 'f'",
    ),
    ("functiongemma", "<start_function_call>call:f{x:a}<end_function_call>", "the JSON is broken"),
    ("deepseek32", dsml("more", "false", "{x"), "the JSON is broken"),
    ("deepseek32", dsml("more", "maybe", "1"), "</｜DSML｜invoke> is missing after the parameters of 'write'"),
    ("deepseek32", dsml("text", "true", "a").split("</")[0], "</｜DSML｜parameter> is missing"),
    ("deepseek4", "<｜DSML｜tool_calls></｜DSML｜tool_calls>", '<｜DSML｜invoke name="NAME"> is broken'),
    ("command", f"<|START_ACTION|>[{COHERE_A}", "the JSON is broken, .* at the end"),
    ("command", f"<|START_ACTION|>[{COHERE_A}]", r"<\|END_ACTION\|> is missing after the call of 'f'"),
    ("command", f"<|START_ACTION|>[{JSON_A}]<|END_ACTION|>", "the call has no name"),
    ("command", "<|START_ACTION|>[]<|END_ACTION|>", r"no call stands after <\|START_ACTION\|>"),
    ("command", "<|START_ACTION|>3<|END_ACTION|>", "a call is an object, not 3"),
    ("command_r", f"Action: ```json [{COHERE_A}]", "``` is missing after the call of 'f'"),
    ("command_r", f"Action: ```json [{COHERE_A}]``` then", "'then' stands after the call"),
    ("command_r", "Action: ```json []```", "no call stands after Action:"),
    (
        "apertus",
        '<|tools_prefix|>[{"f": {"x": 1}, "g": {}}]<|tools_suffix|>',
        "a call is an object whose one key is the tool's name",
    ),
    ("apertus", '<|tools_prefix|>[{"f": [1]}]<|tools_suffix|>', r"the arguments must be an object, not \[1\]"),
    ("nemotron2", f"<TOOLCALL>[{JSON_A}]", "</TOOLCALL> is missing after the call of 'f'"),
    ("nemotron2", '<TOOLCALL>[{"name": "f", "arguments": {x}}]</TOOLCALL>', "the JSON is broken"),
    ("hunyuan", f"<tool_calls>[{JSON_A}", "the JSON is broken, .* at the end"),
    ("hunyuan", '<tool_calls><tool_call>f\n```json\n{"x": 1}', "</tool_call> is missing after the call of 'f'"),
    ("hy3", hy3("times", "3").split("</arg_value")[0], "</arg_value:opensource> is missing"),
    (
        "hy3",
        "<tool_calls:opensource>[]</tool_calls:opensource>",
        "<tool_call:opensource>NAME<tool_sep:opensource> is broken",
    ),
    ("longcat", f"<longcat_tool_call>{JSON_A}", "</longcat_tool_call> is missing after the call of 'f'"),
    ("longcat", "<longcat_tool_call>[]</longcat_tool_call>", "the call has no name"),
    ("phi4", f"functools[{JSON_A}", "the JSON is broken"),
    ("phi4", f"functools[{JSON_A}] then", "'then' stands after the call"),
    ("phi4", "<|tool_call|>3", "after functools there is no list of calls"),
    ("pythonic", "[f(x=1", "the calls cannot be read as Python"),
    ("pythonic", "[f(x=1)] I hope", "the calls cannot be read as Python"),
    ("pythonic", "[f(x=y)]", "the arguments of 'f' are no plain values"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{x}<|call|>", "the JSON is broken"),
    ("harmony", "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final", r"<\|message\|> is missing"),
    ("harmony", "Hm.<|channel|>final<|message|>3", "a message begins with its channel"),
]


@pytest.mark.parametrize(("form", "text", "reason"), BAD)
def test_a_malformed_call_is_content_and_one_line_says_why(form, text, reason):
    message = message_of_text(text, form, [WRITE])
    assert message == Message("assistant", text, error=message.error)
    assert re.search(f"{reason}.*a call is written .*NAME", message.error), message.error
    assert "\n" not in message.error


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "3", "3"), ("times", "3", 3), ("times", "3.5", "3.5"), ("times", "true", "true"),
        ("times", "three", "three"), ("times", "None", "None"), ("size", "3.5", 3.5), ("size", "null", None),
        ("loud", "True", True), ("loud", "false", False), ("loud", "1", True), ("loud", "FALSE", False),
        ("loud", "2", "2"), ("tags", '["a", 1]', ["a", 1]),
        ("tags", '{"a": 1}', '{"a": 1}'), ("more", '{"a": [1]}', {"a": [1]}), ("either", "7", 7),
        ("either", "None", None), ("any", "7", "7"), ("unknown", "7", "7"), ("all", "7", 7), ("one", "7", 7),
        ("one", "true", True),
        ("of", "1", 1), ("of", "b", "b"), ("five", "5", 5), ("list", "7", 7), ("list", "null", None), ("list", "a", "a"),
        ("point", '{"x": 1}', {"x": 1}), ("deep", '{"x": 1}', {"x": 1}), ("nowhere", "{}", "{}"), ("size", "1e3", 1000.0),
        ("size", ".5", 0.5), ("size", "3", 3), ("size", "1e999", "1e999"), ("size", "NaN", "NaN"), ("tags", "[1e999]", "[1e999]"),
        ("tags", "[{'a': False, 'b': None}]", [{"a": False, "b": None}]),
        ("more", "{'a': __import__('os')}", "{'a': __import__('os')}"),
        ("times", " 5 ", 5), ("times", "1" * 5000, "1" * 5000), ("tags", "[" * 40 + "]" * 40, "[" * 40 + "]" * 40),
        ("more", "{1}", "{1}"),
    ],
)  # fmt: skip
def test_values_between_tags_become_what_the_schema_says(key, text, value):
    (call,) = message_of_text(xml(f"<parameter={key}>\n{text}\n</parameter>"), "hermes", [WRITE]).tool_calls
    assert call == ToolCall("write", {key: value}) and type(call.arguments[key]) is type(value)


def test_every_form_has_its_name_in_the_settings():
    assert get_args(FormName) == ("auto", *FORMS)


def test_the_form_is_the_one_that_reads_what_the_template_writes():
    forms = {name: TokenizerRenderer(family.tokenizer()).form for name, family in FAMILIES.items()}
    assert forms == {
        "qwen25": "hermes",
        "qwen3": "hermes",
        "hermes": "hermes",
        "llama31": "llama3",
        "mistral": "mistral",
    }


SHIPPED = {
    "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_5_think": "hermes", "qwen3_8": "hermes", "nemotron_3_nano": "hermes",
    "llama3_2": "llama3", "glm4moe": "glm", "gemma4": "gemma4", "gemma4_v5": "gemma4", "lfm2_v2": "lfm2", "lfm2_2_5": "lfm2",
    "gptoss": "harmony",
    "cohere2": "does not show them", "phi3": "does not show them", "gemma3": "does not show them",
    "deepseekv3": "does not show them", "lfm2": "no form here reads", "muse_glimmer": "no form here reads",
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_the_form_of_a_real_template(name):
    """TRL ships them. A template whose own call does not come back is refused, and no form is proposed."""
    tokenizer = FAMILIES["llama31" if name.startswith("llama") else "qwen25"].tokenizer()
    tokenizer.chat_template = shipped(name)
    renderer = TokenizerRenderer(tokenizer)
    if SHIPPED[name] in FORMS:
        assert renderer.form == SHIPPED[name]
    else:
        with pytest.raises(UserError, match=SHIPPED[name]):
            _ = renderer.form


def test_a_token_for_the_unknown_is_no_part_of_a_message():
    """A tokenizer gives its id to every token that it lacks, such as the tags of thoughts."""
    tokenizer = FAMILIES["llama31"].tokenizer()
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    renderer = TokenizerRenderer(tokenizer)
    ids = (tokenizer.unk_token_id, *tokenizer("There are 3.").input_ids[-6:], tokenizer.unk_token_id)
    for tools in ((), (WRITE,)):
        assert "<unk>" not in renderer.parse(ids, tools).content


TALK = """{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{% for m in messages %}{{ m.role }}: {{ m.content or "" }}{% if m.tool_calls %}CALLS{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def each(call: str) -> str:
    return f"{{% for call in m.tool_calls %}}{call}{{% endfor %}}"


OWN = {
    "kimi": "<|tool_calls_section_begin|>"
    + each(
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>"
    )
    + "<|tool_calls_section_end|>",
    "deepseek": "{% if m.content is none %}<｜tool▁calls▁begin｜>"
    + each(
        "<｜tool▁call▁begin｜>{{ call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}<｜tool▁call▁end｜>"
    )
    + "<｜tool▁calls▁end｜>{% endif %}",
    "seed": each(
        "\n<seed:tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
        "<parameter={{ key }}>{{ value }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>"
    ),
}


@pytest.mark.parametrize("form", OWN)
def test_arguments_as_text_no_content_and_ids_are_given_as_a_template_wants_them(form):
    """As the templates of Kimi K2, DeepSeek V3.1 and Seed-OSS do."""
    tokenizer = FAMILIES["qwen25"].tokenizer()
    tokenizer.chat_template = TALK.replace("CALLS", OWN[form])
    renderer = TokenizerRenderer(tokenizer)
    call = ToolCall("write", {"text": 'a "b"\nc', "times": 2})
    assert renderer.form == form
    ids = renderer.prompt_ids(
        [Message("user", "Write."), said("", call), Message("tool", "Done.", name="write")], [WRITE]
    )
    written = tokenizer.decode(ids).partition("assistant: ")[2].partition("<|im_end|>")[0]
    assert message_of_text(written, form, [WRITE]) == said("", call)


@pytest.mark.parametrize("form", FORMS)
def test_no_text_is_too_much(form):
    """A randomly changed call is read, reported as malformed, or plain text."""
    rng = random.Random(0)
    texts = [text for good, text, _ in GOOD if good == form]
    pieces = [*'{}[]<>"\\;:, \n19é\ud800\0', "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]"]
    pieces += [
        '<|"|>',
        "call:f{",
        "<arg_key>",
        "</arg_value>",
        "f(x=1)",
        "<|channel|>final",
        "<|message|>",
        "<|start|>",
    ]
    pieces += ["[ARGS]", "<|python_tag|>", "<function=f>", "<parameter=x>", "</parameter>", "null", '"arguments"']
    kinds = set()
    for _ in range(2000):
        text = rng.choice(texts)
        for _ in range(rng.randrange(1, 5)):
            start = rng.randrange(len(text) + 1)
            text = text[:start] + rng.choice(["", *pieces]) + text[start + rng.randrange(4) :]
        message = message_of_text(text, form, [WRITE])
        kinds.add("call" if message.tool_calls else "error" if message.error else "plain")
        if message.error or not (message.tool_calls or form == "harmony"):
            assert message.content == text
        assert not (message.tool_calls and message.error) and "\n" not in (message.error or "")
    assert kinds == {"call", "error", "plain"}


PIECES = ["[", "{", '{"a":', "<tool_call>", "</tool_call>", "<think>", "</think>", " ", "\n", '"', "\\", ";", "a"]
PIECES += ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<parameter=x>", '"parameters" ']
BEGIN = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}


@pytest.mark.parametrize("form", BEGIN)
@pytest.mark.parametrize("piece", PIECES)
def test_a_million_characters_are_read_in_one_pass(form, piece):
    """A quadratic parser would take many minutes here."""
    text = piece * (1_000_000 // len(piece))
    for whole in (
        text,
        BEGIN[form] + text,
        f"{{{text}",
        f"{BEGIN[form]}<function=f>{text}",
        f"{BEGIN[form]}f[ARGS]{text}",
    ):
        message = message_of_text(whole, form, [WRITE])
        assert message.content == whole and message.tool_calls == ()


def test_a_hint_is_in_the_form_that_was_tried():
    assert "<function=NAME>" in message_of_text(xml("<parameter=x>\n1"), "hermes").error
    assert "<function=NAME>" not in message_of_text("<tool_call>{", "hermes").error
