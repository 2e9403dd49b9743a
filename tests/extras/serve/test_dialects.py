"""APIs of clients: requests to calls, completions to answers, by hand. A token is a character here."""

import json
import math

import pytest

from grpo.env.messages import Message, ToolCall, ToolSpec, cut
from grpo.env.tokens import Completion
from grpo.extras.serve.dialects import DIALECTS
from grpo.extras.serve.dialects.request import Answer, answered
from grpo.extras.serve.dialects.writing import sse, words_of
from grpo.extras.serve.sessions import check_request
from grpo.system.errors import UserError

CHAT, COMPLETIONS, RESPONSES, ANTHROPIC, TOKENS = DIALECTS.values()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = ToolSpec("add", "Add.", SCHEMA)
QUESTION = [{"role": "user", "content": "1 + 2?"}]


def decode(ids, skip_special_tokens=False):
    return "".join("" if i == 0 and skip_special_tokens else chr(i) for i in ids)


def spoken(call, text: str, calls=(), finish="stop", prompt="ab", **more) -> Answer:
    ids = tuple(map(ord, text))
    completion = Completion(ids, tuple(-float(i) for i in range(len(ids))), finish)
    message = Message("assistant", "" if calls else text, tuple(calls))
    return answered(call, tuple(map(ord, prompt)), completion, message, decode, **more)


def test_one_conversation_in_three_forms():
    """The same turns, with calls answered out of order, as each API writes them."""
    calls = (ToolCall("add", {"a": 1}, "x"), ToolCall("sub", {}, "y"))
    expected = (
        Message("system", "Be short."),
        Message("user", "1 + 2?\nAnd 3?"),
        Message("assistant", "Well:", calls),
        Message("tool", "3", name="add"),
        Message("tool", "0", name="sub"),
    )
    parts = [{"type": "text", "text": "1 + 2?"}, {"type": "text", "text": "And 3?"}]
    chat = CHAT.read(
        {
            "messages": [
                {"role": "developer", "content": "Be short."},
                {"role": "user", "content": parts},
                {
                    "role": "assistant",
                    "content": "Well:",
                    "refusal": None,
                    "tool_calls": [
                        {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                        {"id": "y", "type": "function", "function": {"name": "sub", "arguments": ""}},
                    ],
                },
                {"role": "tool", "tool_call_id": "y", "content": "0"},
                {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "3"}]},
            ],
            "tools": [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}],
        }
    )
    responses = RESPONSES.read(
        {
            "instructions": "Be short.",
            "input": [
                {"role": "user", "content": [part | {"type": "input_text"} for part in parts]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well:"}]},
                {"type": "function_call", "call_id": "x", "id": "fc", "name": "add", "arguments": '{"a": 1}'},
                {"type": "function_call", "call_id": "y", "id": "fd", "name": "sub", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "y", "output": "0"},
                {"type": "function_call_output", "call_id": "x", "output": "3"},
            ],
            "tools": [{"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": True}],
        }
    )
    use = [{"type": "tool_use", "id": c.id, "name": c.name, "input": dict(c.arguments)} for c in calls]
    results = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in (("y", "0"), ("x", "3"))]
    anthropic = ANTHROPIC.read(
        {
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": [{"type": "text", "text": "Well:"}, *use]},
                {"role": "user", "content": results},
            ],
            "tools": [{"name": "add", "description": "Add.", "input_schema": SCHEMA}],
        }
    )
    for call in (chat, responses, anthropic):
        assert call.messages == expected and call.tools == (ADD,)
    assert (chat.max_tokens, anthropic.max_tokens, chat.n, chat.stream) == (None, 9, 1, False)


