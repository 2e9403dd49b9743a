"""OpenAI's text completions, with vLLM's additions: prompts are texts or token ids."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from grpo.env.messages import shown
from grpo.extras.serve.dialects import writing
from grpo.extras.serve.dialects.request import Answer, CompletionRequest, Dialect, Fields, Prompt
from grpo.system.errors import UserError
from grpo.system.ranges import Whole


def read_completions(fields: Fields) -> CompletionRequest:
    """Read a request. The prompt is a text, token ids, or a list of either."""
    prompt = fields.pop("prompt", None)
    several = isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt)
    return CompletionRequest(
        prompts=tuple(map(prompt_of, prompt if several else [prompt])),
        logprobs=fields.take("logprobs", Whole),
        echo=fields.take("echo", bool, False),
        **fields.sampling(),
        **fields.vllm(),
    )


def prompt_of(prompt: Any) -> Prompt:
    """Return a prompt: a text, token ids, or vLLM's form of either. Ids are not checked."""
    if isinstance(prompt, dict) and len(prompt) == 1:
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if not isinstance(prompt, str | list | tuple):
        raise UserError(f'prompt={shown(prompt)}: give a text, or token ids as {{"prompt_token_ids": [1, 2]}}')
    return prompt if isinstance(prompt, str) else tuple(prompt)


def completions_written(request: CompletionRequest, answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """Return the answers as OpenAI's text completion."""
    choices = []
    for answer in answers:
        text = answer.decode(answer.prompt_ids) if request.echo and answer.decode else ""
        choice = {"text": text + answer.message.content, "logprobs": None} | writing.prompt_scores(request, answer)
        if request.logprobs is not None:
            tokens = answer.tokens(request)
            texts = [piece for piece, _, _ in tokens]
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": [value for _, value, _ in tokens],
                "top_logprobs": [None if value is None else {**top, piece: value} for piece, value, top in tokens],
                "text_offset": list(accumulate(map(len, texts), initial=0))[:-1],
            }
        if request.with_ids:
            choice |= {"token_ids": answer.completion.ids, "prompt_token_ids": answer.prompt_ids}
        choices.append(choice)
    return writing.openai_answer("text_completion", request, answers, model, choices)


def completions_events(answer: dict[str, Any]) -> Iterator[tuple[None, dict[str, Any]]]:
    """Yield the text of each choice in pieces, and then the usage, if it is wanted. The first piece has the log-probabilities of
    all, the last one the reason of the end."""
    for choice in answer["choices"]:
        *before, last = writing.words_of(choice["text"])
        rest = choice
        for part in before:
            yield None, {**answer, "usage": None, "choices": [rest | {"text": part, "finish_reason": None}]}
            rest = {"index": choice["index"], "logprobs": None, "finish_reason": choice["finish_reason"]}
        yield None, {**answer, "usage": None, "choices": [rest | {"text": last}]}
    if "usage" in answer:
        yield None, {**answer, "choices": []}


COMPLETIONS = Dialect(read_completions, completions_written, completions_events, writing.openai_failure)
