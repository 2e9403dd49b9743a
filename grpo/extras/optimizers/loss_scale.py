"""The scale of the loss where passes compute in float16 (arXiv 1710.03740 sec. 3.2 and 3.3).

The numbers of float16 reach from 6e-8 to 65,504, and many gradients of activations are smaller: they would be 0. So the loss is
multiplied by a power of two before the backward pass, and the gradients, which are float32, are divided by it afterwards. If one
of them is infinite, the update is skipped and the scale is halved; after many updates without that the scale is doubled.
"""

import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo.models.master_weights import in_float16
from grpo.system import distributed
from grpo.system.ranges import Count, enforced

log = logging.getLogger(__name__)

LARGEST = 2.0**24


@enforced("optim.loss_scale")
@dataclass(frozen=True)
class LossScaling:
    """initial: the first scale; division by a power of two is exact. growth_interval: updates in a row whose gradient
    is finite, after which the scale is doubled."""

    initial: Count = 65536
    growth_interval: Count = 200

    def made(self) -> "LossScale":
        """Return the scale of a run, at its start."""
        return LossScale(self)


class LossScale:
    """The scale of a run; it is 1 for passes that do not compute in float16. Mutable: it changes with the updates.

    value: the scale. used: whether the latest loss was multiplied by it. halved: whether the latest update was skipped because
    the scale was too large. overflows: how many updates were. clean: updates since the scale has changed.
    """

    def __init__(self, settings: LossScaling) -> None:
        self.settings, self.value = settings, float(settings.initial)
        self.used = self.halved = False
        self.overflows = self.clean = 0
        self.losses: list[Tensor] = []  # of this update

    def scaled(self, loss: Tensor, model: nn.Module) -> Tensor:
        """Return what the backward pass begins with: the loss of this model, [], times the scale."""
        self.used = in_float16(model, loss.device.type)
        if self.used:
            self.losses.append(loss.detach())
        return loss * self.value if self.used else loss

    def unscale(self, learned: Iterable[Tensor]) -> None:
        """Divide the gradients of these parameters by the scale."""
        for p in learned if self.used else ():
            if p.grad is not None:
                p.grad.div_(self.value)

    def note(self, finite: bool) -> None:
        """Change the scale after an update. finite: whether its gradient is; on several devices this is that of their sum, so
        that all of them agree. A scale of 1 is not to blame, nor any scale if the loss itself is not finite."""
        self.halved = self.used and not finite and self.value > 1 and self.sound()
        self.losses = []
        self.clean = self.clean + 1 if self.used and finite else 0
        if self.halved:
            self.overflows += 1
            before, self.value = self.value, max(1.0, self.value / 2)
            numbers = before, self.value, self.overflows
            log.info(
                "loss scale %g is too large for float16: no step, from now on %g (%d such updates so far)", *numbers
            )
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")  # the schedule steps all the same
        elif self.clean >= self.settings.growth_interval:
            self.value, self.clean = min(LARGEST, self.value * 2), 0

    def sound(self) -> bool:
        """Return whether the losses of this update are finite on all devices."""
        return not distributed.all_sum((~torch.stack(self.losses).isfinite()).sum().float())

    def state_dict(self) -> dict[str, Any]:
        counts = {"clean": self.clean, "overflows": self.overflows}
        return {"value": self.value, "first_value": self.settings.initial} | counts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clean, self.overflows = state["clean"], state["overflows"]
        if state.get("first_value", self.settings.initial) == self.settings.initial:
            self.value = state["value"]
