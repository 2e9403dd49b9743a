"""The built-in engine: samples from the model that is being trained, so no weights are copied.

Each distinct prompt goes through the model once, then each step is one forward pass for all rows. Finished
samples leave the batch and waiting ones join it. On a GPU this happens at every 16th step: until then nothing
waits for the GPU, and what a finished sample draws is thrown away. Works wherever the model works: CPU, MPS,
one GPU. The KV cache is chosen by comparing its log-probabilities on a few tokens with plain forward passes:
`LlamaCache` for a Llama on a CPU, `KVCache`, else `PaddedCache`.
"""

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count, islice

import torch
from torch import Tensor, nn

from grpo.engines.builtin.kv_cache import KVCache
from grpo.engines.builtin.llama import LlamaCache, is_plain_llama
from grpo.engines.builtin.next_token import NextTokens
from grpo.engines.builtin.padded import PaddedCache
from grpo.engines.context import check_context
from grpo.engines.only_vllm import refuse_only_vllm
from grpo.engines.protocol import Done, Prompts, Sampling
from grpo.env.tokens import Completion
from grpo.models import FOLLOWERS
from grpo.models.language import probe_ids
from grpo.models.pretrained import context_of
from grpo.models.probe_lengths import beyond_sizes
from grpo.models.token_scores import divided
from grpo.models.trusted import objection
from grpo.system.errors import UserError
from grpo.system.ranges import Count, enforced

log = logging.getLogger(__name__)

Cache = type[KVCache] | type[PaddedCache]
STEPS = {"cpu": 1}  # tokens until the host looks for rows that have ended, for which it waits; 16 on a device
EXACT = 1e-4  # largest allowed error of log-probabilities in float32
# the same in lower precision, and for `PaddedCache`, because there is nothing better to fall back to
LOOSE = 0.1


