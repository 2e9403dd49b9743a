"""Optimizers that are more than one constructor of torch: Muon with AdamW beside it, and AdamW in 8 bits."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from grpo.system.errors import UserError

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
            part.param_groups, part.state = [group], self.state  # a checkpoint may have brought others
            part.step()


def muon(
    parameters: Named,
    lr: float,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    adamw_for: Sequence[str] = (),
) -> Optimizer:
    """Muon (kellerjordan.github.io/posts/muon) for matrices, with updates of the size that AdamW's have (arXiv 2502.16982); AdamW
    for what has one dimension, or in its name one of `adamw_for`: embeddings and the head."""
    rest, matrices = [], []
    for name, p in parameters:
        (matrices if p.ndim == 2 and not any(part in name for part in adamw_for) else rest).append((name, p))
    parts: list[Optimizer] = []
    if matrices:
        parts.append(Muon(matrices, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"))
    if rest:
        parts.append(AdamW(rest, lr, tuple(betas), weight_decay=weight_decay, fused=True))
    return Together(parts)


def adamw_8bit(parameters: Named, lr: float, **kwargs) -> Optimizer:
    """AdamW with both moments in 8 bits, in blocks of 256 with a scale each (arXiv 2110.02861); those of fewer than 4096 numbers
    stay in float32. kwargs: of bitsandbytes.optim.AdamW8bit."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UserError("AdamW in 8 bits needs bitsandbytes: pip install -e '.[8bit]'") from error

    class AdamW8bitHooked(AdamW8bit):
        """Its own load_state_dict leaves out torch's hooks, and with them the masters."""

        def load_state_dict(self, state_dict: dict) -> None:
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                hook(self, state_dict)
            super().load_state_dict(state_dict)

    return AdamW8bitHooked(parameters, lr, **kwargs)
