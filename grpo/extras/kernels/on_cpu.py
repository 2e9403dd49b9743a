"""A Llama's norms, attention and gated MLPs on a CPU, with gradients by hand: three calls of autograd for each layer.

oneDNN makes all products, on an AMD processor twice as fast as MKL. Element-wise work is done for a few rows at a time,
which stay in a core's cache. Autograd keeps the input of a norm, gate and up: four tenths of what it keeps by itself. A norm's
output is made again.

Shapes: T tokens in one row, W width of the model, H heads and K key heads of D numbers, I inner width.
"""

import logging
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from grpo.engines.builtin.llama import SMALL, is_plain_llama
from grpo.extras.kernels.agreement import embedding_gradient, not_parallel
from grpo.models.head import ONEDNN, is_one_matrix
from grpo.models.packing import disagreement
from grpo.models.pretrained import Kernels
from grpo.models.trusted import objection

log = logging.getLogger(__name__)
# what autocast may choose, if the processor has its products
BFLOAT16 = torch.bfloat16 if ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported() else None
CACHED = 1 << 16  # numbers of a tensor that are computed at a time: a quarter of a megabyte


def projected(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, [T, out], in the number type of x. x: [T, in]; weight: [out, in]."""
    return torch.ops.mkldnn._linear_pointwise(x, weight.to(x.dtype), None, "none", [], "")


def lowered(x: Tensor) -> Tensor:
    """Return x in the number type of products, which autocast may choose."""
    return x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x


def cached_rows(x: Tensor) -> list[slice]:
    """Return the places of the rows that are computed together."""
    size = max(1, CACHED // x[0].numel())
    return [slice(start, start + size) for start in range(0, len(x), size)]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int = 1) -> Tensor:
    """Return x with rotary embeddings, [T, heads, D]; sign -1 rotates back. cos, sin: [T, D], whose halves are equal."""
    out, half = x.new_empty(x.shape), x.shape[-1] // 2
    for at in cached_rows(x):
        c, s, a = cos[at, None], sin[at, None, :half], x[at].float()
        y = a * c
        y[..., :half].addcmul_(a[..., half:], s, value=-sign)
        y[..., half:].addcmul_(a[..., :half], s, value=sign)
        out[at] = y
    return out


def scaled(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Return weight scale x, the output of a norm. x: [T, W]; scale: [T, 1]; weight: [W]."""
    out = torch.empty_like(x)
    for at in cached_rows(x):
        torch.mul(x[at], scale[at], out=out[at]).mul_(weight)
    return out


def again(x: Tensor, *scale_and_weight: Tensor) -> Tensor:
    """Return the input of a block, [T, W], from what it has kept."""
    return scaled(x, *scale_and_weight) if scale_and_weight else x


class Projection(Function):
    """x @ weight.T."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return projected(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, of_out: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), (wants_x, wants_weight) = ctx.saved_tensors, ctx.needs_input_grad
        of_x = projected(of_out, weight.T) if wants_x else None
        return of_x, projected(of_out.T, x.T).to(weight.dtype) if wants_weight else None


class Queries(Function):
    """Rotated queries [1, H, T, D] and keys [1, K, T, D], and values. made_of: what `scaled` makes x of, if it does; a norm
    keeps that anyway."""

    @staticmethod
    def forward(
        ctx, x: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *made_of: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(q, k, v, cos, sin, *made_of or [x])
        low = lowered(x)
        query, key, value = (projected(low, weight).view(len(x), -1, cos.shape[1]) for weight in (q, k, v))
        made = rotated(query, cos, sin), rotated(key, cos, sin), value
        return tuple(each.transpose(0, 1)[None] for each in made)

    @staticmethod
    @once_differentiable
    def backward(ctx, *of_each: Tensor) -> tuple[Tensor | None, ...]:
        *weights, cos, sin = ctx.saved_tensors[:5]
        x = again(*ctx.saved_tensors[5:]).to(of_each[0].dtype)
        query, key, value = (gradient[0].transpose(0, 1) for gradient in of_each)
        before = rotated(query, cos, sin, -1), rotated(key, cos, sin, -1), value
        before = [gradient.reshape(len(x), -1) for gradient in before]
        of_x = projected(before[0], weights[0].T)
        for gradient, weight in zip(before[1:], weights[1:], strict=True):
            of_x += projected(gradient, weight.T)
        return tuple(of.to(cos.dtype) for of in (of_x, *(projected(of.T, x.T) for of in before))) + 5 * (None,)


class Norm(Function):
    """weight x scale, where scale = 1 / sqrt(mean(x^2) + eps), and the scale, [T, 1], through which nothing learns."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        scale = torch.cat([x[at].pow(2).mean(-1, keepdim=True) for at in cached_rows(x)]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.mark_non_differentiable(scale)
        return scaled(x, scale, weight), scale

    @staticmethod
    @once_differentiable
    def backward(ctx, of_out: Tensor, _) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        of_x, of_weight = torch.empty_like(x), torch.zeros_like(weight)
        for at in cached_rows(x):
            normed, own = x[at] * scale[at], of_out[at] * weight
            of_weight += (of_out[at] * normed).sum(0)
            own -= normed.mul_((own * normed).mean(-1, keepdim=True))
            torch.mul(own, scale[at], out=of_x[at])
        return of_x, of_weight, None


class GatedMLP(Function):
    """down(silu(gate(x)) up(x)). made_of: as in `Queries`."""

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *made_of: Tensor) -> Tensor:
        low = lowered(x)
        g, u = projected(low, gate), projected(low, up)  # [T, I]
        inner = torch.empty_like(g)
        for at in cached_rows(g):
            torch.mul(F.silu(g[at]), u[at], out=inner[at])
        ctx.save_for_backward(gate, up, down, g, u, *made_of or [x])
        return projected(inner, down)

    @staticmethod
    @once_differentiable
    def backward(ctx, of_out: Tensor) -> tuple[Tensor, ...]:
        gate, up, down, g, u, *source = ctx.saved_tensors
        of_u = projected(of_out, down.T)  # of the product, until it is multiplied by the gate
        of_g, inner = torch.empty_like(g), torch.empty_like(g)
        for at in cached_rows(g):
            opened = F.silu(g[at])
            torch.mul(opened, u[at], out=inner[at])
            torch.ops.aten.silu_backward.grad_input(of_u[at] * u[at], g[at], grad_input=of_g[at])
            of_u[at].mul_(opened)
        x = again(*source).to(g.dtype)
        of_x = projected(of_g, gate.T).add_(projected(of_u, up.T))
        of_weights = projected(of_g.T, x.T), projected(of_u.T, x.T), projected(of_out.T, inner.T)
        return of_x.to(up.dtype), *(each.to(up.dtype) for each in of_weights), *[None] * 3


