"""vLLM's route from token ids to token ids, /inference/v1/generate, which clients of reinforcement learning use."""

from collections.abc import Iterator, Sequence
from typing import Any

from grpo.extras.serve.dialects import writing
from grpo.extras.serve.dialects.chat import chat_logprobs
from grpo.extras.serve.dialects.completions import prompt_of
from grpo.extras.serve.dialects.request import Answer, CompletionRequest, Dialect, Fields
from grpo.system.ranges import Whole


def read_tokens(fields: Fields) -> CompletionRequest:
    """Read a request: token_ids, and sampling_params with vLLM's names."""
    params = Fields(fields.take("sampling_params", dict, {}))
    params |= {"stream": fields.take("stream", bool, False)}
    params |= dict.fromkeys(["return_token_ids", "return_tokens_as_token_ids"], True)
    prompt, logprobs = prompt_of(fields.pop("token_ids", None)), params.take("logprobs", Whole)
    request = CompletionRequest(prompts=(prompt,), logprobs=logprobs, **params.sampling(), **params.vllm())
    params.check_empty()
    return request


def tokens_written(request: CompletionRequest, answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """Return the answers as vLLM's token ids."""
    choices = []
    for i, answer in enumerate(answers):
        done = answer.completion
        choice = {"index": i, "token_ids": done.ids, "finish_reason": done.finish}
        choices.append(choice | {"logprobs": chat_logprobs(request, answer)})
    return {"request_id": writing.new_id("generate-"), "choices": choices} | writing.prompt_scores(request, answers[0])


def tokens_events(answer: dict[str, Any]) -> Iterator[tuple[None, dict[str, Any]]]:
    """Yield one piece of each choice."""
    for choice in answer["choices"]:
        yield None, {**answer, "choices": [choice]}


TOKENS = Dialect(read_tokens, tokens_written, tokens_events, writing.openai_failure)
