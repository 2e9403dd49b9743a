"""The official clients of OpenAI and Anthropic against a real server with the demo's model that calls tools."""

import json
from collections.abc import Iterator

import pytest
from conftest import ROOT
from helpers.serving import Client, served

from grpo.engines.builtin.engine import TransformersEngine
from tasks.calculator import calculator

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

QUESTION = {"role": "user", "content": "Sam has 214 coins. Sam buys 13 bags of 42 coins. How many coins does Sam have?"}
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Computes.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", "strict": False, **FUNCTION}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "120 + 45"}'},
}
ANSWERED = [
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "165"},
]
JSON = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "object"}}}

CHAT = {  # what is asked beside the question
    "plain": {},
    "a system message": {"messages": [{"role": "system", "content": "Be short."}, QUESTION]},
    "a developer message": {"messages": [{"role": "developer", "content": "Be short."}, QUESTION]},
    "content in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]}]},
    "several turns": {"messages": [QUESTION, {"role": "assistant", "content": "165"}, QUESTION]},
    "a name": {"messages": [QUESTION | {"name": "ann"}]},
    "temperature and top_p": {"temperature": 0.3, "top_p": 0.9},
    "a seed": {"seed": 3},
    "n": {"n": 3},
    "max_completion_tokens": {"max_completion_tokens": 4},
    "both limits": {"max_completion_tokens": 4, "max_tokens": 9},
    "a stop text": {"stop": " "},
    "stop texts": {"stop": [" ", "\n", "</s>"]},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 5},
    "top_logprobs 0": {"logprobs": True, "top_logprobs": 0},
    "a stream": {"stream": True},
    "a stream with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "a stream of two": {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 2},
    "tools": {"tools": [TOOL]},
    "tools in a stream": {"tools": [TOOL], "stream": True},
    "tool_choice none": {"tools": [TOOL], "tool_choice": "none"},
    "tool_choice required": {"tools": [TOOL], "tool_choice": "required"},
    "a named tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "calculator"}}},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
    "an answer of a tool": {"messages": ANSWERED, "tools": [TOOL]},
    "response_format text": {"response_format": {"type": "text"}},
    "response_format json_schema": {"response_format": JSON},
    "penalties of 0": {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}},
    "metadata": {"metadata": {"run": "1"}, "store": False, "user": "ann", "service_tier": "auto"},
    "a cache's key": {"prompt_cache_key": "k", "safety_identifier": "s"},
    "token ids": {"extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True}, "logprobs": True},
    "vLLM's settings": {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [3]}},
    "chat_template_kwargs": {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    "a prefill": {
        "messages": [QUESTION, {"role": "assistant", "content": "She"}],
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
    },
    "prompt_logprobs": {"extra_body": {"prompt_logprobs": 1}},
}
COMPLETIONS = {
    "a text": {"prompt": "1 + 2"},
    "texts": {"prompt": ["1 + 2", "3"]},
    "ids": {"prompt": [5, 6, 7]},
    "rows of ids": {"prompt": [[5, 6], [7]], "n": 2, "best_of": 1},
    "stop and suffix": {"prompt": "1 + 2", "stop": ["\n"], "suffix": None},
    "logprobs": {"prompt": "1 + 2", "logprobs": 5},
    "an echo": {"prompt": "1 + 2", "echo": True, "max_tokens": 0, "logprobs": 1},
    "a stream": {"prompt": "1 + 2", "stream": True},
}
RESPONSES = {
    "a text": {"input": "1 + 2?"},
    "messages": {"input": [QUESTION], "instructions": "Be short.", "text": {"format": {"type": "text"}}},
    "tools": {"input": [QUESTION], "tools": [FLAT], "store": False, "include": [], "truncation": "disabled"},
    "a stream": {"input": "1 + 2?", "stream": True},
}
KINDS = [
    *[("chat.completions", {"messages": [QUESTION]} | more, f"chat: {name}") for name, more in CHAT.items()],
    *[("completions", more, f"completions: {name}") for name, more in COMPLETIONS.items()],
    *[("responses", more, f"responses: {name}") for name, more in RESPONSES.items()],
]  # with the two of models, fifty
GUIDED = "chat: response_format json_schema"  # the built-in engine cannot; vLLM's can


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    with served(
        ROOT / "grpo" / "extras" / "demo" / "demo_models" / "calculator", TransformersEngine, "secret"
    ) as client:
        client.ready()
        yield client


@pytest.fixture(scope="module")
def official(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


@pytest.fixture(scope="module")
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)


def asked(client, api: str, more: dict):
    for part in api.split("."):
        client = getattr(client, part)
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    settings = {"model": "tiny", **({} if {"max_tokens", "max_completion_tokens"} & set(more) else {limit: 16}), **more}
    answer = client.create(**settings)
    return list(answer) if more.get("stream") else answer