def takes_autocast() -> bool:
    """Return whether these layers compute with the number type that autocast has chosen, if it has."""
    return not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") == BFLOAT16


def is_one_row(x: Tensor) -> bool:
    """Return whether these states, [1, T, W], are computed here."""
    return len(x) == 1 and x.dtype == torch.float32 and x.device.type == "cpu" and takes_autocast()


def made_of(x: Tensor) -> tuple[Tensor, ...]:
    """Return what `scaled` makes these states of, if `OwnNorm` has made them and nothing has changed them since."""
    parts, version = getattr(x, "made_of", ((), None))
    return parts if parts and x._version == version else ()


class OwnNorm(LlamaRMSNorm):
    """A norm that computes one row of tokens by `Norm`."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_one_row(x):
            return super().forward(x)
        out, scale = Norm.apply(x[0], self.weight, self.variance_epsilon)
        out = out[None]
        if torch.is_grad_enabled():
            out.made_of = (x[0].detach(), scale, self.weight.detach()), out._version
        return out


class OwnMLP(LlamaMLP):
    """A gated MLP that computes one row of tokens by `GatedMLP`."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        return GatedMLP.apply(x[0], *weights, *made_of(x))[None] if is_one_row(x) else super().forward(x)


class OwnAttention(LlamaAttention):
    """An attention layer that computes one row of tokens by `Queries`, if nothing is cached."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        if past_key_values is not None or not is_one_row(hidden_states):
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        weights = (getattr(self, f"{name}_proj").weight for name in "qkv")
        made = Queries.apply(
            hidden_states[0], *weights, *(table[0] for table in position_embeddings), *made_of(hidden_states)
        )
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, shares = attend(self, *made, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return Projection.apply(out[0].flatten(1), self.o_proj.weight)[None], shares


class OwnLinear(nn.Linear):
    """A layer of any model in float32, whose product oneDNN makes."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or self.weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        out = Projection.apply(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


