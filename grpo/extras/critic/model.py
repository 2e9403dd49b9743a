"""The critic: V of the state before each sampled token, by a value head on the last hidden states of the policy or of a model of
its own.

A hidden state that predicts a token has seen everything before it, so V does not know the token: it is a baseline.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo.models.logprobs import Layout
from grpo.models.packed_attention import Kernel
from grpo.models.packing import few_tokens
from grpo.models.states import states_before
from grpo.system.distributed import computes_in, one_pass


class Critic(nn.Module):
    """A value head, and the model below it if that is not the policy. All values are 0 at the start.

    model: a decoder without a head, as `get_decoder` returns it. width: of its hidden states, or the policy's.
    """

    def __init__(self, width: int, dtype: torch.dtype, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model, self.head = model, ValueHead(width, dtype)


class ValueHead(nn.Module):
    """V = w h / |h| + b, in float32, so that one learning rate suits small and large states. dtype: of w and b."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (width, 1))

    def forward(self, states: Tensor) -> Tensor:
        """Return values, [n] float32. states: [n, width]."""
        with torch.autocast(states.device.type, enabled=False):
            return F.normalize(states.float(), dim=1) @ self.weight.float() + self.bias.float()


def states_disagreement(model: nn.Module, layout: Layout, kernel: Kernel | None) -> str:
    """Describe how far a layout's hidden states of a few tokens are from the padded ones. Empty if the mean error is at most 1e-4
    of the mean state in float32, or a tenth in 16 bits."""
    batch = few_tokens(model)
    with torch.autocast(batch.ids.device.type, enabled=False):
        exact = one_pass(model, states_before, batch)
        gap = (one_pass(model, states_before, batch, layout, kernel) - exact).abs().mean() / exact.abs().mean()
    return "" if gap <= (1e-4 if computes_in(model) == torch.float32 else 0.1) else f"hidden states differ by {gap:.2g}"
