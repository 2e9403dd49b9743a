"""Masters: float32 copies of parameters. The optimizer updates the copies.

Of parameters in 16 bits, where a step below half the distance to the next number is rounded away: in bfloat16 that distance is
1/256 to 1/128 of a weight, and a step of AdamW is about the learning rate (arXiv 1710.03740 sec. 3.1). And of all of them where
the copies, their gradients and what the optimizer keeps are to be in the CPU's memory (arXiv 2101.06840).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LOW = (torch.bfloat16, torch.float16)


def with_masters(
    parameters: Mapping[str, nn.Parameter],
    make_optimizer: Callable[[list[tuple[str, Tensor]]], Optimizer],
    offload: bool = False,
) -> Optimizer:
    """make_optimizer over a float32 master for each parameter in 16 bits; other parameters go in as they are. offload: over one
    on the CPU for each parameter whatever.

    A backward pass adds to the masters' gradients, in float32, and leaves none on the parameters. A step writes the masters
    into the parameters' own storage. The state_dict carries the masters; one without them leaves them as they are. A
    parameter has one such optimizer in its life, and DistributedDataParallel finds no gradients to bring together.
    """
    masters = {
        p: nn.Parameter(p.detach().to("cpu" if offload else p.device, torch.float32, copy=True))
        for p in parameters.values()
        if offload or p.dtype in LOW
    }
    optimizer = make_optimizer([(name, masters.get(p, p)) for name, p in parameters.items()])
    if not masters:
        return optimizer

    def lift(p: Tensor) -> None:  # in the backward pass, so that gradients of the parameters exist for one at a time
        master, grad = masters[p], p.grad.to(masters[p].device)
        if master.grad is None:
            master.grad = grad.float()
        else:
            master.grad += grad
        p.grad = None

    @torch.no_grad()
    def lower(*_) -> None:
        for p, master in masters.items():
            p.copy_(master)

    def gather(*_) -> None:  # Lightning moves what it has read to the trainer's device
        for master in masters.values():
            state = optimizer.state.get(master, {})
            state |= {name: value.to(master.device) for name, value in state.items() if isinstance(value, Tensor)}

    def save(_, state: dict) -> None:
        state["masters"] = [master.detach() for master in masters.values()]

    @torch.no_grad()
    def load(_, state: dict) -> None:
        if "masters" in state:
            for master, saved in zip(masters.values(), state["masters"], strict=True):
                master.copy_(saved)
            lower()

    for p in masters:
        p.register_post_accumulate_grad_hook(lift)
    if offload:
        optimizer.register_step_pre_hook(gather)
    optimizer.register_step_post_hook(lower)
    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)
    return optimizer
