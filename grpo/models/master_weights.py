"""Masters: float32 copies of parameters, which the optimizer updates.

16-bit parameters need them: rounding loses a step below half the distance to the next number. In bfloat16
that distance is 1/256 to 1/128 of a weight, and a step of AdamW is about the learning rate (arXiv 1710.03740
sec. 3.1). With offloading every parameter has a master: the masters, their gradients and the optimizer's
state stay in the CPU's memory (arXiv 2101.06840).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from grpo.system.distributed import computes_in

LOW = (torch.bfloat16, torch.float16)


def with_masters(
    parameters: Mapping[str, nn.Parameter],
    make_optimizer: Callable[[list[tuple[str, Tensor]]], Optimizer],
    offload: bool = False,
) -> Optimizer:
    """Return make_optimizer's optimizer of float32 masters for the 16-bit parameters, and of the other
    parameters themselves.

    offload: every parameter has a master, on the CPU. A backward pass adds to the masters' gradients, in
    float32, and leaves none on the parameters. A step copies the masters into the parameters' own storage.
    The state_dict contains the masters; loading one without them does not change them. A parameter can have
    only one such optimizer, ever. DistributedDataParallel finds no gradients to sum.
    """
    masters = {
        p: nn.Parameter(p.detach().to("cpu" if offload else p.device, torch.float32, copy=True))
        for p in parameters.values()
        if offload or p.dtype in LOW
    }
    optimizer = make_optimizer([(name, masters.get(p, p)) for name, p in parameters.items()])
    if not masters:
        return optimizer

    # not float32 parameters under autocast: every pass would cast every weight, and need both
    # runs in the backward pass, so that only one parameter has a gradient at a time
    def lift(p: Tensor) -> None:
        master, grad = masters[p], p.grad.to(masters[p].device)
        if master.grad is None:
            master.grad = grad.float()
        else:
            master.grad += grad
        p.grad = None

    @torch.no_grad()
    def lower(*_) -> None:  # in few kernels
        torch._foreach_copy_([*masters], [*masters.values()])

    def gather(*_) -> None:  # Lightning moves a loaded state to the trainer's device
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


def in_float16(model: nn.Module, device: str) -> bool:
    """Return whether a pass of the model would compute in float16 now, by its number type or by autocast. device: its type."""
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else computes_in(model)
    return dtype == torch.float16
