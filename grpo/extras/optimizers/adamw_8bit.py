"""The optimizer that torch does not provide: AdamW in 8 bits."""

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from grpo.system.errors import UserError
from grpo.system.ranges import NonNegative

Named = Iterable[tuple[str, Tensor]]  # as Module.named_parameters gives them


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
