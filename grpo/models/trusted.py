"""Whether a plan of attention is told all that a model's masks say.

What can be tried on a few tokens is shorter than a window of attention. So the model is asked for the masks that it makes, and
what they say of the far end of its context is held against the windows that its layers tell a plan.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from grpo.models.packed_attention import attending

PROBE = "grpo_probe"
FAR = 2**20  # a context that is long enough


class Probe:
    """wrong: what is against attention by plan, a layer's window that is not told as it is or a mask of the model's own."""

    def __init__(self, model: nn.Module) -> None:
        context = getattr(model.config.get_text_config(), "max_position_embeddings", FAR)
        self.context, self.wrong, self.device = min(context, FAR), list[str](), model.device
        with attending(model, PROBE):
            model(input_ids=torch.tensor([[3, 4, 5]], device=model.device), use_cache=False, plan=self)

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
