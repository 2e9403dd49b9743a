"""The result of a check of the preflight."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from grpo.objectives.batch import TokenBatch

COARSE = 1e-4  # a relative precision: number types of 16 bits have less


@dataclass(frozen=True)
class Checked:
    """The result of a check. compared: the numbers, or the reason for a SKIP. remedy: what to do about a FAIL or a WARN,
    which does not stop the run. WAIVED: the user has left the check out. seconds: time."""

    result: Literal["PASS", "WARN", "FAIL", "SKIP", "WAIVED"]
    compared: str
    remedy: str = ""
    seconds: float = 0.0


def pass_or_fail(good: bool, compared: str, remedy: str) -> Checked:
    """Return PASS or FAIL."""
    return Checked("PASS", compared) if good else Checked("FAIL", compared, remedy)


def mean_gap(one: Tensor, two: Tensor, tokens: TokenBatch) -> float:
    """Return the mean difference of the log-probabilities of sampled tokens. one, two: [B, C]."""
    return float((one - two)[tokens.mask].abs().mean())
