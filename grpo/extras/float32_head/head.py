"""A head that computes logits in float32, below a decoder in 16 bits.

In bfloat16 a number has 8 bits: a logit between 16 and 32 is a multiple of 1/8. Sampler and trainer compute the same logit in a
different order, and then round it to different neighbours. Here states and matrix keep their number type, and their product is
not rounded. vLLM's float32 head does the same.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from grpo.models.head import chunks_of
from grpo.system.errors import UserError

AT_ONCE = 1 << 24  # numbers of the matrix in float32 at a time, 64 MiB, where a product of 16 bits cannot be in float32


class Float32Head(nn.Linear):
    """A linear head whose logits are float32, whatever its own number type and whatever autocast says.

    The states get the number type of the matrix: under autocast a float32 matrix is used as it is. Gradients are products in
    this number type, as those of other layers.
    """

    def forward(self, states: Tensor) -> Tensor:
        """Return logits, [..., V] float32. states: [..., hidden]."""
        rows = states.flatten(0, -2).to(self.weight.dtype)
        logits = ExactProduct.apply(rows, self.weight).view(*states.shape[:-1], len(self.weight))
        return logits if self.bias is None else logits + self.bias

    @staticmethod
    def float32_product(states: Tensor, weight: Tensor) -> Tensor:
        """Return states weight^T, [n, V] float32. states: [n, hidden]; weight: [V, hidden], in the same number type. Neither
        autograd nor autocast may be on."""
        if states.dtype == torch.float32:
            return F.linear(states, weight)
        if states.is_cuda:  # it reads 16 bits and adds up in float32
            return torch.mm(states, weight.T, out_dtype=torch.float32)
        logits = states.new_empty(len(states), len(weight), dtype=torch.float32)
        for at in chunks_of(len(weight), max(1, AT_ONCE // weight.shape[1])):
            torch.mm(states.float(), weight[at].float().T, out=logits[:, at])
        return logits


class ExactProduct(Function):
    """`float32_product` with its gradient. Autograd would keep the matrix in float32, and make a gradient of that size."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        with torch.autocast(states.device.type, enabled=False):
            return Float32Head.float32_product(states, weight)

    @staticmethod
    def backward(ctx: Any, of_logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        of_logits, (of_states, of_weight) = of_logits.to(weight.dtype), ctx.needs_input_grad
        with torch.autocast(states.device.type, enabled=False):
            return of_logits @ weight if of_states else None, of_logits.T @ states if of_weight else None


def in_float32(model: nn.Module, dtype: str | None = "float32") -> nn.Module:
    """Let the head of a model compute in float32, in place; its parameters stay, tied or not. Raises UserError if it is no
    linear layer of torch. dtype: None lets one that did so compute as the model does."""
    head = model.get_output_embeddings()
    if dtype is None:
        if type(head) is Float32Head:
            head.__class__ = nn.Linear
        return model
    if type(head) not in (nn.Linear, Float32Head):
        line = f"head_dtype=float32 needs a linear layer as the head, and that of {type(model).__name__}"
        raise UserError(f"{line} is {type(head).__name__}: set it to null")
    head.__class__ = Float32Head
    return model
