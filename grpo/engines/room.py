"""A device that trainer and engine share: the engine takes a part that the run leaves."""

from dataclasses import dataclass

# bytes that vLLM computes with beside weights and cache, on a GPU: a margin, not measured
WORK = 2_000_000_000
SEQUENCES = 32  # that should fit into the cache at once
MOST = 0.9  # of a device


@dataclass(frozen=True)
class Room:
    """All in bytes, of one device. total: that it has. usable: those that trainer and engine may fill. update, rollout: what the
    trainer holds in each phase.

    weights: those of the engine. sequence: the keys and values of the longest sequence; cache: those of a
    whole rollout of such sequences. may_sleep: whether the engine has nothing to do during an update.
    """

    total: int
    usable: int
    update: int
    rollout: int
    weights: int
    sequence: int
    cache: int
    may_sleep: bool = True

    def share(self, sleeps: bool | None) -> tuple[float, bool]:
        """Return the share of the device that the engine takes, and whether it sleeps during updates.

        It takes what an update leaves, at most what it can use. If that holds fewer than SEQUENCES sequences,
        it sleeps during updates, and takes what a rollout leaves. sleeps: whether it does so in any case, or
        never; None: if it must.
        """
        wanted = self.weights + WORK + self.cache
        if sleeps is None:
            enough = self.weights + WORK + min(self.cache, SEQUENCES * self.sequence)
            sleeps = self.may_sleep and self.usable - self.update < enough
        left = self.usable - (self.rollout if sleeps else self.update)
        return max(0.0, min(MOST, wanted / self.total, left / self.total)), sleeps

    def lacks(self, share: float) -> bool:
        """Return whether this share of the device is too small for the weights and one sequence."""
        return share * self.total < self.weights + WORK / 2 + self.sequence