class TransformersEngine:
    """Samples from the model that is being trained.

    max_cache_tokens: size of the KV cache in tokens. Samples that do not fit wait; a single sample may exceed
    it.
    """

    @enforced("engine")
    def __init__(self, max_cache_tokens: Count = 65536) -> None:
        self.max_cache_tokens = max_cache_tokens
        self.version: int | None = None
        self.model: nn.Module | None = None
        self.tried: tuple[nn.Module, torch.device] | None = None
        self.reason = ""  # why the slower cache is used
        self.unwanted: set[int] = set()

    @property
    def context(self) -> int | None:
        return context_of(self.model.config)

    def load_weights(self, model: nn.Module, version: int) -> None:
        self.model, self.version = model, version

    def choose(self) -> None:
        """Choose the cache, by trying it on the model's present device, which may differ from the device at
        loading time."""
        if self.tried != (self.model, self.model.device):
            self.cache, reason = cache_for(self.model)
            if reason and reason != self.reason:
                name = type(self.model).__name__
                log.warning("engine: sampling from %s is slower, it needs transformers' cache: %s", name, reason)
            self.tried, self.reason = (self.model, self.model.device), reason

    @torch.inference_mode()
    def sample(
        self,
        prompts: Prompts,
        sampling: Sampling,
        seeds: Sequence[int],
        done: Done | None = None,
        temperatures: Sequence[float] | None = None,
    ) -> list[Completion]:
        refuse_only_vllm(sampling.guided, sampling.vllm)
        check_context(max(map(len, prompts)), sampling.max_tokens, self.context)
        self.choose()
        prompts = [tuple(prompt) for prompt in prompts]
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        # equal prompts side by side
        waiting = deque(sorted(range(len(prompts)), key=lambda i: place[prompts[i]]))
        device, eos = self.model.device, self.model.generation_config.eos_token_id
        eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
        stop_ids, every = {*eos, *sampling.stop_ids}, STEPS.get(device.type, 16)

        # not model.generate: it keeps each prompt once for every sample, all rows wait for the longest, and one
        # generator draws for the batch, so that a sample would depend on what else is in it
        cache = self.cache(self.model, prompts, sampling.max_tokens, self.max_cache_tokens)
        draws = NextTokens(prompts, sampling, seeds, device, temperatures)
        completions: list[Completion | None] = [None] * len(prompts)
        logits = None  # [B, V], one row per sample in the batch
        while (waiting or logits is not None) and len(self.unwanted) < len(prompts):
            new, fresh = cache.admit(waiting)
            if new:
                draws.join(new, fresh.shape[-1])
                logits = fresh if logits is None else torch.cat([logits, fresh])
            token = draws.step(logits)
            if draws.due(every) and (ended := draws.ended(stop_ids, self.unwanted)):
                for i, completion in draws.completions(ended):
                    completions[i] = completion
                    if done is not None:
                        with torch.inference_mode(False):  # the callback is not part of the engine
                            done(i, completion)
                token = token[draws.keep(cache.drop(ended))]
            logits = cache.step(token) if len(token) else None
        return completions

    @torch.inference_mode()
    def score(self, sequences: Prompts, top: int, temperature: float = 1.0) -> list[list[dict[int, float]]]:
        """Score as an `Engine` may, at any temperature, with a plain forward pass for each sequence."""
        scores: list[list[dict[int, float]]] = []
        for sequence in sequences:
            ids = torch.tensor([sequence], device=self.model.device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            logprobs = divided(logits, temperature).log_softmax(-1)  # [T-1, V]
            actual = logprobs.gather(-1, ids[0, 1:, None].clamp(min=0))
            best = logprobs.topk(min(top, logprobs.shape[-1]))
            which = torch.cat([ids[0, 1:, None], best.indices], -1)  # [T-1, 1 + top]
            values = torch.cat([actual, best.values], -1)
            rows = zip(which.tolist(), values.tolist(), strict=True)
            scores.append([{}, *(dict(zip(*row, strict=True)) for row in rows)])
        return scores

    def close(self) -> None:
        self.model = self.tried = None


def cache_for(model: nn.Module) -> tuple[Cache, str]:
    """Return the cache to sample with, and the reason if it is `PaddedCache`. Raises UserError if every cache
    is wrong."""
    if is_plain_llama(model) and not cache_objection(LlamaCache, model):
        return LlamaCache, ""
    cache = next(filter(None, [follow(model) for follow in FOLLOWERS]), KVCache)
    if not (why := cache_objection(cache, model)):
        return cache, ""
    if other := cache_objection(PaddedCache, model):
        raise UserError(f"the built-in engine cannot sample from {type(model).__name__} ({other}): set engine=vllm")
    return PaddedCache, why


def cache_objection(cache: Cache, model: nn.Module) -> str:
    """Return the reason why the engine must not sample from the model with this cache; empty if it may."""
    return objection(model, partial(error_of, cache, model), by_plan=issubclass(cache, KVCache))


def error_of(cache: Cache, model: nn.Module) -> str:
    """Sample three rows of two prompts, one of which ends early. Returns "", or how far they are from plain
    forward passes."""
    in_float32 = model.dtype == torch.float32 and not torch.is_autocast_enabled(model.device.type)
    exact = issubclass(cache, KVCache) and in_float32 and torch.get_float32_matmul_precision() == "highest"
    return beyond_sizes(model, partial(error_at, cache, model), (7, 3), EXACT if exact else LOOSE)


def error_at(cache: Cache, model: nn.Module, lengths: tuple[int, int], bound: float) -> str:
    """Return "", or the error with prompts of these lengths if it is above the bound."""
    size, device = model.get_input_embeddings().num_embeddings, model.device
    token = ((7919 * i + 11) % size for i in count(1))
    long, short = ((*seen, *islice(token, n)) for seen, n in zip(probe_ids(model), lengths, strict=True))
    texts = [[*prompt, next(token), next(token)] for prompt in (long, long, short)]
    plain = [model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0, -3:] for text in texts]

    kept = cache(model, [long, long, short], 4, 1 << 60)
    rows, logits = kept.admit(deque(range(3)))
    errors = [distance(logits, torch.stack([plain[i][0] for i in rows]))]
    for t in (1, 2):
        logits = kept.step(torch.tensor([texts[i][t - 3] for i in rows], device=device))
        errors.append(distance(logits, torch.stack([plain[i][t] for i in rows])))
        if t == 1:
            rows = [rows[b] for b in kept.drop([0])]
    error = torch.tensor(errors).max().item()  # NaN, if there is one
    return "" if error <= bound else f"log-probabilities are {error:.2g} off"


def distance(logits: Tensor, plain: Tensor) -> float:
    """Return the largest sum(p |log q - log p|) of a row, q = softmax(logits), p = softmax(plain). logits,
    plain: [B, V]."""
    q, p = logits.float().log_softmax(-1), plain.float().log_softmax(-1)
    return torch.where(p.exp() > 0, p.exp() * (q - p).abs(), 0.0).sum(-1).max().item()
