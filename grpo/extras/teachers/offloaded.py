"""A frozen teacher whose weights are in the host's memory between its passes (teacher.offload=true).

A rollout's tokens are few beside a teacher's weights. So the weights go to the device once for all rows of a rollout, and what
stays of it are the states before the tokens, from which the head makes the distributions again in each update.
Shapes: N tokens of the rollout, B rows, C completion tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo.extras.teachers.divergence import Distributions, own_head
from grpo.models.logprobs import Layout
from grpo.models.packed_attention import Kernel
from grpo.models.packing import in_microbatches
from grpo.models.states import states_before
from grpo.objectives.batch import TokenBatch
from grpo.system.memory import PINNED, sent


@contextmanager
def visiting(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Give a frozen model its weights on a device until the end of the `with`.

    The host's memory keeps them, pinned where the device is CUDA's. The copies on the device are dropped and never copied back,
    except for a buffer that a pass has replaced.
    """
    parts = [held for part in model.modules() for held in (part._parameters, part._buffers)]
    home = [
        (held, name, x)
        for held in parts
        for name, x in held.items()
        if x is not None and x.device != device and not x.is_meta
    ]
    there: dict[int, Tensor] = {}  # by the host's tensor: tied ones stay tied
    try:
        for held, name, x in home:
            if id(x) not in there:
                there[id(x)] = on_its_way(x, device)
            held[name] = there[id(x)]
        yield model
    finally:
        for held, name, x in home:
            replaced = held[name] is not there.get(id(x), x) and held[name] is not x
            held[name] = held[name].to(x.device) if replaced else x


def on_its_way(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a frozen tensor on a device. It is queued, so x must not change."""
    if device.type in PINNED and x.device.type == "cpu" and not x.is_pinned():
        x.data = x.data.pin_memory()  # once: later copies take this memory
    copy = sent(x.detach(), device)
    return nn.Parameter(copy, requires_grad=False) if isinstance(x, nn.Parameter) else copy


@dataclass(frozen=True)
class Kept:
    """The predictions of a frozen model at the tokens of a rollout. model: without weights on the device. head: on the device.
    states: [N, hidden], in the host's memory. place: the index of a token in them, [B, C]."""

    model: nn.Module
    head: nn.Module
    states: Tensor
    place: Tensor
    device: torch.device

    def at(self, read: TokenBatch) -> Distributions:
        """Return the predictions at the tokens of the mask of these rows."""
        host = read.host or read
        mask = host.mask.cpu()
        places = self.place[host.row.cpu(), : mask.shape[1]][mask]
        return Distributions(self.model, sent(self.states[places], self.device), self.head)


@torch.no_grad()
def kept_of(
    model: nn.Module, read: TokenBatch, layout: Layout, kernel: Kernel | None, most: int, device: torch.device
) -> Kept:
    """Return what a model on the device predicts at the tokens of the mask, by passes of at most `most` tokens."""
    head, host = own_head(model), read.host or read
    mask, row = host.mask.cpu(), host.row.cpu()
    place = torch.zeros(int(row.max()) + 1, mask.shape[1], dtype=torch.int64)
    states, filled = torch.empty(0, head.in_features, dtype=head.weight.dtype), 0
    for _, rows in in_microbatches(read.to(device), mask.any(1).nonzero()[:, 0], layout, most):
        found, host = states_before(model.get_decoder(), rows, layout, kernel), rows.host or rows
        if not filled:
            pinned = device.type in PINNED
            states = torch.empty(int(mask.sum()), found.shape[1], dtype=found.dtype, pin_memory=pinned)
        of_pass = slice(filled, filled + len(found))
        states[of_pass].copy_(found, non_blocking=device.type != "mps")
        r, c = host.mask.cpu().nonzero().T
        place[host.row.cpu()[r], c] = torch.arange(of_pass.start, of_pass.stop)
        filled = of_pass.stop
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # the copies to the host are queued
    return Kept(model, head, states, place, device)
