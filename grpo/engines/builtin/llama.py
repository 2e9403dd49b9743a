"""A KV cache that computes a Llama's forward pass itself on a CPU, in few operations and without
transformers' modules.

Queries and keys rotate together, and sums are in place. In a small model q, k and v are one product, gate and
up another: small operations take a model of a few million parameters as long as its products. The results are
those of the modules.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from grpo.engines.builtin.kv_cache import KVCache
from grpo.models.head import is_one_matrix
from grpo.models.packed_attention import AttentionPlan, How

# parameters of a model whose matrices are joined: that copies them, and saves less the larger they are
SMALL = 1 << 24


def is_plain_llama(model: nn.Module) -> bool:
    """Return whether `LlamaCache` computes what this model does: a plain Llama in float32 on a CPU, with
    nothing added."""
    if type(model) is not LlamaForCausalLM:
        return False
    config, modules, hooks = model.config, [*model.modules()], ("_forward_hooks", "_forward_pre_hooks")
    linear = [m for name, m in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    return (
        all(map(is_one_matrix, linear))
        and all(
            type(p) is nn.Parameter and p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters()
        )
        and (config.hidden_act, config.rope_parameters["rope_type"]) == ("silu", "default")
        and not any(getattr(m, hook) for m in modules for hook in hooks)
        and not any("forward" in vars(m) for m in modules)
    )


class LlamaCache(KVCache):
    """`KVCache` for models that are `is_plain_llama`. It may copy their projections, so it serves one set of
    weights."""

    def __init__(self, model: nn.Module, prompts, max_tokens: int, bound: int) -> None:
        super().__init__(model, prompts, max_tokens, bound)
        joins = sum(p.numel() for p in model.parameters()) <= SMALL
        self.layers = [
            (
                layer.input_layernorm.weight,
                side_by_side([getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"], joins),
                layer.self_attn.o_proj.weight,
                layer.post_attention_layernorm.weight,
                side_by_side([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight], joins),
                layer.mlp.down_proj.weight,
            )
            for layer in model.model.layers
        ]
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
            joined = products(F.rms_norm(x, shape, norm, eps), qkv).view(len(x), -1, width)  # [T, H + 2 K, D]
            turned, value = joined.narrow(1, 0, heads + kv), joined.narrow(1, heads + kv, kv)
            turned = (turned * cos).add_(turned.roll(width // 2, -1).mul_(sin)).transpose(0, 1)[None]
            query, key = turned.narrow(1, 0, heads), turned.narrow(1, heads, kv)
            attended = plan.attend(i, query, key, value.transpose(0, 1)[None], How(width**-0.5))[0].flatten(1)
            if torch.is_tensor(logits_to_keep) and i + 1 == len(self.layers):
                x, attended = x[logits_to_keep], attended[logits_to_keep]
            x = F.linear(attended, out).add_(x)
            gate, up = products(F.rms_norm(x, shape, norm_mlp, eps), gate_up).chunk(2, dim=1)
            x = F.linear(F.silu(gate).mul_(up), down).add_(x)
        return self.model.lm_head(F.rms_norm(x, shape, self.model.model.norm.weight, eps))


def side_by_side(weights: list[Tensor], joins: bool) -> list[Tensor]:
    """Return the matrices as one, or as they are."""
    return [torch.cat(weights)] if joins else weights


def products(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Return the products of x, [T, in], with all these matrices, [out, in] each, side by side, [T, sum of
    out]."""
    if len(weights) == 1:
        return F.linear(x, weights[0])
    return torch.cat([F.linear(x, weight) for weight in weights], dim=1)
