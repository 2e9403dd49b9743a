"""Says in the words of an attention plan how layers of transformers change their scores."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from grpo.extras.scores.own import prepare
from grpo.extras.scores.weighed import Weighed
from grpo.models.packed_attention import BEFORE, NAME, PLAN, by_plan
from grpo.models.trusted import PROBE, by_probe


@dataclass(frozen=True)
class Chunk:
    """A window of `How`: a query sees the tokens of its own chunk of a sequence (Llama 4), up to itself."""

    tokens: int

    def __call__(self, positions: Tensor) -> Tensor:
        return positions - positions % self.tokens


def follow_scores() -> None:
    """Let attention by plan follow layers with caps, sinks, biases and chunks, from now on in this process."""
    if prepare not in BEFORE:
        BEFORE.append(prepare)
        AttentionInterface.register(NAME, following(by_plan))
        AttentionInterface.register(PROBE, following(by_probe))
        AttentionMaskInterface.register(PROBE, mask_itself)
        AttentionInterface.register("sdpa", with_caps(AttentionInterface()["sdpa"]))
        PreTrainedModel.get_decoder = below_the_head(PreTrainedModel.get_decoder)


def following(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function for transformers that turns arguments of families into those of `How`."""

    def known(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any):
        cap, sinks = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
        if cap is not None or sinks is not None:
            kwargs["scores"] = Weighed(cap, sinks)
        config = getattr(module, "config", None)
        kinds = getattr(config, "layer_types", None)
        if kinds and kinds[module.layer_idx] == "chunked_attention":
            kwargs["sliding_window"] = Chunk(config.attention_chunk_size)
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            query = tuned(module, query)
        return attention(module, query, key, value, attention_mask, **kwargs)

    return known


def with_caps(sdpa: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' attention by sdpa with the caps that a model asks for, which sdpa leaves out."""

    @wraps(sdpa)
    def known(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ):
        if kwargs.get("softcap") is None:
            return sdpa(module, query, key, value, attention_mask, **kwargs)
        if attention_mask is None and not (
            causal if (causal := kwargs.get("is_causal")) is not None else module.is_causal
        ):
            attention_mask = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
        capped = Weighed(kwargs["softcap"])
        return capped(query, key, value, attention_mask, kwargs.get("scaling")).transpose(1, 2).contiguous(), None

    return known


def below_the_head(find: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Return what finds the decoder of a model also where transformers takes the whole of it for one, as of a Llama 4."""

    @wraps(find)
    def decoder(self: nn.Module) -> nn.Module:
        found = find(self)
        whole = found is self and self.get_output_embeddings() is not None
        return found.model if whole and hasattr(self, "model") else found

    return decoder


def tuned(module: nn.Module, query: Tensor) -> Tensor:
    """Return queries with the temperature of their positions (arXiv 2501.19399), in place of that of their places in the row,
    which Llama 4 has given them. query: [1, H, T, D]."""

    def temperature(positions: Tensor) -> Tensor:
        return torch.log1p(((positions.float() + 1) / module.floor_scale).floor()) * module.attn_scale + 1

    places = torch.arange(query.shape[2], device=query.device)
    ratio = temperature(PLAN.get().positions[0]) / temperature(places)
    return (query * ratio[:, None]).to(query.dtype)


def mask_itself(mask_function: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
    """Return the function that is a mask, as models/trusted.py wants it. Falcon asks it for its dimensions."""
    mask_function.ndim = 0
    return mask_function
