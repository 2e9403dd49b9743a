"""A KV cache that computes a Llama's forward pass itself on a CPU, in few operations and without
transformers' modules.

Queries and keys rotate together, sums are in place, q, k and v are one product, gate and up another. In a large
model oneDNN packs the matrices, once for all steps: few rows else take twice as long. The results are those of
the modules.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaForCausalLM

from grpo.engines.builtin.kv_cache import KVCache
from grpo.models.head import ONEDNN, is_one_matrix
from grpo.models.packed_attention import AttentionPlan, How

SMALL = 1 << 24  # parameters of a model whose matrices are not packed
ROWS = 64  # for which they are packed; fewer and more rows are as fast


def is_plain_llama(model: nn.Module) -> bool:
    """Return whether `LlamaCache` computes what this model does: a plain Llama in float32 on a CPU, with
    nothing added, or the forecast's picture of one."""
    if type(model) is not LlamaForCausalLM:
        return False
    config, modules, hooks = model.config, [*model.modules()], ("_forward_hooks", "_forward_pre_hooks")
    linear = [m for name, m in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    return (
        all(map(is_one_matrix, linear))
        and all(
            type(p) in (nn.Parameter, FakeTensor) and p.device.type == "cpu" and p.dtype == torch.float32
            for p in model.parameters()
        )
        and (config.hidden_act, config.rope_parameters["rope_type"]) == ("silu", "default")
        and not any(getattr(m, hook) for m in modules for hook in hooks)
        and not any("forward" in vars(m) for m in modules)
    )


def is_packed(model: nn.Module) -> bool:
    """Return whether `LlamaCache` copies the matrices of this model in oneDNN's form."""
    return ONEDNN and sum(p.numel() for p in model.parameters()) > SMALL and is_plain_llama(model)


class LlamaCache(KVCache):
    """`KVCache` for models that are `is_plain_llama`. It copies their projections, so it serves one set of
    weights."""

    def __init__(self, model: nn.Module, prompts, max_tokens: int, bound: int) -> None:
        super().__init__(model, prompts, max_tokens, bound)
        joined = partial(products, is_packed(model))
        self.layers = [
            (
                layer.input_layernorm.weight,
                joined(*(getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv")),
                joined(layer.self_attn.o_proj.weight),
                layer.post_attention_layernorm.weight,
                joined(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight),
                joined(layer.mlp.down_proj.weight),
            )
            for layer in model.model.layers
        ]
        self.head = joined(model.lm_head.weight) if type(model.lm_head) is nn.Linear else model.lm_head
        positions = torch.arange(self.widest + max_tokens)[None]
        cos, sin = model.model.rotary_emb(model.model.norm.weight, positions)  # [1, positions, D]
        self.cos, (first, second) = cos[0], sin[0].chunk(2, dim=-1)
        # of x rotated by half: rotate_half(x) sin, sign included
        self.sin = torch.cat([-first, second], dim=-1)

    def forward(self, plan: AttentionPlan, ids: Tensor, positions: Tensor, logits_to_keep: Tensor | int = 0) -> Tensor:
        """Return logits, [T, V], or those of the tokens `logits_to_keep`. ids, positions: [1, T]."""
        config, eps, shape = self.model.config, self.model.config.rms_norm_eps, (self.model.config.hidden_size,)
        heads, kv, width = config.num_attention_heads, config.num_key_value_heads, self.cos.shape[1]
        # [T, 1, D]
        cos, sin = (table.index_select(0, positions[0])[:, None] for table in (self.cos, self.sin))
        x = F.embedding(ids[0], self.model.model.embed_tokens.weight)  # [T, hidden]
        for i, (norm, qkv, out, norm_mlp, gate_up, down) in enumerate(self.layers):
            joined = qkv(F.rms_norm(x, shape, norm, eps)).view(len(x), -1, width)  # [T, H + 2 K, D]
            turned, value = joined.narrow(1, 0, heads + kv), joined.narrow(1, heads + kv, kv)
            turned = (turned * cos).add_(turned.roll(width // 2, -1).mul_(sin)).transpose(0, 1)[None]
            query, key = turned.narrow(1, 0, heads), turned.narrow(1, heads, kv)
            attended = plan.attend(i, query, key, value.transpose(0, 1)[None], How(width**-0.5))[0].flatten(1)
            if torch.is_tensor(logits_to_keep) and i + 1 == len(self.layers):
                x, attended = x[logits_to_keep], attended[logits_to_keep]
            x = out(attended).add_(x)
            gate, up = gate_up(F.rms_norm(x, shape, norm_mlp, eps)).chunk(2, dim=1)
            x = down(F.silu(gate).mul_(up)).add_(x)
        return self.head(F.rms_norm(x, shape, self.model.model.norm.weight, eps))


def products(packs: bool, *weights: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function of x, [T, in], that returns its products with all these matrices, [out, in] each, side
    by side, [T, sum of out]."""
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if not packs:
        return partial(F.linear, weight=weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