def test_settings_have_the_names_of_sampling():
    request = CHAT.read(
        {
            "model": "any", "messages": QUESTION, "stop": "\n", "max_tokens": 5, "max_completion_tokens": 7,
            "temperature": 0.5, "top_k": -1, "stop_token_ids": [3],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            "logit_bias": {}, "presence_penalty": 0.0, "metadata": {"a": "b"}, "stream": True,
            "stream_options": {"include_usage": True}, "suffix": None,
        }
    )  # fmt: skip
    assert (request.stop, request.max_tokens, request.stream, request.usage) == (("\n",), 7, True, True)
    assert request.settings == {"temperature": 0.5, "top_k": 0, "stop_ids": [3], "guided": {"json": SCHEMA}}
    several = COMPLETIONS.read({"prompt": [[1, 2], "x"], "n": 2, "echo": True, "logprobs": 5, "max_tokens": 0})
    assert (several.prompts, several.prompt, several.count) == (((1, 2), "x"), (1, 2), 4)
    sampling = {"max_tokens": 3, "logprobs": 1, "stop_token_ids": [2], "skip_special_tokens": False}
    request = TOKENS.read({"model": "m", "token_ids": [5, 6], "sampling_params": sampling})
    assert (request.prompts, request.max_tokens, request.logprobs, request.settings) == (
        ((5, 6),),
        3,
        1,
        {"stop_ids": [2]},
    )
    assert ANTHROPIC.read({"messages": QUESTION, "stop_sequences": ["a", "b"]}).stop == ("a", "b")
    assert RESPONSES.read({"input": "Hi", "max_output_tokens": 4}).messages == (Message("user", "Hi"),)


TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("choice", "shown"),
    [("none", 0), ("auto", 2), ("required", 2), ({"type": "function", "function": {"name": "add"}}, 1)],
)
def test_a_choice_of_tools(choice, shown):
    tools = [TOOL, {"type": "function", "function": {"name": "sub"}}]
    assert len(CHAT.read({"messages": QUESTION, "tools": tools, "tool_choice": choice}).tools) == shown


