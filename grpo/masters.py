"""Layer 1 - masters: float32 copies of parameters in 16 bits. The optimizer updates the copies.

A step below half the distance to the next number is rounded away: in bfloat16 that distance is 1/256 to 1/128 of a weight,
and a step of AdamW is about the learning rate (arXiv 1710.03740 sec. 3.1).
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LOW = (torch.bfloat16, torch.float16)


def with_masters(parameters: Iterable[nn.Parameter], make_optimizer: Callable[[list[Tensor]], Optimizer]) -> Optimizer:
    """make_optimizer over a float32 master for each parameter in 16 bits; other parameters go in as they are.

    A backward pass adds to the masters' gradients, in float32, and leaves none on the parameters. A step writes the masters
    into the parameters' own storage. The state_dict carries the masters; one without them leaves them as they are. A
    parameter has one such optimizer in its life, and DistributedDataParallel finds no gradients to bring together.
    """
    parameters = list(parameters)
    masters = {p: nn.Parameter(p.detach().float()) for p in parameters if p.dtype in LOW}
    optimizer = make_optimizer([masters.get(p, p) for p in parameters])
    if not masters:
        return optimizer

    def lift(p: Tensor) -> None:  # in the backward pass, so that gradients in 16 bits exist for one parameter at a time
        master = masters[p]
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad += p.grad
        p.grad = None

    @torch.no_grad()
    def lower(*_) -> None:
        for p, master in masters.items():
            p.copy_(master)

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
    optimizer.register_step_post_hook(lower)
    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)
    return optimizer
