"""Chooses the built-in engine's KV cache: compares its log-probabilities on a few tokens with plain forward passes."""

from collections import deque
from functools import partial

import torch
from torch import Tensor, nn

from grpo.engines.builtin.kv_cache import KVCache
from grpo.engines.builtin.padded import PaddedCache
from grpo.models.trusted import objection
from grpo.system.errors import UserError

Cache = type[KVCache] | type[PaddedCache]
EXACT = 1e-4  # largest allowed error of log-probabilities in float32
LOOSE = 0.1  # the same in lower precision, and for `PaddedCache`, because there is nothing better to fall back to


def cache_for(model: nn.Module) -> tuple[Cache, str]:
    """Return the cache to sample with, and the reason if it is not `KVCache`. Raises UserError if both caches are wrong."""
    if not (why := cache_objection(KVCache, model)):
        return KVCache, ""
    if other := cache_objection(PaddedCache, model):
        raise UserError(f"the built-in engine cannot sample from {type(model).__name__} ({other}): set engine=vllm")
    return PaddedCache, why


def cache_objection(cache: Cache, model: nn.Module) -> str:
    """Return the reason why the engine must not sample from the model with this cache; empty if it may."""
    return objection(model, partial(error_of, cache, model), by_plan=cache is KVCache)


def error_of(cache: Cache, model: nn.Module) -> str:
    """Sample three rows of two prompts, one of which ends early. Returns "", or how far they are from plain forward passes."""
    exact = cache is KVCache and model.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    size, device = model.get_input_embeddings().num_embeddings, model.device
    token = iter([(7919 * i + 11) % size for i in range(1, 40)])
    long, short = (tuple(next(token) for _ in range(n)) for n in (7, 3))
    texts = [[*prompt, next(token), next(token)] for prompt in (long, long, short)]
    plain = [model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0, -3:] for text in texts]

    kept = cache(model, [long, long, short], 4, 1000)
    rows, logits = kept.admit(deque(range(3)))
    errors = [distance(logits, torch.stack([plain[i][0] for i in rows]))]
    for t in (1, 2):
        logits = kept.step(torch.tensor([texts[i][t - 3] for i in rows], device=device))
        errors.append(distance(logits, torch.stack([plain[i][t] for i in rows])))
        if t == 1:
            rows = [rows[b] for b in kept.drop([0])]
    error = torch.tensor(errors).max().item()  # NaN, if there is one
    return "" if error <= (EXACT if exact else LOOSE) else f"log-probabilities are {error:.2g} off"


def distance(logits: Tensor, plain: Tensor) -> float:
    """Return the largest sum(p |log q - log p|) of a row, q = softmax(logits), p = softmax(plain). logits, plain: [B, V]."""
    q, p = logits.float().log_softmax(-1), plain.float().log_softmax(-1)
    return torch.where(p.exp() > 0, p.exp() * (q - p).abs(), 0.0).sum(-1).max().item()
