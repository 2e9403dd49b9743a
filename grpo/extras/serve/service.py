"""Checks and answers requests: from text or messages to token ids, through the engine, and back."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Body
from transformers import PreTrainedTokenizerBase

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.context import check_context
from grpo.engines.protocol import Sampling
from grpo.engines.stop_texts import StopTexts
from grpo.env.chat_template import encoded
from grpo.env.intake import no_tokens
from grpo.env.messages import cut, shown
from grpo.env.rendering import Renderer, message_after
from grpo.env.tokens import Completion
from grpo.extras.serve.batching import Batching, Unavailable
from grpo.extras.serve.dialects.chat import CHAT
from grpo.extras.serve.dialects.completions import prompt_of
from grpo.extras.serve.dialects.request import Answer, CompletionRequest, Fields, answered
from grpo.extras.serve.limits import Crowded, RequestLimits
from grpo.extras.serve.prometheus import ServeMetrics
from grpo.extras.serve.served_weights import ServedWeights
from grpo.system.errors import UserError
from grpo.system.ranges import Count, Range
from grpo.system.seeds import derive_seed

T = TypeVar("T")
Json = Annotated[Any, Body()]  # of a request
RAW_TOKENS = 16  # max_tokens after a raw prompt, where a request has none
LIKELIEST = 20  # most alternatives of a token, as in OpenAI's API and vLLM


class Unknown(UserError):
    """A request names a model that is not served."""


def served_name(path: str) -> str:
    """Return the name of a model for clients: that of the hub, or of its folder; for a checkpoint also that of its run."""
    folder = Path(path)
    if not folder.is_dir():
        return path
    run = folder.absolute().parents[1] if folder.absolute().parent.name == "checkpoints" else None
    return f"{run.name}/{folder.name}" if run else folder.absolute().name


def own_request(fields: Fields, most: int | None = None) -> CompletionRequest:
    """Return the settings of a request of an endpoint whose answer has no alternatives of tokens and no stream.

    most: max_tokens, where the request has none; None: that of conversations. `logprobs` may be 0 or 1, since the sampled
    tokens have theirs in any case.
    """
    fields.take("logprobs", Annotated[int, Range(0, 1)])
    request = CompletionRequest(n=fields.take("n", Count, 1), **fields.sampling())
    fields.check_empty()
    if request.stream:
        raise UserError("stream=True is not supported here: leave it out, or use /v1/completions")
    return replace(request, max_tokens=most) if request.max_tokens is None else request


@dataclass(eq=False)
class Service:
    """Tokenizes requests, samples, and decodes the answers. Mutable: it counts the requests.

    The tokenizer has a thread of its own, since it is slow and not thread-safe; the engine has the thread of `batching`.
    names: what requests may call the model; the first is its name in lists and answers, and "*" is any name.
    """

    batching: Batching
    weights: ServedWeights
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    vocabulary: int
    limits: RequestLimits = field(default_factory=RequestLimits)
    names: Sequence[str] = ("*",)

    def __post_init__(self) -> None:
        self.metrics = ServeMetrics(self.batching)
        self._places = asyncio.Semaphore(self.limits.queue)
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")

    @property
    def name(self) -> str:
        """The model's name in lists and answers."""
        path = self.weights.pretrained.path
        return self.names[0] if self.names[0] != "*" else served_name(path)

    def check_name(self, name: Any) -> None:
        """Raise Unknown if a request, or a path, names another model. `policy`, the folder and the adapter are names, too."""
        adapter = self.weights.adapter
        ours = ["policy", *self.names, self.weights.pretrained.path, *([adapter.name] if adapter else [])]
        if name is not None and "*" not in ours and name not in ours:
            how = f"ask for {self.names[0]}, leave it out, or start the server with served_name=NAME"
            raise Unknown(f"there is no model {shown(name)} here: {how}")

    async def place(self) -> AsyncIterator[None]:
        """Hold a place in the queue while a request is answered. Raises Crowded if none is free."""
        if self._places.locked():
            raise Crowded(f"limits.queue={self.limits.queue} requests are being answered: try again later")
        async with self._places:
            yield

    async def run_in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the tokenizer's thread, while the event loop answers other requests."""
        return await asyncio.wrap_future(self._tokenizing.submit(function, *arguments))

    async def read(self, function: Callable[[Any], tuple], inputs: Sequence[Any], n: int) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt. function: `chat_ids` or `prompt_ids`. Raises what it raises, and Oversized."""
        self.limits.check("samples", len(inputs) * n, "samples (prompts times n)")
        return await self.run_in_thread(lambda: [function(prompt) for prompt in inputs])

    def chat_ids(self, messages: Any) -> tuple[int, ...]:
        """Return the token ids of a conversation, rendered with the chat template. Raises UserError if it is not one."""
        if not isinstance(messages, list):
            raise UserError(f'{shown(messages)} is no conversation: give [{{"role": "user", "content": "..."}}, ...]')
        return self.rendered(CHAT.read({"messages": messages}))

    def rendered(self, request: CompletionRequest) -> tuple[int, ...]:
        """Return the token ids of a request's conversation."""
        self.limits.check("prompt", sum(len(message.content) for message in request.messages), "characters of a prompt")
        return tuple(self.renderer_of(request).prompt_ids(request.messages, request.tools))

    def renderer_of(self, request: CompletionRequest) -> Renderer:
        """Return the renderer with the request's variables of the chat template."""
        if not request.template:
            return self.renderer
        if not hasattr(self.renderer, "with_args"):
            raise UserError(f"{type(self.renderer).__name__} takes no chat_template_kwargs: leave them out")
        return self.renderer.with_args(request.template)

    def prompt_ids(self, prompt: Any) -> tuple[int, ...]:
        """Return the token ids of a text, of token ids, or of vLLM's form of either. Raises UserError for anything else."""
        prompt = prompt_of(prompt)
        if isinstance(prompt, str):
            self.limits.check("prompt", len(prompt), "characters of a prompt")
            return encoded(self.tokenizer, prompt)
        if bad := no_tokens(prompt, self.vocabulary):
            last = self.vocabulary - 1
            raise UserError(f"a prompt has {shown(bad[0])}, but token ids are integers from 0 to {last}")
        return prompt

    def sampling(self, request: CompletionRequest) -> Sampling:
        """Return a request's settings in the form of the engines. Without max_tokens these are 16 for raw prompts, else 256."""
        if len(request.settings.get("stop_ids", ())) > 1000:
            raise UserError("there are at most 1000 stop_token_ids")
        most = (RAW_TOKENS if request.prompts else 256) if request.max_tokens is None else request.max_tokens
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        stop = StopTexts(request.stop, decode) if request.stop else ()
        sampling = Sampling(most, **request.settings, stop=stop)  # which checks the values
        if (least := (sampling.vllm or {}).get("min_tokens", 0)) > most:
            raise UserError(f"min_tokens={least} is above max_tokens={most}: lower it")
        return sampling

    async def answers(self, request: CompletionRequest) -> list[Answer]:
        """Return n answers to each prompt of a request. Raises UserError and Unavailable."""
        function, inputs = (self.prompt_ids, request.prompts) if request.prompts else (self.rendered, [request])
        prompts = await self.read(function, inputs, request.n)
        scored = self.scored(request)
        each = [prompt for prompt in prompts for _ in range(request.n)]
        if request.max_tokens == 0 and (scored or request.prompts):  # an empty completion, as of OpenAI's older API
            self.check_size(prompts, request.n, 0)
            completions = [Completion((), (), "length")] * len(each)
        else:
            completions = await self.sample(prompts, request)
        rows = [prompt + completion.ids for prompt, completion in zip(each, completions, strict=True)]
        scores = [()] * len(each)
        if scored:
            scores = await self.scores(request, rows)
        return await self.run_in_thread(self.answered, request, each, completions, scores)

    def scored(self, request: CompletionRequest) -> bool:
        """Return whether the answer needs `scores`. Raises UserError if the engine has none, and Unavailable."""
        most = request.alternatives
        scored = most > 0 or request.prompt_logprobs is not None or (request.echo and request.logprobs is not None)
        self.batching.check_ready()
        engine = self.batching.engine
        if scored and not hasattr(engine, "score"):
            line = "gives log-probabilities of sampled tokens only: ask for logprobs=0, and for none of the prompt"
            raise UserError(f"the engine {type(engine).__name__} {line}")
        if most > LIKELIEST:
            raise UserError(f"{most} alternatives of a token are too many: ask for at most {LIKELIEST}")
        return scored

    async def scores(self, request: CompletionRequest, rows: Sequence[tuple[int, ...]]) -> list:
        """Return the log-probabilities of each token of rows, with as many alternatives as the request wants."""
        most, heat = request.alternatives, request.prompt_temperature
        if heat != 1 and not isinstance(self.batching.engine, TransformersEngine):
            raise UserError(f"prompt_temperature={heat}: only engine=transformers scores at another temperature than 1")
        more = {} if heat == 1 else {"temperature": heat}
        return await asyncio.wrap_future(self.batching.call(lambda engine: engine.score(rows, most, **more)))

    def answered(
        self, request: CompletionRequest, prompts: Sequence, completions: Sequence[Completion], scores: Sequence
    ) -> list[Answer]:
        """Return the answer that each completion is."""
        renderer, decode = self.renderer_of(request), self.tokenizer.decode
        return [
            answered(request, prompt, done, message_after(renderer, done.ids, prompt, request.tools), decode, values)
            for prompt, done, values in zip(prompts, completions, scores, strict=True)
        ]

    async def sample(self, prompts: Sequence[Sequence[int]], request: CompletionRequest) -> list[Completion]:
        """Return n completions of each prompt, in the order of the prompts. Raises UserError and Unavailable.

        If the task that waits for it is cancelled, the prompts leave the queue and the running batch.
        """
        self.batching.check_ready()
        sampling = self.sampling(request)
        self.check_size(prompts, request.n, sampling.max_tokens)
        each = [prompt for prompt in prompts for _ in range(request.n)]
        seeds = [
            secrets.randbits(63) if request.seed is None else derive_seed(request.seed, i) for i in range(len(each))
        ]
        completions = await asyncio.wrap_future(self.batching.sample(each, sampling, seeds))
        self.metrics.tokens.labels("prompt").inc(sum(map(len, prompts)))
        self.metrics.tokens.labels("completion").inc(sum(len(completion.ids) for completion in completions))
        return completions

    def check_size(self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int) -> None:
        """Raise UserError or Oversized if prompts are empty, or exceed the engine's context or the limit of tokens."""
        if not prompts or not all(prompts):
            raise UserError("a prompt has no tokens: give at least one")
        check_context(max(map(len, prompts)), max_tokens, self.batching.engine.context)
        tokens = n * (sum(map(len, prompts)) + len(prompts) * max_tokens)
        self.limits.check("tokens", tokens, "tokens (of the prompts and max_tokens, for each sample)")

    def text(self, completion: Completion, stop: Sequence[str] = ()) -> str:
        """Return the text that was sampled, as the policy's message has it, before the first stop text."""
        return cut(message_after(self.renderer, completion.ids).content, stop)[0]

    def prompt_text(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt with its special tokens."""
        return self.tokenizer.decode(ids)

    async def one_token(self) -> None:
        """Sample one token, to check that the engine works. Raises Unavailable if sampling is paused."""
        if self.batching.paused:
            raise Unavailable("generation is paused")
        await self.sample([(0,)], CompletionRequest(max_tokens=1, settings={"temperature": 0.0}))