@pytest.mark.parametrize(
    ("dialect", "body", "line"),
    [
        (CHAT, [], "must be a JSON object"),
        (CHAT, {}, "there is no message"),
        (CHAT, {"messages": QUESTION, "images": 1}, "no field 'images'"),
        (CHAT, {"messages": QUESTION, "length_penalty": 2}, "length_penalty=2 is not supported"),
        (CHAT, {"messages": QUESTION, "n": 0}, "n=0 must be an integer of at least 1"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "reads text only"),
        (CHAT, {"messages": [{"role": "critic", "content": "x"}]}, "is no message"),
        (CHAT, {"messages": [{"role": "user", "content": {"a": 1}}]}, "is no message"),
        (CHAT, {"messages": QUESTION, "continue_final_message": True}, "is continued, any other is answered"),
        (CHAT, {"messages": QUESTION, "tools": [TOOL], "tool_choice": {"function": {"name": "sub"}}}, "not among"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "JSON"),
        (CHAT, {"messages": QUESTION, "response_format": {"type": "xml"}}, "text, json_object or json_schema"),
        (CHAT, {"messages": QUESTION, "stop": 3}, "stop=3 must be"),
        (COMPLETIONS, {"prompt": 7}, "give a text, or token ids"),
        (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}, "type 'reasoning'"),
        (ANTHROPIC, {"messages": [{"role": "user"}]}, "lacks what it needs: 'content'"),
        (ANTHROPIC, {"messages": QUESTION, "thinking": {"type": "enabled"}}, "thinking="),
        (ANTHROPIC, {"messages": QUESTION, "n": 2}, "no field 'n'"),
        (TOKENS, {"token_ids": [1], "sampling_params": {"best_of": 4}}, "best_of=4 is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_or_honoured_is_one_line(dialect, body, line):
    with pytest.raises(UserError, match=line) as refused:
        dialect.read(body)
    assert "\n" not in str(refused.value)
    json.dumps(dialect.failure(400, str(refused.value)))


def test_what_only_vllm_takes_goes_to_the_engine_unless_it_changes_nothing():
    """Keys of logit_bias are texts in JSON, and ids for the engine."""
    wanted = {
        "min_tokens": 4,
        "ignore_eos": True,
        "presence_penalty": 0.5,
        "logit_bias": {"7": -1},
        "bad_words": ["no"],
    }
    neutral = {"frequency_penalty": 0.0}
    expected = {"vllm": wanted | {"logit_bias": {7: -1}}}
    assert CHAT.read({"messages": QUESTION, **wanted, **neutral}).settings == expected
    assert TOKENS.read({"token_ids": [1], "sampling_params": wanted | neutral}).settings == expected
    assert COMPLETIONS.read({"prompt": "a", "min_tokens": 0, "ignore_eos": False, "logit_bias": {}}).settings == {}
    with pytest.raises(UserError, match="a session that is trained does not take min_tokens, bad_words: leave it out"):
        check_request(CHAT.read({"messages": QUESTION, "min_tokens": 4, "bad_words": ["no"]}))


def test_the_text_is_cut_at_the_first_stop_text():
    assert cut("a--b\n", ["\n", "--"]) == ("a", "--") and cut("ab", ["c"]) == ("ab", None)
    request = COMPLETIONS.read({"prompt": "ab", "stop": ["--"], "logprobs": 0})
    answer = spoken(request, "xy--")
    assert (answer.message.content, answer.stop, answer.kept, answer.finish) == ("xy", "--", 2, "stop")
    (choice,) = COMPLETIONS.written(request, [answer], "m")["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xy", "stop")
    assert choice["logprobs"] == {
        "tokens": ["x", "y"],
        "token_logprobs": [0.0, -1.0],
        "top_logprobs": [{"x": 0.0}, {"y": -1.0}],
        "text_offset": [0, 1],
    }
    written = ANTHROPIC.written(ANTHROPIC.read({"messages": QUESTION, "stop_sequences": ["--"]}), [answer], "m")
    assert (written["stop_reason"], written["stop_sequence"]) == ("stop_sequence", "--")
    pairs = {1: "xy", 2: "z-", 3: "-!"}  # a token in which the stop text begins or ends
    spelled = lambda ids, skip_special_tokens=False: "".join(pairs[i] for i in ids)  # noqa: E731
    done = Completion((1, 2, 3), (-1.0, -2.0, -3.0), "stop")
    answer = answered(request, (), done, Message("assistant", "xyz--!"), spelled)
    assert (answer.message.content, answer.kept) == ("xyz", 2)
    ids = COMPLETIONS.read({"prompt": "ab", "stop": ["--"], "return_token_ids": True, "logprobs": 0})
    (choice,) = COMPLETIONS.written(ids, [answer], "m")["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == 3  # a trainer gets all that was sampled


def test_alternatives_have_the_temperature_of_the_sample():
    """p is .5, .3, .2 at temperature 1; at 0.5 its squares over .38, whose sum is 1."""
    request = CHAT.read({"messages": QUESTION, "temperature": 0.5, "logprobs": True, "top_logprobs": 2})
    scores = ({}, {98: -1.0}, {120: math.log(0.2), 121: math.log(0.5), 122: math.log(0.3)})
    done = Completion((120,), (math.log(0.04 / 0.38),), "length")
    answer = answered(request, (97, 98), done, Message("assistant", "x"), decode, scores)
    ((text, own, likely),) = answer.tokens(request)
    assert (text, own) == ("x", pytest.approx(math.log(0.04 / 0.38)))
    assert likely == pytest.approx({"y": math.log(0.25 / 0.38), "z": math.log(0.09 / 0.38)})
    (content,) = CHAT.written(request, [answer], "m")["choices"][0]["logprobs"]["content"]
    assert content["bytes"] == [120] and [top["token"] for top in content["top_logprobs"]] == ["y", "z"]


def test_an_echo_has_the_prompts_tokens():
    request = COMPLETIONS.read({"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": 1})
    scores = ({}, {98: -1.0, 99: -0.5})
    answer = spoken(request, "", finish="length", scores=scores)
    (choice,) = COMPLETIONS.written(request, [answer], "m")["choices"]
    assert choice["text"] == "ab" and choice["logprobs"]["token_logprobs"] == [None, -1.0]
    assert choice["logprobs"]["top_logprobs"] == [None, {"c": -0.5, "b": -1.0}]
    request = CHAT.read({"messages": QUESTION, "prompt_logprobs": 1})
    written = CHAT.written(request, [answer], "m")["prompt_logprobs"]
    assert written == [
        None, {"98": {"logprob": -1.0, "decoded_token": "b"}, "99": {"logprob": -0.5, "decoded_token": "c"}}
    ]  # fmt: skip


def test_calls_of_tools_are_written_and_read_again():
    """A client that sends the answer back gives the policy the very call that it wrote."""
    made = ToolCall("add", {"a": 1, "b": "é"})
    request = CHAT.read({"messages": QUESTION, "tools": [TOOL]})
    answer = spoken(request, "<call>", [made])
    choice = CHAT.written(request, [answer], "m")["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (again,) = CHAT.read({"messages": [choice["message"]]}).messages
    assert again.content == "" and (again.tool_calls[0].name, again.tool_calls[0].arguments) == ("add", made.arguments)
    written = ANTHROPIC.written(request, [answer], "m")
    assert written["stop_reason"] == "tool_use" and [block["type"] for block in written["content"]] == ["tool_use"]
    (message,) = ANTHROPIC.read({"messages": [{"role": "assistant", "content": written["content"]}]}).messages
    assert (message.tool_calls[0].arguments, message.tool_calls[0].id[:6]) == (made.arguments, "toolu_")
    output = RESPONSES.written(request, [answer], "m")["output"]
    (message,) = RESPONSES.read({"input": output}).messages
    assert message.tool_calls[0].arguments == made.arguments and message.tool_calls[0].id == output[0]["call_id"]


def test_usage_counts_a_prompt_once():
    request = CHAT.read({"messages": QUESTION, "n": 2})
    usage = CHAT.written(request, [spoken(request, "xyz"), spoken(request, "x")], "m")["usage"]
    assert usage == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    written = RESPONSES.written(RESPONSES.read({"input": "x"}), [spoken(request, "xyz", finish="length")], "m")
    assert (written["status"], written["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert written["usage"]["total_tokens"] == 5


def test_a_stream_comes_in_pieces_that_make_the_answer():
    texts = ["one  two\nthree ", "", " ", "x" * 40, "a\n\n\nb"]
    assert [words_of(text) for text in texts[:3]] == [["one", "  two", "\nthree "], [""], [" "]]
    for text in texts:
        assert "".join(words_of(text)) == text
        request = CHAT.read({"messages": QUESTION, "stream": True, "logprobs": True, "prompt_logprobs": 0})
        *told, end = (data for _, data in CHAT.events(CHAT.written(request, [spoken(request, text)], "m")))
        deltas = [data["choices"][0]["delta"] for data in told]
        assert "".join(delta["content"] for delta in deltas) == text and len(deltas) == len(words_of(text))
        assert ["role" in delta for delta in deltas] == [data["choices"][0]["logprobs"] is not None for data in told]
        assert ["prompt_logprobs" in data for data in (*told, end)] == [True, *[False] * len(told)]
        assert {data["choices"][0]["finish_reason"] for data in told} == {None} and end["choices"][0]["finish_reason"]
        request = COMPLETIONS.read({"prompt": "ab", "stream": True, "n": 2})
        choices = [
            data["choices"][0]
            for _, data in COMPLETIONS.events(COMPLETIONS.written(request, [spoken(request, text)] * 2, "m"))
        ]
        for index in (0, 1):
            mine = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in mine) == text
            assert [choice["finish_reason"] is None for choice in mine] == [True] * (len(mine) - 1) + [False]
        blocks = ANTHROPIC.events(ANTHROPIC.written(request, [spoken(request, text)], "m"))
        said_in = [data["delta"]["text"] for name, data in blocks if name == "content_block_delta"]
        told = RESPONSES.events(RESPONSES.written(RESPONSES.read({"input": "x"}), [spoken(request, text)], "m"))
        assert "".join(said_in) == text == "".join(data["delta"] for name, data in told if name.endswith("text.delta"))


def test_streams_tell_the_whole_answer():
    request = CHAT.read({"messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}})
    answer = spoken(request, "xyz", [ToolCall("add", {"a": 1})])
    first, end, usage = (data for _, data in CHAT.events(CHAT.written(request, [answer], "m")))
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0 and first["object"] == "chat.completion.chunk"
    assert (end["choices"][0]["finish_reason"], usage["choices"], usage["usage"]["total_tokens"]) == (
        "tool_calls",
        [],
        5,
    )
    quiet = CHAT.read({"messages": QUESTION, "stream": True})
    lines = [*sse(CHAT, CHAT.written(quiet, [spoken(quiet, "x")], "m"))]
    assert len(lines) == 3 and lines[-1] == "data: [DONE]\n\n"
    events = [*ANTHROPIC.events(ANTHROPIC.written(request, [answer], "m"))]
    assert [name for name, _ in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"
    ]  # fmt: skip
    assert json.loads(events[2][1]["delta"]["partial_json"]) == {"a": 1}
    events = [*RESPONSES.events(RESPONSES.written(request, [spoken(request, "xyz")], "m"))]
    assert [data["sequence_number"] for _, data in events] == [*range(9)] and events[-1][0] == "response.completed"
    assert [data["delta"] for name, data in events if name.endswith("delta")] == ["xyz"]
    lines = [*sse(RESPONSES, events[-1][1]["response"])]
    assert lines[0].startswith("event: response.created\ndata: {") and "[DONE]" not in lines[-1]
