"""Families with attention of their own that adds a bias to the scores of each key: BLOOM and Falcon by its position (ALiBi,
arXiv 2108.12409), Doge by its value (arXiv 2412.11834).

In a plan they ask for attention as other families do. The bias is in the product of queries and keys, which get more columns:
so each kernel and each cache computes it, and stores no scores.

Shapes: T tokens in the row, H heads, K key heads, n = H / K biases of a key head, or one.
"""

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from grpo.models.packed_attention import NAME, PLAN
from grpo.models.trusted import PROBE, MaskProbe

WIDTH = 8  # columns are added in multiples of it, as kernels of a GPU want them


def prepare(kind: str) -> None:
    """Let models of this type, as `bloom`, attend by plan in `attending`; elsewhere they compute as before."""
    if kind in OWN:
        family, name, method, changed = OWN.pop(kind)
        owner = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)
        setattr(owner, method, changed(getattr(owner, method)))


def in_plans(planned: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward that is another one in `attending`."""

    @wraps(own)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (own if PLAN.get() is None else planned)(self, *args, **kwargs)

    return forward


def attended(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Return the output of attention, [1, T, H x D]. query: [1, H, T, D]; key, value: [1, K, T, D]. bias: added to the scaled
    scores of each key, [H or K, T]."""
    if bias is not None:
        query, key = biased(query, key, bias.float() / scale)
    attention = AttentionInterface()[PROBE if isinstance(PLAN.get(), MaskProbe) else NAME]
    return attention(module, query, key, value, mask, scaling=scale)[0].flatten(2)


def biased(query: Tensor, key: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose products have the bias of each key, [H or K, T] in float32, added. Shapes as in `attended`.
    A bias has two columns, the second for what 16 bits lose in the first."""
    heads, count = query.shape[1], len(bias) // key.shape[1]
    of_keys = bias.view(key.shape[1], count, -1).mT  # [K, T, n]
    of_keys = torch.cat([of_keys, of_keys - of_keys.to(key.dtype).float()], dim=-1)  # [K, T, 2 n]
    of_queries = torch.eye(count, device=query.device)[torch.arange(heads, device=query.device) % count]  # [H, n]
    of_queries, wider = of_queries.repeat(1, 2), -2 * count % WIDTH
    return tuple(
        torch.cat([x, F.pad(more, (0, wider)).to(x).expand(*x.shape[:3], -1)], dim=-1)
        for x, more in ((query, of_queries[:, None]), (key, of_keys))
    )


def by_position(module: nn.Module, dtype: torch.dtype, computed: torch.dtype) -> Tensor:
    """Return the bias of keys at the positions of the plan, [H, T], rounded as the family rounds it. computed: the type in which
    it multiplies slopes by positions."""
    family, positions = import_module(type(module).__module__), PLAN.get().positions  # [1, T]
    two = torch.ones(1, 2, device=positions.device)
    slopes = family.build_alibi_tensor(two, module.num_heads, computed)[:, 0, 1:]  # the bias of position 1, [H, 1]
    return (slopes * positions).to(dtype)


def bloom(self: nn.Module, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, **_: Any):
    """BloomAttention in a plan."""
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    bias = by_position(self, alibi.dtype, torch.float32)
    out = self.dense(attended(self, query, key, value, attention_mask, self.inv_norm_factor, bias))
    return residual + F.dropout(out, self.hidden_dropout, self.training), None


def falcon(self: nn.Module, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Any, **kwargs: Any):
    """FalconAttention in a plan. Its newer form repeats keys and values for the heads that share them."""
    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    if self.new_decoder_architecture:
        key, value = (x[:, :: self.num_heads // self.num_kv_heads] for x in (key, value))
    bias = None
    if alibi is None:
        rotated = import_module(type(self).__module__).apply_rotary_pos_emb
        query, key = rotated(query, key, *kwargs["position_embeddings"])
    else:
        bias = by_position(self, alibi.dtype, torch.bfloat16) * self.inv_norm_factor
    return self.dense(attended(self, query, key, value, attention_mask, self.inv_norm_factor, bias)), None


def doge(self: nn.Module, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any):
    """DogeAttention in a plan, for rows of at most keep_window_size tokens: in longer ones it picks tokens."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
    bias = (self.A * F.softplus(self.dt_proj(value.flatten(2)))).exp()[0].T  # [K, T]
    query, key, value = (x.transpose(1, 2) for x in (self.q_norm(query), self.k_norm(key), value))
    query, key = import_module(type(self).__module__).apply_rotary_pos_emb(query, key, *position_embeddings)
    return self.o_proj(attended(self, query, key, value, attention_mask, self.scaling, bias)), None


# by the type of a model: its file, a class in it, one of the methods of this class, and what makes another one of it
OWN: dict[str, tuple[str, str, str, Callable[..., Any]]] = {
    "bloom": ("bloom", "BloomAttention", "forward", partial(in_plans, bloom)),
    "falcon": ("falcon", "FalconAttention", "forward", partial(in_plans, falcon)),
    "doge": ("doge", "DogeAttention", "forward", partial(in_plans, doge)),
}