@pytest.mark.parametrize(("api", "more", "kind"), KINDS, ids=[kind for *_, kind in KINDS])
def test_a_kind_of_call_of_openais_client(official, api, more, kind):
    if kind == GUIDED:
        with pytest.raises(openai.BadRequestError, match="set engine=vllm"):
            asked(official, api, more)
        return
    answer = asked(official, api, more)
    if more.get("stream") and api == "responses":
        assert answer[0].type == "response.created" and answer[-1].response.output_text == "".join(
            piece.delta for piece in answer if piece.type == "response.output_text.delta"
        )
        assert answer[-1].response.usage.output_tokens > 0
    elif more.get("stream"):
        ends = [choice.finish_reason for piece in answer for choice in piece.choices if choice.finish_reason]
        assert len(ends) == more.get("n", 1) and set(ends) <= {"stop", "length", "tool_calls"}
        assert (answer[-1].usage is not None) == ("stream_options" in more)
    elif api == "responses":
        assert answer.usage.output_tokens <= 16 and answer.output and answer.status in ("completed", "incomplete")
    else:
        prompts = len(more["prompt"]) if isinstance(more.get("prompt", ""), list) and more["prompt"] != [5, 6, 7] else 1
        assert len(answer.choices) == prompts * more.get("n", 1)
        assert answer.usage.completion_tokens <= 16 * len(answer.choices)
        for text in more.get("stop") or ():
            assert text not in (answer.choices[0].message.content if api[:4] == "chat" else answer.choices[0].text)


def test_there_are_fifty_kinds_and_49_are_answered(official):
    assert len(KINDS) + 2 == 50
    (model,) = official.models.list().data
    assert official.models.retrieve(model.id).max_model_len == model.max_model_len > 100
    assert model.id == "calculator" and official.models.retrieve("gpt-9").root == model.root  # any name, as in requests


def test_an_agent_on_openais_client_calls_a_tool(official):
    """The model often answers without the tool, so the first of 16 samples that calls it goes on. The loop is any agent's."""
    messages, expressions = [QUESTION], []
    settings = {"model": "m", "tools": [TOOL], "max_tokens": 48, "seed": 1}
    for turn in range(6):
        answer = official.chat.completions.create(messages=messages, n=1 if turn else 16, **settings)
        choice = next((one for one in answer.choices if one.message.tool_calls), answer.choices[0])
        messages.append(choice.message.model_dump(exclude_none=True))
        assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)
        if not choice.message.tool_calls:
            break
        for call in choice.message.tool_calls:
            expressions.append(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculator(expressions[-1])})
    assert expressions and choice.message.content


def test_openais_errors_are_our_lines(official, server):
    with pytest.raises(openai.BadRequestError, match="reads text only"):
        asked(official, "chat.completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    with pytest.raises(openai.AuthenticationError, match="needs its api_key"):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_the_main_calls_of_anthropics_client(claude, server):
    plain = {"model": "m", "max_tokens": 48, "messages": [QUESTION], "system": "Be short."}
    plain |= {"extra_body": {"temperature": 0}}
    tool = {"name": "calculator", "description": "Computes.", "input_schema": SCHEMA}
    answer = claude.messages.create(**plain)
    assert answer.content[0].text and answer.stop_reason in ("end_turn", "max_tokens")
    assert claude.messages.count_tokens(model="m", messages=[QUESTION], system="Be short.").input_tokens == (
        answer.usage.input_tokens
    )
    text = answer.content[0].text
    stopped = claude.messages.create(**plain, stop_sequences=[text[3:5]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:5])
    assert stopped.content[0].text == text[: text.index(text[3:5])]
    with claude.messages.stream(**plain) as stream:
        assert "".join(stream.text_stream) == text and stream.get_final_message().usage == answer.usage
    for seed in range(32):
        drawn = plain | {"system": anthropic.omit, "extra_body": {"seed": seed}}
        answer = claude.messages.create(**drawn, tools=[tool], tool_choice={"type": "auto"})
        if answer.stop_reason == "tool_use":
            break
    (used,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and isinstance(used.input, dict)
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "165"}
    turns = [QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    with claude.messages.stream(**plain | {"system": anthropic.omit, "messages": turns}, tools=[tool]) as stream:
        assert stream.get_final_message().content
    with pytest.raises(anthropic.BadRequestError, match="thinking="):
        claude.messages.create(**plain, thinking={"type": "enabled", "budget_tokens": 1024})
    with pytest.raises(anthropic.AuthenticationError, match="needs its api_key"):
        anthropic.Anthropic(base_url=server.url, api_key="no", max_retries=0).messages.create(**plain)
