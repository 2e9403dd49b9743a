"""How far the run is, and numbers that change with it. Rewards and advantages that name `progress` get it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo.system.errors import UserError


@dataclass(frozen=True)
class Progress:
    """rollout: the number of the rollout that is being sampled, from 0; it stays where it was during evaluations.
    num_rollouts: of the whole run."""

    rollout: int = 0
    num_rollouts: int = 1

    @property
    def share(self) -> float:
        """The share of the run that lies behind, from 0 up to 1."""
        return self.rollout / self.num_rollouts


BEGIN = Progress()
_now = [BEGIN]  # one rollout is sampled at a time


def progress() -> Progress:
    """Return how far the run is."""
    return _now[0]


def set_progress(rollout: int, num_rollouts: int) -> None:
    """Note that this rollout is being sampled."""
    _now[0] = Progress(rollout, num_rollouts)


SCHEDULES: dict[str, Callable[[float], float]] = {  # from the share of the way to the share of the change
    "linear": lambda share: share,
    "cosine": lambda share: (1 - math.cos(math.pi * share)) / 2,
    "step": lambda share: float(share >= 1),
}


def scheduled(value: float | Mapping[str, Any], key: str) -> Callable[[Progress], float]:
    """Return a number as a function of the progress. value: a number, or {schedule: linear, from: 0.5, to: 0}, which reaches `to`
    when the share `until` of the run is over (1 if it is left out). key: names it in messages."""
    if not isinstance(value, Mapping):
        return lambda now: value
    numbers = {"until": 1.0, **value}
    kind = numbers.pop("schedule", None)
    complete = numbers.keys() == {"from", "to", "until"}
    if kind not in SCHEDULES or not complete or not all(isinstance(x, int | float) for x in numbers.values()):
        allowed = f"{{schedule: {' or '.join(SCHEDULES)}, from: 0.5, to: 0}}, and perhaps until: 0.3"
        raise UserError(f"{key}={dict(value)} is neither a number nor {allowed}")
    start, end, until = numbers["from"], numbers["to"], numbers["until"]
    if not 0 < until <= 1:
        raise UserError(f"{key}: until={until} must be above 0 and at most 1: it is a share of the run")
    return lambda now: start + (end - start) * SCHEDULES[kind](min(now.share / until, 1.0))
