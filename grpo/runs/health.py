"""Finds the metrics of a run that leave the range in which runs are well. The ranges are in grpo/system/metrics.py."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grpo.system.metrics import WATCHED


@dataclass(frozen=True)
class Finding:
    """After `rollout` rollouts a metric was out of its range; words: the bound, what it means, and what to do."""

    rollout: int
    metric: str
    value: float
    words: str


class Watch:
    """Follows the metrics of a run and finds each that leaves its range, once. Mutable: it counts."""

    def __init__(self) -> None:
        self.silent: set[str] = set()  # metrics to ignore, or already found
        self.unwell: Counter[str] = Counter()  # rollouts in a row

    def findings(self, rollout: int, metrics: Mapping[str, float]) -> Iterator[Finding]:
        """New findings in the metrics of the next rollout."""
        older = metrics.get("rollout/staleness", 0) > 0
        for metric in WATCHED:
            value = metrics.get(metric.name)
            high = metric.stale if older and metric.stale else metric.high
            if value is None or metric.low <= value <= high:
                self.unwell[metric.name] = 0
                continue
            self.unwell[metric.name] += 1
            if self.unwell[metric.name] >= metric.after and metric.name not in self.silent:
                self.silent.add(metric.name)
                bound = f"above {high:g}" if value > high else f"below {metric.low:g}"
                yield Finding(rollout, metric.name, value, f"{bound}: {metric.advice}")


def warnings_of(metrics: Mapping[int, Mapping[str, float]]) -> list[Finding]:
    """Every finding of a run with these metrics, by rollouts learned from: each metric once."""
    watch = Watch()
    return [finding for rollout, row in metrics.items() for finding in watch.findings(rollout, row)]
