"""Which way to sample computes what the model does: tried on a few tokens, and masks compared."""

from collections import deque

import torch
from torch import Tensor, nn

from grpo.engines.builtin.kv_cache import Pool
from grpo.engines.builtin.padded import Padded
from grpo.models.trusted import Probe
from grpo.system.errors import UserError

EXACT = 1e-4  # how far off log-probabilities may be
ROUNDED = 0.1  # in shorter numbers than float32, and where no way is better


def way_of(model: nn.Module) -> tuple[type[Pool] | type[Padded], str]:
    """How to sample from the model, and what is against `Pool` where it is not that. Raises UserError where no way is right."""
    reason = objection(Pool, model)
    if not reason:
        return Pool, ""
    if other := objection(Padded, model):
        raise UserError(f"the built-in engine cannot sample from {type(model).__name__} ({other}): set engine=vllm")
    return Padded, reason


def objection(way: type[Pool] | type[Padded], model: nn.Module) -> str:
    """Why it must not sample from this model; nothing where it may."""
    exact = way is Pool and model.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    try:
        with torch.inference_mode():
            if way is Pool and (wrong := Probe(model).wrong):
                return wrong[0]
            off = error_of(way, model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the code of a model raises where it is not made for this
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "" if off <= (EXACT if exact else ROUNDED) else f"log-probabilities are {off:.2g} off"


def error_of(way: type[Pool] | type[Padded], model: nn.Module) -> float:
    """Two prompts and three samples, one of which ends early: the largest `distance` to plain forwards."""
    size, device = model.get_input_embeddings().num_embeddings, model.device
    token = iter([(7919 * i + 11) % size for i in range(1, 40)])
    long, short = (tuple(next(token) for _ in range(n)) for n in (7, 3))
    texts = [[*prompt, next(token), next(token)] for prompt in (long, long, short)]
    plain = [model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0, -3:] for text in texts]

    pool = way(model, [long, long, short], 4, 1000)
    rows, logits = pool.admit(deque(range(3)))
    errors = [distance(logits, torch.stack([plain[i][0] for i in rows]))]
    for t in (1, 2):
        logits = pool.step(torch.tensor([texts[i][t - 3] for i in rows], device=device))
        errors.append(distance(logits, torch.stack([plain[i][t] for i in rows])))
        if t == 1:
            rows = [rows[b] for b in pool.drop([0])]
    return torch.tensor(errors).max().item()  # NaN, if there is one


def distance(logits: Tensor, plain: Tensor) -> float:
    """logits, plain: [B, V]. Returns the largest sum(p |log q - log p|) of a row."""
    q, p = logits.float().log_softmax(-1), plain.float().log_softmax(-1)
    return torch.where(p.exp() > 0, p.exp() * (q - p).abs(), 0.0).sum(-1).max().item()