OWN = {LlamaRMSNorm: OwnNorm, LlamaMLP: OwnMLP, LlamaAttention: OwnAttention}


def use_products(model: nn.Module, wanted: Kernels) -> bool:
    """Let oneDNN make the products of a large model in float32 on a CPU, but for its head, which `head.linear` computes, and a
    plain Llama, whose matrices the engine packs. Returns whether it does."""
    size = sum(p.numel() for p in model.parameters())
    if wanted == "none" or not ONEDNN or size <= SMALL or torch.is_autocast_enabled("cpu") or is_plain_llama(model):
        return False
    head = model.get_output_embeddings()
    changed = [m for m in model.modules() if type(m) is nn.Linear and m is not head and is_large(m)]
    for layer in {tuple(m.weight.shape): m for m in changed}.values():
        x = torch.linspace(-1, 1, 5 * layer.in_features).view(5, -1).cos()
        with torch.no_grad():
            exact, found = F.linear(x, layer.weight), projected(x, layer.weight)
        if not (exact - found).abs().max() <= 1e-4 * exact.abs().max():
            log.warning("model.kernels: oneDNN's products differ, so %s keeps torch's", type(model).__name__)
            return False
    for layer in changed:
        layer.__class__ = OwnLinear
    return bool(changed)


def is_large(layer: nn.Linear) -> bool:
    """Return whether this is a plain layer with a large matrix in float32, which is whole and in this machine's memory."""
    weight = layer.weight
    plain = "forward" not in vars(layer) and not hasattr(weight, "full_tensor") and weight.device.type == "cpu"
    return plain and weight.dtype == torch.float32 and weight.numel() >= CACHED


def use_own(model: nn.Module, wanted: Kernels) -> bool:
    """Give a large Llama on a CPU these layers if they agree with its own on a few tokens. Returns whether it has them."""
    changed = [module for module in model.modules() if type(module) in OWN]
    # by name, since an adapter makes other modules of them
    linear = [module for name, module in model.named_modules() if name.endswith("_proj")]
    fits = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters()) and changed
    fits = fits and sum(p.numel() for p in model.parameters()) > SMALL and all(map(is_one_matrix, linear))
    silu = getattr(model.config, "hidden_act", None) == "silu"
    if wanted == "none" or not fits or not silu or not ONEDNN or not takes_autocast():
        return False
    exact = embedding_gradient(model, "shared_prompt", None)
    before = [type(module) for module in changed]
    for module in changed:
        module.__class__ = OWN[type(module)]
    # padded rows are computed by transformers' layers
    if not (why := objection(model, partial(disagreement, model, "shared_prompt", None))):
        why = not_parallel(exact, embedding_gradient(model, "shared_prompt", None))
    if not why:
        return True
    for module, own in zip(changed, before, strict=True):
        module.__class__ = own
    log.warning("model.kernels: %s keeps transformers' layers: %s", type(model).__name__, why)
    return False
