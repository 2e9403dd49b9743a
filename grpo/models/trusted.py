"""Checks whether another way to compute agrees with the plain padded model, on a few tokens and on attention
masks.

A few tokens are fewer than an attention window. Therefore the masks that the model makes are read too: the
keys that they allow at the end of its context are compared with the windows that its layers pass to an
attention plan.
"""

import logging
import re
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from grpo.models import FOLLOWERS
from grpo.models.packed_attention import PLAN, How, Unplanned, attending
from grpo.system.errors import StopError

log = logging.getLogger(__name__)

PROBE = "grpo_probe"
# names of layers
STATE = re.compile(r"Mamba|DeltaNet|DeltaAttention|ShortConv|Recurrent|Rwkv|Lightning|Conv1d")
FAR = 2**20  # a context that is long enough


@torch.no_grad()
def objection(model: nn.Module, tried: Callable[[], str], by_plan: bool = True) -> str:
    """Return why the model must not be computed in another way; empty if it may. Raises when memory runs out.

    tried: computes a few tokens in that way, and returns their error as text, or "". by_plan: that way uses
    an attention plan.
    """
    for follow in FOLLOWERS:
        follow(model)
    try:
        why = (by_plan and MaskProbe(model).wrong) or tried()
    except (torch.OutOfMemoryError, StopError):
        raise
    except Unplanned as error:
        return str(error)
    except Exception as error:  # a model's code may raise anything
        log.debug("%s: %s", type(error).__name__, error)
        return "its attention has code of its own" if by_plan else "its code fails on rows of several lengths"
    stateful = why and any(STATE.search(type(module).__name__) for module in model.modules())
    return f"its layers carry a state from token to token: {why}" if stateful else why


class MaskProbe:
    """An attention plan that compares the masks of a model with the windows of its layers.

    wrong: the first layer whose window is not the one in its mask, or that has a mask of its own; else "".
    """

    def __init__(self, model: nn.Module) -> None:
        config = model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", FAR)
        self.context, self.wrong = min(context, FAR), ""
        self.positions = torch.arange(3, device=model.device)[None]
        with attending(model, self, PROBE):
            model(input_ids=self.positions + 3, use_cache=False)

    def compare(self, layer: int, mask: Callable[..., Tensor] | None, how: How, device: torch.device) -> None:
        """Compare one layer. mask: the model's function of (batch, head, query, key); None if it makes no
        mask."""
        keys = torch.arange(self.context, device=device)
        query, zero = torch.full_like(keys, self.context - 2), torch.zeros_like(keys)
        if mask is not None and not callable(mask):
            self.wrong = self.wrong or f"layer {layer} has a mask of its own"
            return
        sees = keys <= query if mask is None else mask(zero, zero, query, keys)
        in_window = (keys <= query) & (keys >= how.hidden(query))
        if not torch.equal(sees.expand_as(in_window), in_window):
            self.wrong = self.wrong or f"layer {layer} has a mask other than its window"


def by_probe(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **kwargs):
    """An attention function that only calls `compare`, and returns each token's own value."""
    PLAN.get().compare(module.layer_idx, attention_mask, How(window=kwargs.get("sliding_window")), query.device)
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


AttentionInterface.register(PROBE, by_probe)
AttentionMaskInterface.register(PROBE, lambda mask_function, **_: mask_function)  # the function is the mask
