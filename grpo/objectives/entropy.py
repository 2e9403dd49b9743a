"""What the policy's entropy is used for: a bonus, fixed or steered, and a choice of tokens. Entropies are in nats."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from grpo.system.errors import UserError


@dataclass(frozen=True)
class EntropyBonus:
    """Takes coef times the entropy off every token's loss.

    With a target (mean over the tokens of an update) the coefficient moves after every update: up by `step` where the entropy
    is at or below the target, else down, between 0 and `most`; and it is applied only while the entropy of the last update was
    at or below the target (Skywork-OR1, arXiv 2505.22312).
    """

    coef: float = 0.0
    target: float | None = None
    step: float = 0.005
    most: float = 1.0

    def __post_init__(self) -> None:
        numbers = (self.coef, self.step, self.most, 0.0 if self.target is None else self.target)
        if not all(isinstance(number, int | float) for number in numbers):
            raise UserError("algo.entropy: coef, step and most are numbers, target is one or null")
        if self.coef < 0 or self.step <= 0 or self.most < self.coef:
            raise UserError("algo.entropy: coef must be at least 0 and at most `most`, and step above 0")

    @property
    def active(self) -> bool:
        return self.coef > 0 or self.target is not None

    def applied(self, coef: float, entropy: float) -> float:
        """The coefficient of the next update. entropy: that of the last one, inf before the first."""
        return coef if self.target is None or entropy <= self.target else 0.0

    def steered(self, coef: float, entropy: float) -> float:
        """The coefficient after an update in which the mean entropy was `entropy`."""
        if self.target is None:
            return coef
        return min(coef + self.step, self.most) if entropy <= self.target else max(coef - self.step, 0.0)


def threshold(entropies: Tensor, share: float) -> float:
    """The entropy that the upper `share` of the tokens reaches: there the policy decides (arXiv 2506.01939). entropies: [n]."""
    return float(np.quantile(entropies.double().numpy(), 1 - share)) if len(entropies) else 0.0
