"""Quantization: a frozen base whose matrices are stored in 4 or 8 bits, under an adapter that learns (QLoRA, arXiv 2305.14314).

A pass computes with the stored values in the number type of the model, so that sampling, training and a merge with the adapter
use the same base. bitsandbytes' own layers do not: in evaluation mode those of 8 bits round activations too, with outliers that
depend on the batch, and on some CPUs those of 4 bits change their storage.
"""

from typing import Any

import torch
from torch import Tensor, nn

from grpo.models.pretrained import Bits
from grpo.system.errors import UserError

BLOCK, OF_SCALES = 64, 256  # weights that share a scale, and scales that share one


class Quantized(nn.Linear):
    """A frozen linear layer in 4 bits (NF4 with double quantization) or in 8 (a scale for each row).

    weight: the stored codes, uint8 [in * out / 2, 1] or int8 [out, in]. 4 bits take 0.516 bytes a weight: a half, a byte for the
    scale of 64, and 4 bytes for 256 scales.
    """

    def __init__(self, linear: nn.Linear, bits: Bits) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = linear.weight.shape
        self.bits, self.bias, self.dtype = bits, linear.bias, linear.weight.dtype
        parts = (in_4_bits if bits == "4bit" else in_8_bits)(linear.weight.detach())
        self.weight = nn.Parameter(parts.pop("weight"), requires_grad=False)
        for name, part in parts.items():
            self.register_buffer(name, part, persistent=False)

    def dequantized(self) -> Tensor:
        """Return the weight that the codes stand for, [out, in], in the number type of the model."""
        if self.bits == "8bit":
            return (self.weight * self.scale).to(self.dtype)
        stored, shape = torch.ops.bitsandbytes, (self.out_features, self.in_features)
        scale = stored.dequantize_blockwise(self.scale, self.scale_of_scales, self.code, OF_SCALES, torch.float32)
        return stored.dequantize_4bit(self.weight, scale + self.mean, BLOCK, "nf4", shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b. x: [..., in]."""
        product = Product.apply(x, self)
        return product if self.bias is None else product + self.bias


class Product(torch.autograd.Function):
    """x W^T, [..., out], for x, [..., in]. The backward pass makes W, [out, in], from its codes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Quantized) -> Tensor:
        ctx.layer = layer
        return x @ layer.dequantized().T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.dequantized().to(gradient.dtype), None


def in_8_bits(weight: Tensor) -> dict[str, Tensor]:
    """Return the codes, [out, in] int8, and the scales, [out, 1], of a matrix, [out, in], each row scaled to -127 to 127."""
    scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "scale": scale}


def in_4_bits(weight: Tensor) -> dict[str, Tensor]:
    """Return the parts of a matrix, [out, in], in n = out x in / 64 blocks: its codes, [out x in / 2, 1] uint8; the scales of its
    blocks in 8 bits, [n] uint8; and what decodes these: scale_of_scales, [n / 256 rounded up], the table code, [256], and the
    mean. Raises UserError without bitsandbytes."""
    try:
        from bitsandbytes.functional import create_dynamic_map
    except ImportError as error:
        raise UserError("model.quantization=4bit needs bitsandbytes: pip install -e '.[8bit]'") from error
    with torch.device("cpu"):  # it reads its numbers, which tensors without memory lack
        code = create_dynamic_map().to(weight.device)
    codes, scale = torch.ops.bitsandbytes.quantize_4bit(weight.contiguous(), BLOCK, "nf4", torch.uint8)
    mean = scale.mean()
    scale, scale_of_scales = torch.ops.bitsandbytes.quantize_blockwise(scale - mean, code, OF_SCALES)
    return {"weight": codes, "scale": scale, "scale_of_scales": scale_of_scales, "code": code, "mean": mean}


def quantize(model: nn.Module, bits: Bits) -> nn.Module:
    """Quantize the linear layers of a model in place, except its head, and freeze the rest. Raises UserError if it has none."""
    head = model.get_output_embeddings()
    chosen = [name for name, layer in model.named_modules() if type(layer) is nn.Linear and layer is not head]
    if not chosen:
        raise UserError(
            f"model.quantization={bits}: {type(model).__name__} has no linear layers of torch: set it to null"
        )
    for name in chosen:
        model.set_submodule(name, Quantized(model.get_submodule(name), bits))
    return model.requires_grad_(False)
