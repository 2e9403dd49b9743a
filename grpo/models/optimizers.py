"""Optimizers that torch does not provide: Muon together with AdamW, and AdamW in 8 bits."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from grpo.system.errors import UserError
from grpo.system.ranges import NonNegative, ShareBelow1

Named = Iterable[tuple[str, Tensor]]  # as Module.named_parameters gives them


class Together(Optimizer):
    """Several optimizers as one, each with a single group of parameters. Schedules and checkpoints see one optimizer."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state  # a checkpoint may have replaced them
            part.step()


def muon(
    parameters: Named,
    lr: NonNegative,
    momentum: ShareBelow1 = 0.95,
    betas: tuple[ShareBelow1, ShareBelow1] = (0.9, 0.99),
    weight_decay: NonNegative = 0.0,
    adamw_for: Sequence[str] = (),
) -> Optimizer:
    """Return Muon (kellerjordan.github.io/posts/muon) for matrices, with updates as large as AdamW's (arXiv 2502.16982), and
    AdamW for other parameters and for those whose name contains one of `adamw_for` (embeddings and the head)."""
    rest, matrices = [], []
    for name, p in parameters:
        (matrices if p.ndim == 2 and not any(part in name for part in adamw_for) else rest).append((name, p))
    parts: list[Optimizer] = []
    if matrices:
        parts.append(Muon(matrices, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"))
    if rest:
        parts.append(AdamW(rest, lr, tuple(betas), weight_decay=weight_decay, fused=True))
    return Together(parts)


def adamw_8bit(parameters: Named, lr: NonNegative, **kwargs) -> Optimizer:
    """Return AdamW with both moments in 8 bits, in blocks of 256 with one scale each (arXiv 2110.02861); moments of fewer than
    4096 numbers stay in float32. kwargs: arguments of bitsandbytes.optim.AdamW8bit."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UserError("AdamW in 8 bits needs bitsandbytes: pip install -e '.[8bit]'") from error

    class AdamW8bitHooked(AdamW8bit):
        """AdamW8bit, whose load_state_dict also runs torch's hooks: they load the masters."""

        def load_state_dict(self, state_dict: dict) -> None:
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                hook(self, state_dict)
            super().load_state_dict(state_dict)

    return AdamW8bitHooked(parameters, lr, **kwargs)
