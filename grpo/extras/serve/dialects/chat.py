"""OpenAI's chat completions, with vLLM's additions."""

from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import Any

from grpo.env.messages import ToolCall, tool_of
from grpo.extras.serve.dialects import writing
from grpo.extras.serve.dialects.request import Answer, CompletionRequest, Dialect, Fields, offered_tools
from grpo.extras.tools.conversations import chat_message, messages_of
from grpo.system.errors import UserError
from grpo.system.ranges import Whole


def read_chat(fields: Fields) -> CompletionRequest:
    """Read a request. A conversation that ends with the assistant's message is continued, as `continue_final_message` asks."""
    messages = messages_of([chat_message(message) for message in fields.take("messages", list, [])])
    tools = map(tool_of, fields.take("tools", list, []))
    continued = messages[-1].role == "assistant"
    for name, wanted in (("continue_final_message", continued), ("add_generation_prompt", not continued)):
        if fields.take(name, bool, wanted) != wanted:
            raise UserError(f"{name}={not wanted}: a last message of the assistant is continued, any other is answered")
    wants, top = fields.take("logprobs", bool, False), fields.take("top_logprobs", Whole, 0)
    return CompletionRequest(
        messages,
        offered_tools(tools, fields.pop("tool_choice", None)),
        template=fields.take("chat_template_kwargs", dict, {}),
        logprobs=top if wants else None,
        **fields.sampling("stop", "max_completion_tokens", "max_tokens"),
        **fields.vllm(),
    )


def written_message(answer: Answer) -> dict[str, Any]:
    """Return the policy's message in OpenAI's form."""
    written: dict[str, Any] = {"role": "assistant", "content": answer.message.content}
    if tool_calls := answer.message.tool_calls:
        written |= {
            "content": written["content"] or None,
            "tool_calls": [written_call(tool_call) for tool_call in tool_calls],
        }
    return written


def written_call(call: ToolCall) -> dict[str, Any]:
    """Return a call in OpenAI's form."""
    function = {"name": call.name, "arguments": writing.arguments_of(call.arguments)}
    return {"id": call.id or writing.new_id("call_"), "type": "function", "function": function}


def chat_written(request: CompletionRequest, answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """Return the answers as OpenAI's chat completion."""
    choices = [
        {"message": written_message(answer), "logprobs": chat_logprobs(request, answer)}
        | ({"token_ids": answer.completion.ids} if request.with_ids else {})
        for answer in answers
    ]
    written = writing.openai_answer("chat.completion", request, answers, model, choices)
    if request.with_ids:
        written["prompt_token_ids"] = answers[0].prompt_ids
    return written | writing.prompt_scores(request, answers[0])


def chat_logprobs(request: CompletionRequest, answer: Answer) -> dict[str, Any] | None:
    """Return the log-probability of each token, with its alternatives; None if they are not wanted."""
    if request.logprobs is None:
        return None

    def entry(text: str, value: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    content = []
    for text, value, alternatives in answer.tokens(request):
        content.append(entry(text, value) | {"top_logprobs": [*starmap(entry, alternatives.items())]})
    return {"content": content}


def chat_events(answer: dict[str, Any]) -> Iterator[tuple[None, dict[str, Any]]]:
    """Yield the text of each choice in pieces and its end, and then the usage, if it is wanted. The first piece has the
    log-probabilities of all, the last one the calls."""
    piece = {**answer, "object": "chat.completion.chunk", "usage": None}
    for choice in answer["choices"]:
        message = dict(choice["message"])
        called = [{"index": i, **call} for i, call in enumerate(message.pop("tool_calls", []))]
        begun = {name: value for name, value in choice.items() if name != "message"}
        further = {"index": choice["index"], "logprobs": None}
        parts = writing.words_of(message["content"] or "")
        for i, part in enumerate(parts):
            first, last = i == 0, i == len(parts) - 1
            delta = {**message, "content": part or message["content"]} if first else {"content": part}
            if called and last:
                delta["tool_calls"] = called
            yield None, {**piece, "choices": [(begun if first else further) | {"delta": delta, "finish_reason": None}]}
            piece = {name: value for name, value in piece.items() if not name.startswith("prompt_")}  # once is enough
        end = further | {"delta": {}, "finish_reason": choice["finish_reason"]}
        yield None, {**piece, "choices": [end]}
    if "usage" in answer:
        yield None, {**piece, "choices": [], "usage": answer["usage"]}


CHAT = Dialect(read_chat, chat_written, chat_events, writing.openai_failure)
