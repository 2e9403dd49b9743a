"""Finds metrics that leave their healthy range. The ranges are in grpo/system/metrics.py."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grpo.system.metrics import WATCHED


@dataclass(frozen=True)
class Finding:
    """A metric that was out of its range after `rollout` rollouts. words: the bound, the meaning, and what to do. stops: it is
    so far out that the run should end."""

    rollout: int
    metric: str
    value: float
    words: str
    stops: bool = False


class Watch:
    """Follows the metrics of a run and reports each metric once when it leaves its range. Mutable: it counts."""

    def __init__(self) -> None:
        self.silent: set[str] = set()  # metrics to ignore or already reported
        self.unwell: Counter[str] = Counter()  # consecutive rollouts out of range, by metric

    def findings(self, rollout: int, metrics: Mapping[str, float]) -> Iterator[Finding]:
        """Yield the new findings in the metrics of the next rollout."""
        older = metrics.get("rollout/staleness", 0) > 0
        for metric in WATCHED:
            value = metrics.get(metric.name)
            high = metric.stale if older and metric.stale else metric.high
            if value is None or metric.low <= value <= high:
                self.unwell[metric.name] = 0
                continue
            self.unwell[metric.name] += 1
            stops = abs(value) > metric.stop
            if stops or (self.unwell[metric.name] >= metric.after and metric.name not in self.silent):
                self.silent.add(metric.name)
                bound = f"above {high:g}" if value > high else f"below {metric.low:g}"
                yield Finding(rollout, metric.name, value, f"{bound}: {metric.advice}", stops)


def warnings_of(metrics: Mapping[int, Mapping[str, float]]) -> list[Finding]:
    """Return all findings of a run, at most one for each metric. metrics: by the number of rollouts learned from."""
    watch = Watch()
    return [finding for rollout, row in metrics.items() for finding in watch.findings(rollout, row)]
