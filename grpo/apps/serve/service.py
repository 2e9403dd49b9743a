"""Checks and answers requests: from text or messages to token ids, through the engine, and back."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, Field, model_validator
from transformers import PreTrainedTokenizerBase

from grpo.apps.serve.batching import Batching, Unavailable
from grpo.apps.serve.limits import Crowded, RequestLimits
from grpo.apps.serve.metrics import ServeMetrics
from grpo.apps.serve.served_weights import ServedWeights
from grpo.engines.protocol import Sampling
from grpo.env.messages import message_of, shown
from grpo.env.renderer import Renderer
from grpo.env.tokens import Completion
from grpo.system.errors import UserError
from grpo.system.seeds import derive_seed

T = TypeVar("T")
REFUSED = {  # field -> the only value that is accepted, and the reason
    "stream": (False, "streaming is not supported"),
    "stop": ([], "stop texts are not supported: give stop_token_ids"),
    "prompt_logprobs": (None, "engines return log-probabilities of sampled tokens only, not of the prompt"),
    "presence_penalty": (0, "use repetition_penalty instead"),
    "frequency_penalty": (0, "use repetition_penalty instead"),
    "generation_kwargs": ({}, "give its entries beside the other fields"),
}

REGEX = ("structured_outputs_regex", "guided_decoding_regex")  # TRL's names


class Asked(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """The sampling settings of a request: `Sampling` with the field names of vLLM and OpenAI. A null field has its default.

    n: samples of each prompt.
    top_k: -1 and 0 disable it.
    seed: sample i uses a seed made from (seed, i); without a seed each sample gets a random one.
    logprobs: 0 or 1, because only the sampled token's log-probability is known.
    """

    n: int = Field(1, ge=1)
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = Field([], max_length=1000, validation_alias=AliasChoices("stop_token_ids", "stop_ids"))
    guided: dict[str, Any] | None = Field(None, validation_alias=AliasChoices("guided", "structured_outputs", *REGEX))
    seed: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=1)
    model: str | None = None  # ignored: the server has one model
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def without_what_changes_nothing(cls, given: Any) -> Any:
        """Remove null fields and the fields of REFUSED. Raises UserError if one of these has another value."""
        if not isinstance(given, dict):
            raise UserError("the request must be a JSON object, sent as Content-Type: application/json")
        for name, (neutral, why) in REFUSED.items():
            if given.get(name) not in (None, neutral):
                raise UserError(f"{name}={shown(given[name])}: {why}")
        given = {name: {"regex": value} if name in REGEX and value else value for name, value in given.items()}
        return {name: value for name, value in given.items() if value is not None and name not in REFUSED}

    def sampling(self) -> Sampling:
        """Return the settings in the form of the engines."""
        given = self.model_dump(include={one.name for one in fields(Sampling)})
        given["top_k"] = 0 if self.top_k == -1 else self.top_k
        return Sampling(**given, stop_ids=tuple(self.stop_token_ids))

    def seeds(self, count: int) -> list[int]:
        """Return a seed for each of `count` samples."""
        if self.seed is None:
            return [secrets.randbits(63) for _ in range(count)]
        return [derive_seed(self.seed, i) for i in range(count)]


@dataclass(eq=False)
class Service:
    """Tokenizes requests, samples, and decodes the answers. Mutable: it counts the requests.

    The tokenizer has a thread of its own, since it is slow and not thread-safe; the engine has the thread of `batching`.
    """

    batching: Batching
    weights: ServedWeights
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    vocabulary: int
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        self.metrics = ServeMetrics(self.batching)
        self._places = asyncio.Semaphore(self.limits.queue)
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")

    async def place(self) -> AsyncIterator[None]:
        """Hold a place in the queue while a request is answered. Raises Crowded if none is free."""
        if self._places.locked():
            raise Crowded(f"limits.queue={self.limits.queue} requests are being answered: try again later")
        async with self._places:
            yield

    async def apart(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the tokenizer's thread, while the event loop answers other requests."""
        return await asyncio.wrap_future(self._tokenizing.submit(function, *arguments))

    async def read(self, function: Callable[[Any], tuple], given: Sequence[Any], asked: Asked) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt. function: `chat_ids` or `prompt_ids`. Raises what it raises, and Oversized."""
        self.limits.check("samples", len(given) * asked.n, "samples (prompts times n)")
        return await self.apart(lambda: [function(prompt) for prompt in given])

    def chat_ids(self, messages: Any) -> tuple[int, ...]:
        """Return the token ids of a conversation, rendered with the chat template. Raises UserError if it is not one."""
        if not isinstance(messages, list) or not messages:
            raise UserError(
                f'{shown(messages)} is not a conversation: give [{{"role": "user", "content": "..."}}, ...]'
            )
        try:
            conversation = [message_of(message) for message in messages]
            self.limits.check("prompt", sum(len(message.content) for message in conversation), "characters of a prompt")
            return tuple(self.renderer.prompt_ids(conversation))
        except TypeError as error:
            raise UserError(str(error)) from error

    def prompt_ids(self, prompt: Any) -> tuple[int, ...]:
        """Return the token ids of a text, of token ids, or of vLLM's form of either. Raises UserError for anything else."""
        if isinstance(prompt, dict) and len(prompt) == 1:
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            self.limits.check("prompt", len(prompt), "characters of a prompt")
            return tuple(self.tokenizer(prompt.encode(errors="replace").decode(), verbose=False).input_ids)
        if not isinstance(prompt, list):
            raise UserError(f'prompt={shown(prompt)}: give a text, or token ids as {{"prompt_token_ids": [1, 2]}}')
        if bad := [i for i in prompt if type(i) is not int or not 0 <= i < self.vocabulary]:
            last = self.vocabulary - 1
            raise UserError(f"a prompt has {shown(bad[0])}, but token ids are integers from 0 to {last}")
        return tuple(prompt)

    async def sample(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Completion]:
        """Return n completions of each prompt, in the order of the prompts. Raises UserError and Unavailable.

        If the task that waits for it is cancelled, the prompts leave the queue and the running batch.
        """
        self.batching.check_ready()
        sampling, context = asked.sampling(), self.batching.engine.context
        if not prompts or not all(prompts):
            raise UserError("a prompt has no tokens: give at least one")
        longest = max(map(len, prompts))
        if context is not None and longest + sampling.max_tokens > context:
            asked_for = f"a prompt of {longest} tokens and max_tokens={sampling.max_tokens}"
            raise UserError(f"{asked_for} exceed the engine's context of {context}")
        each = [prompt for prompt in prompts for _ in range(asked.n)]
        tokens = sum(map(len, each)) + len(each) * sampling.max_tokens
        self.limits.check("tokens", tokens, "tokens (of the prompts and max_tokens, for each sample)")
        completions = await asyncio.wrap_future(self.batching.sample(each, sampling, asked.seeds(len(each))))
        self.metrics.tokens.labels("prompt").inc(sum(map(len, prompts)))
        self.metrics.tokens.labels("completion").inc(sum(len(completion.ids) for completion in completions))
        return completions

    def text(self, completion: Completion) -> str:
        """Return the text of a completion, as the policy's message has it."""
        return self.renderer.parse(completion.ids).content

    def prompt_text(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt with its special tokens."""
        return self.tokenizer.decode(ids)

    async def one_token(self) -> None:
        """Sample one token, to check that the engine works. Raises Unavailable if sampling is paused."""
        if self.batching.paused:
            raise Unavailable("generation is paused")
        await self.sample([(0,)], Asked(max_tokens=1, temperature=0.0))
