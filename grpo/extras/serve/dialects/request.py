"""A request for messages of the policy and its answer, in no API's form, and what reads the one and writes the other. No HTTP, no
engine.

`Dialect.read` makes a `CompletionRequest` of a request's JSON. Whoever answers it renders the messages, samples, and gives each
completion to `answered`. `Dialect.written` makes the JSON of the answers, and `writing.sse` a stream of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from grpo.engines.only_vllm import PARAMETERS
from grpo.env.messages import Message, ToolSpec, cut, shown
from grpo.env.tokens import Completion
from grpo.extras.tools.tool_parsers import Malformed
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Positive, Whole, require

Prompt = str | tuple[int, ...]
Scores = Mapping[int, float]  # log-probabilities by ids: of a token (first), and of the likeliest ones in its place

# named as in Sampling
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_ids", "guided")
SAME = {"stop_token_ids": "stop_ids", "structured_outputs": "guided"}  # other names of settings
REGEX = ("structured_outputs_regex", "guided_decoding_regex")  # TRL's names
IGNORED = {  # fields that change no answer, or ask for what a server may leave out
    "model", "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "safety_identifier", "cache_control", "include", "max_tool_calls", "request_id", "priority",
    "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind",
}  # fmt: skip
NEUTRAL: dict[str, Any] = {  # field -> the only value that is accepted
    "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "suffix": "", "modalities": ["text"],
    "min_tokens": 0, "ignore_eos": False, "use_beam_search": False, "length_penalty": 1, "bad_words": [],
    "include_stop_str_in_output": False, "generation_kwargs": {}, "functions": [], "function_call": "none",
    "background": False, "truncation": "disabled", "reasoning": {}, "thinking": {"type": "disabled"},
}  # fmt: skip


@dataclass(frozen=True)
class CompletionRequest:
    """A request for messages of the policy.

    messages, tools: the conversation, and the tools that the policy may call. prompts: raw prompts in place of messages.
    stop: texts before which an answer ends. max_tokens: of an answer; None if none was given. n: answers to each prompt.
    stream: the answer is sent as server-sent events.
    settings: sampling settings by the names of `Sampling`, which checks them. template: variables of the chat template.
    logprobs: how many alternatives are written with the log-probability of a token; None: no log-probabilities.
    prompt_logprobs: the same of the prompt's tokens. prompt_temperature: at which they are computed; vLLM's
    is 1. echo: the answer's text begins with the prompt.
    with_ids: write token ids. ids_as_tokens: write tokens as token_id:ID. usage: a stream ends with the numbers of tokens.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_temperature: float = 1.0
    echo: bool = False
    with_ids: bool = False
    ids_as_tokens: bool = False
    usage: bool = False

    @property
    def prompt(self) -> Prompt | None:
        """The first raw prompt; None if there are messages."""
        return self.prompts[0] if self.prompts else None

    @property
    def count(self) -> int:
        """The number of answers: n for each prompt."""
        return self.n * max(1, len(self.prompts))

    @property
    def alternatives(self) -> int:
        """The largest number of alternatives that the answer gives for a token."""
        return max(self.logprobs or 0, self.prompt_logprobs or 0)


