"""Checks whether another way to compute agrees with the plain padded model, on a few tokens and on attention masks.

A few tokens are fewer than an attention window. Therefore the masks that the model makes are read too: the keys that they allow
at the end of its context are compared with the windows that its layers pass to an attention plan.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from grpo.models.packed_attention import attending
from grpo.system.errors import StopError

PROBE = "grpo_probe"
FAR = 2**20  # a context that is long enough


@torch.no_grad()
def objection(model: nn.Module, tried: Callable[[], str], by_plan: bool = True) -> str:
    """Return why the model must not be computed in another way; empty if it may. Raises when memory runs out.

    tried: computes a few tokens in that way, and returns their error as text, or "". by_plan: that way uses an attention plan.
    """
    try:
        return (by_plan and MaskProbe(model).wrong) or tried()
    except (torch.OutOfMemoryError, StopError):
        raise
    except Exception as error:  # a model's code may raise anything
        return f"{type(error).__name__}: {error}".splitlines()[0]


class MaskProbe:
    """An attention plan that compares the masks of a model with the windows of its layers.

    wrong: the first layer whose window is not the one in its mask, or that has a mask of its own; else "".
    """

    def __init__(self, model: nn.Module) -> None:
        context = getattr(model.config.get_text_config(), "max_position_embeddings", FAR)
        self.context, self.wrong = min(context, FAR), ""
        with attending(model, PROBE):
            model(input_ids=torch.tensor([[3, 4, 5]], device=model.device), use_cache=False, plan=self)

    def compare(self, layer: int, mask: Callable[..., Tensor] | None, window: int | None, device: torch.device) -> None:
        """Compare one layer. mask: the model's function of (batch, head, query, key); None if it makes no mask."""
        keys = torch.arange(self.context, device=device)
        query, zero = torch.full_like(keys, self.context - 2), torch.zeros_like(keys)
        if mask is not None and not callable(mask):
            self.wrong = self.wrong or f"layer {layer} has a mask of its own"
            return
        sees = keys <= query if mask is None else mask(zero, zero, query, keys)
        in_window = (keys <= query) & (query - keys < (window or self.context))
        if not torch.equal(sees.expand_as(in_window), in_window):
            self.wrong = self.wrong or f"layer {layer} has a mask other than its window"


def by_probe(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **kwargs):
    """An attention function that only calls `compare`, and returns each token's own value."""
    kwargs["plan"].compare(module.layer_idx, attention_mask, kwargs.get("sliding_window"), query.device)
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


AttentionInterface.register(PROBE, by_probe)
AttentionMaskInterface.register(PROBE, lambda mask_function, **_: mask_function)  # the function is the mask
