"""Uses of the policy's entropy, in nats: a bonus with a fixed or a steered coefficient, and a choice of tokens."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from grpo.system.errors import UserError


@dataclass(frozen=True)
class EntropyBonus:
    """Settings: coef times the entropy comes off every token's loss. With a target (mean over an update's tokens) the coefficient
    moves after every update: up by `step` where the entropy is at or below the target, else down, between 0 and `most`; and it
    is applied only while the last entropy was at or below the target (Skywork-OR1, arXiv 2505.22312)."""

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


class EntropyController:
    """The bonus from update to update. Mutable: keeps the coefficient, and the mean entropy of the last update."""

    def __init__(self, settings: EntropyBonus) -> None:
        self.settings, self.coef, self.entropy = settings, settings.coef, math.inf

    @property
    def alpha(self) -> float:
        """The coefficient that the next update applies."""
        target = self.settings.target
        return self.coef if target is None or self.entropy <= target else 0.0

    def update(self, entropy: float | None) -> None:
        """After an update. entropy: its mean over the update's tokens; None: it had no tokens, and the last entropy is kept."""
        s = self.settings
        self.entropy = self.entropy if entropy is None else entropy
        if s.target is not None:
            below = self.entropy <= s.target
            self.coef = min(self.coef + s.step, s.most) if below else max(self.coef - s.step, 0.0)

    def state_dict(self) -> dict[str, float]:
        return {"entropy_coef": self.coef, "last_entropy": self.entropy}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coef, self.entropy = state["entropy_coef"], state["last_entropy"]


def threshold(entropies: Tensor, share: float) -> float:
    """The entropy that the upper `share` of the tokens reaches: there the policy decides (arXiv 2506.01939). entropies: [n]."""
    return float(np.quantile(entropies.double().numpy(), 1 - share)) if len(entropies) else 0.0
