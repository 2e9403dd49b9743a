"""What a run leaves of its device for an engine with weights and a cache of its own."""

from dataclasses import dataclass

WORK = 2_000_000_000  # bytes that vLLM computes with beside weights and cache, on a GPU: a margin, not measured
SEQUENCES = 32  # that should fit into the cache at once


@dataclass(frozen=True)
class Room:
    """All in bytes, of one device. total: that it has. update, rollout: what the trainer holds in each phase.

    weights: those that the engine copies. sequence: the keys and values of the longest sequence; cache: those of a whole rollout
    of such sequences.
    """

    total: int
    update: int
    rollout: int
    weights: int
    sequence: int
    cache: int

    def share(self, may_sleep: bool) -> tuple[float, bool]:
        """Return the share of the device that the engine takes, and whether it sleeps during updates.

        It takes what an update leaves, at most what it can use. If that holds fewer than SEQUENCES sequences, it sleeps
        during updates, and takes what a rollout leaves.
        """
        wanted = self.weights + WORK + self.cache
        enough = self.weights + WORK + min(self.cache, SEQUENCES * self.sequence)
        sleeps = may_sleep and self.total - self.update < enough
        left = self.total - (self.rollout if sleeps else self.update)
        return max(0, min(wanted, left)) / self.total, sleeps

    def lacks(self, share: float) -> int:
        """Return the bytes that this share of the device is short of the weights and one sequence; 0 if it holds them."""
        return max(0, self.weights + WORK // 2 + self.sequence - round(share * self.total))
