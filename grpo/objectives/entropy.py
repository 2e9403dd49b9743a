"""A bonus for the policy's entropy, in nats, with a fixed or an adaptive coefficient."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo.system.errors import UserError
from grpo.system.ranges import NonNegative, Positive, enforced


@enforced("EntropyBonus")
@dataclass(frozen=True)
class EntropyBonus:
    """Settings: coef times the entropy is subtracted from every token's loss. With a target (mean over an update's tokens) the
    coefficient moves after every update, between 0 and `most`: up by `step` if the entropy is at or below the target, else down.
    It is applied only if the last entropy was at or below the target (Skywork-OR1, arXiv 2505.22312)."""

    coef: NonNegative = 0.0
    target: NonNegative | None = None
    step: Positive = 0.005
    most: NonNegative = 1.0

    def __post_init__(self) -> None:
        if self.most < self.coef:
            raise UserError(f"EntropyBonus.coef={self.coef} must be at most EntropyBonus.most={self.most}")

    @property
    def active(self) -> bool:
        """Whether the loss has an entropy bonus."""
        return self.coef > 0 or self.target is not None


class EntropyController:
    """Moves the coefficient from update to update. Mutable: keeps the coefficient and the mean entropy of the last update."""

    def __init__(self, settings: EntropyBonus) -> None:
        self.settings, self.coef, self.entropy = settings, settings.coef, math.inf

    @property
    def alpha(self) -> float:
        """The coefficient that the next update applies."""
        target = self.settings.target
        return self.coef if target is None or self.entropy <= target else 0.0

    def update(self, entropy: float | None) -> None:
        """Move the coefficient after an update. entropy: mean over its tokens; None: it had none, the last entropy is kept."""
        s = self.settings
        self.entropy = self.entropy if entropy is None else entropy
        if s.target is not None:
            below = self.entropy <= s.target
            self.coef = min(self.coef + s.step, s.most) if below else max(self.coef - s.step, 0.0)

    def state_dict(self) -> dict[str, float]:
        return {"entropy_coef": self.coef, "last_entropy": self.entropy, "first_entropy_coef": self.settings.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        s, self.entropy = self.settings, state["last_entropy"]
        if s.target is not None and state.get("first_entropy_coef", s.coef) == s.coef:
            self.coef = min(state["entropy_coef"], s.most)
