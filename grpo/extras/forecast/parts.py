"""Parts of a run's memory: their bytes, and when they are held."""

from collections.abc import Sequence
from dataclasses import dataclass

# when memory is held, and the moments of each of these phases, of which the fullest one counts
MOMENTS = {"update": ("passing", "scoring"), "rollout": ("rollout",)}


@dataclass(frozen=True)
class Part:
    """One part of a run's memory.

    size: bytes; None if unknown. remedy: the setting that makes it smaller. phase: when it is held: in a phase or a moment of
    MOMENTS; "": always. host: True if it is in the CPU's memory, whatever the device.
    """

    name: str
    size: int | None
    remedy: str = ""
    phase: str = ""
    host: bool = False


# on a CPU the process's own growth: code that loads later, and holes in the heap. A margin, measured by benchmarks/forecast.py
LATER = Part("process", 100_000_000)


def in_phases(parts: Sequence[Part]) -> dict[str, int]:
    """Return the most bytes of these parts in each phase; unknown ones count as 0."""
    return {phase: summed(at_peak(parts, phase)) for phase in MOMENTS}


def at_peak(parts: Sequence[Part], phase: str) -> list[Part]:
    """Return the parts that are held in the fullest moment of a phase."""
    moments = ([part for part in parts if part.phase in ("", phase, moment)] for moment in MOMENTS[phase])
    return max(moments, key=summed)


def summed(parts: Sequence[Part]) -> int:
    """Return the bytes of all these parts; unknown ones count as 0."""
    return sum(part.size or 0 for part in parts)


def largest_phase(parts: Sequence[Part]) -> int:
    """Return the most bytes that these parts take in a phase; unknown ones count as 0."""
    return max(in_phases(parts).values())


def human(size: int | None) -> str:
    """Return a number of bytes as text, in MB or GB."""
    if size is None:
        return "unknown"
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