@dataclass(frozen=True)
class Answer:
    """One answer to a `CompletionRequest`; see `answered`.

    message: the policy's, cut before the stop text. completion: all that was sampled. prompt_ids: the prompt, as the policy read
    it. decode: from ids to text, special tokens included; None: tokens are written as token_id:ID.
    stop: the stop text that ended it. kept: the number of tokens that begin before that text; None: all.
    scores: of each token of the prompt and of the completion, if the engine gave them; that of the first token is empty.
    """

    message: Message
    completion: Completion
    prompt_ids: tuple[int, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    stop: str | None = None
    kept: int | None = None
    scores: tuple[Scores, ...] = ()

    @property
    def finish(self) -> str:
        """OpenAI's word for the reason why it ended: `stop`, `length` or `tool_calls`."""
        return "tool_calls" if self.message.tool_calls else self.completion.finish

    def tokens(self, request: CompletionRequest) -> list[tuple[str, float | None, dict[str, float]]]:
        """Return text, log-probability and alternatives (texts, likeliest first) of each token that the client sees.

        With `request.with_ids` these are all sampled tokens, else those before the stop text. Log-probabilities are those of the
        completion's temperature T; the alternatives' are exact too, since log p(v) - log p(w) is linear in 1 / T.
        """
        done, temperature = self.completion, request.settings.get("temperature", 1.0) or 1.0
        kept = len(done.ids) if request.with_ids or self.kept is None else self.kept
        scores = self.scores[len(self.prompt_ids) :] or [{i: p} for i, p in zip(done.ids, done.logprobs, strict=True)]
        tokens = []
        if request.echo:
            for token, likely in zip(self.prompt_ids, self.scores, strict=False):
                tokens.append(self.token(request, token, likely.get(token), likely, 1.0))
        for token, logprob, likely in zip(done.ids[:kept], done.logprobs, scores, strict=False):
            tokens.append(self.token(request, token, logprob, likely, temperature))
        return tokens

    def token(
        self, request: CompletionRequest, token: int, logprob: float | None, likely: Scores, temperature: float
    ) -> tuple[str, float | None, dict[str, float]]:
        """Return text, log-probability and alternatives of one token. likely: at temperature 1, `token` first."""
        best = sorted(likely.items(), key=lambda item: -item[1])[: request.logprobs or 0]
        alternatives = {self.piece(i, request): logprob + (value - likely[token]) / temperature for i, value in best}
        return self.piece(token, request), logprob, alternatives

    def piece(self, token: int, request: CompletionRequest) -> str:
        """Return the text of one token."""
        return f"token_id:{token}" if request.ids_as_tokens or self.decode is None else self.decode([token])


class Fields(dict[str, Any]):
    """The fields of a request that may change its answer. Readers take those that they know; `check_empty` refuses the others."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise UserError("the request must be a JSON object, sent as Content-Type: application/json")
        super().__init__({name: value for name, value in body.items() if value is not None and name not in IGNORED})

    def take(self, name: str, kind: Any, default: Any = None) -> Any:
        """Remove a field and return its value, or the default. Raises UserError if the value does not fit its annotation."""
        if name in self:
            require(name, self[name], kind)
        return self.pop(name, default)

    def sampling(self, stop: str = "stop", *max_tokens: str) -> dict[str, Any]:
        """Remove the fields of sampling, and return them as arguments of the request. stop, max_tokens: the API's names."""
        texts = self.take(stop, str | list[str], [])
        texts = [texts] if isinstance(texts, str) else texts
        texts = tuple(text.encode(errors="replace").decode() for text in texts)
        if len(texts) > 64 or any(len(text) > 1000 for text in texts):
            raise UserError("there are at most 64 stop texts, each of at most 1000 characters")
        limits = [self.take(name, Whole) for name in max_tokens or ("max_tokens",)]
        settings = {SAME.get(name, name): self.pop(name) for name in (*SETTINGS, *SAME) if name in self}
        for name in self.keys() & set(REGEX):
            settings["guided"] = {"regex": self.pop(name)}
        settings |= {"top_k": 0} if settings.get("top_k") == -1 else {}
        vllm = {name: self.pop(name) for name in PARAMETERS if name in self and self[name] != NEUTRAL[name]}
        if isinstance(bias := vllm.get("logit_bias"), dict):  # a JSON object has texts as keys
            vllm["logit_bias"] = {int(key) if key.isdecimal() else key: value for key, value in bias.items()}
        settings |= {"vllm": vllm} if vllm else {}
        return {
            "stop": tuple(filter(None, texts)),
            "max_tokens": next((limit for limit in limits if limit is not None), None),
            "seed": self.take("seed", Whole),
            "settings": settings | guided_by(self.take("response_format", dict, {"type": "text"})),
            "stream": self.take("stream", bool, False),
        }

    def vllm(self) -> dict[str, Any]:
        """Remove the fields that only OpenAI's older APIs and vLLM have, and return them as arguments of `CompletionRequest`."""
        return {
            "n": self.take("n", Count, 1),
            "with_ids": self.take("return_token_ids", bool, False),
            "ids_as_tokens": self.take("return_tokens_as_token_ids", bool, False),
            "prompt_logprobs": self.take("prompt_logprobs", Whole),
            "prompt_temperature": self.take("prompt_temperature", Positive, 1.0),
            "usage": self.take("stream_options", dict, {}).get("include_usage", False),
        }

    def check_empty(self) -> None:
        """Raise UserError if a field is left that would change the answer."""
        for name, value in self.items():
            if name not in NEUTRAL:
                raise UserError(f"there is no field {name!r} here: leave it out")
            if value != NEUTRAL[name]:
                raise UserError(f"{name}={shown(value)} is not supported: leave it out")


@dataclass(frozen=True)
class Dialect:
    """An API: reads requests, writes answers, streams and errors.

    reader: makes a CompletionRequest of a request's fields, of which it removes those that it knows.
    written(request, answers, model): the JSON of the answers, n for each prompt.
    events(answer): the name, if the API has names, and the data of each server-sent event that tells this JSON.
    failure(status, line): the JSON of an error.
    """

    reader: Callable[[Fields], CompletionRequest]
    written: Callable[[CompletionRequest, Sequence[Answer], str], dict[str, Any]]
    events: Callable[[dict[str, Any]], Iterator[tuple[str | None, dict[str, Any]]]]
    failure: Callable[[int, str], dict[str, Any]]

    def read(self, body: Any) -> CompletionRequest:
        """Return the request in no API's form. Raises UserError, in one line, for what cannot be read or honoured."""
        fields = Fields(body)
        try:
            request = self.reader(fields)
            fields.check_empty()
        except (TypeError, Malformed) as error:
            raise UserError(str(error)) from error
        except (LookupError, AttributeError) as error:
            raise UserError(f"a part of the request lacks what it needs: {error}") from error
        return request


def guided_by(response_format: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting `guided`, if any, of a response_format: text, json_object or json_schema."""
    kind = response_format.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise UserError(f"response_format={shown(response_format)}: its type is text, json_object or json_schema")
    schema = response_format.get("json_schema", response_format).get("schema") or {"type": "object"}
    if kind == "text":
        return {}
    return {"guided": {"json": {"type": "object"} if kind == "json_object" else schema}}


def offered_tools(tools: Iterable[ToolSpec], choice: Any) -> tuple[ToolSpec, ...]:
    """Return the tools that the policy sees: none for `none`, the named one for a name, else all. No call is forced."""
    word = choice.get("type") if isinstance(choice, Mapping) else choice
    name = isinstance(choice, Mapping) and (choice.get("name") or choice.get("function", {}).get("name"))
    if word not in (None, "none", "auto", "required", "any", "function", "tool"):
        raise UserError(f"tool_choice={shown(choice)} is not one of none, auto, required, or a tool of the request")
    offered = () if word == "none" else tuple(tool for tool in tools if not name or tool.name == name)
    if name and not offered:
        raise UserError(f"tool_choice names {shown(name)}, which is not among the tools")
    return offered


def answered(
    request: CompletionRequest,
    prompt_ids: Sequence[int],
    completion: Completion,
    message: Message,
    decode: Callable[..., str],
    scores: Sequence[Scores] = (),
) -> Answer:
    """Return the answer that a completion is. message: parsed from all of it. decode: a tokenizer's."""
    message, stop = message.before(request.stop)
    kept, ids, read = len(completion.ids), completion.ids, partial(decode, skip_special_tokens=True)
    place = len(cut(read(ids), request.stop)[0]) if stop else 0
    while stop and kept and len(read(ids[: kept - 1])) >= place:
        kept -= 1
    return Answer(written_to(request, message), completion, tuple(prompt_ids), decode, stop, kept, tuple(scores))


def written_to(request: CompletionRequest, message: Message) -> Message:
    """Return the policy's message for a client: without what its own prompt, or message of the policy that is continued, has of a
    thought that is open there."""
    continued = request.prompts or request.messages[-1].role == "assistant"
    return replace(message, content=message.sampled, given="") if continued else message
