"""A clock that stands while a process waits for a core, so that a time limit means the same on a busy machine."""

import time
from pathlib import Path

LEAST = 0.05  # of a core; a process that gets less is counted as if it had this much, so every limit ends


def times(thread: int, process: int | str = "self") -> tuple[float, float] | None:
    """Return the seconds that a thread has run and that it waited for a core; None if the system does not report them (Linux
    does)."""
    try:
        ran, waited, _ = Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(ran) / 1e9, int(waited) / 1e9


class Clock:
    """Counts the seconds since it was made, without those in which one of these processes waited for a core. It looks at their
    main threads alone. Where the system does not report waits, all seconds count."""

    def __init__(self, *processes: int) -> None:
        self.processes, self.begun = processes, time.monotonic()
        self.waits: dict[int, float] = {}  # of a process that has ended, the last that was seen
        self.before = self._waited()

    def spent(self) -> float:
        """Return the seconds until now."""
        wall = time.monotonic() - self.begun
        return max(wall - (self._waited() - self.before), wall * LEAST)

    def _waited(self) -> float:
        for process in self.processes:
            if seconds := times(process, process):
                self.waits[process] = seconds[1]  # those of waiting for a core
        return sum(self.waits.values())
