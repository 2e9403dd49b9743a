"""How far the run is. Rewards that name `progress` get it."""

from dataclasses import dataclass


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
