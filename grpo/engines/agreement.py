"""Layer 1 - which way to sample computes what the model does: tried on a few tokens, and masks compared.

What is tried is shorter than a window of attention. So the model is also asked for the masks that it makes, and what they say of
the far end of its context is held against the windows that its layers tell a plan.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from grpo.engines.padded import Padded
from grpo.engines.pool import Pool
from grpo.errors import UserError

PROBE = "grpo_probe"
EXACT, ROUNDED = (
    1e-4,
    0.1,
)  # how far off log-probabilities may be: in float32, and in shorter numbers or where no way is better
FAR = 2**20  # a context that is long enough


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


class Probe:
    """wrong: what is against attention by plan, a layer's window that is not told as it is or a mask of the model's own."""

    def __init__(self, model: nn.Module) -> None:
        context = getattr(model.config.get_text_config(), "max_position_embeddings", FAR)
        self.context, self.wrong, self.device = min(context, FAR), list[str](), model.device
        before = model.config._attn_implementation
        model.config._attn_implementation = PROBE
        try:
            model(input_ids=torch.tensor([[3, 4, 5]], device=model.device), use_cache=False, plan=self)
        finally:
            model.config._attn_implementation = before

    def hear(self, layer: int, mask: Callable[..., Tensor] | None, window: int | None) -> None:
        """mask: the function of (batch, head, query, key) that the model made, None where it makes no mask."""
        keys = torch.arange(self.context, device=self.device)
        query = torch.full_like(keys, self.context - 2)
        zero = torch.zeros_like(keys)
        if mask is not None and not callable(mask):
            self.wrong.append(f"layer {layer} has a mask of its own")
            return
        sees = keys <= query if mask is None else mask(zero, zero, query, keys)
        told = (keys <= query) & (query - keys < (window or self.context))
        if not torch.equal(sees.expand_as(told), told):
            self.wrong.append(f"layer {layer} has a mask that it does not tell")


def by_probe(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **kwargs):
    """An attention function that mixes nothing."""
    kwargs["plan"].hear(module.layer_idx, attention_mask, kwargs.get("sliding_window"))
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


AttentionInterface.register(PROBE, by_probe)
AttentionMaskInterface.register(PROBE, lambda mask_function, **_: mask_function)  # the function is the mask
