"""Finds metrics that leave their healthy range. The ranges are in grpo/system/metrics.py."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Literal

from grpo.system.metrics import WATCHED, Metric

WINDOW = 10  # rollouts of a median, and of a mean
RISEN = 1.5  # times the first entropy, from which filtered answers are worth a word
TAUGHT = {"teacher/divergence", "imitation/loss"}  # metrics of runs that learn from more than rewards
Metrics = Mapping[str, float]
Interval = tuple[float, float]
Bounds = Mapping[str, Mapping[Literal["low", "high", "after", "stop"], float]]  # by metric; see `Metric`
OWN = "a bound of callbacks.health.bounds"


@dataclass(frozen=True)
class Finding:
    """A metric that was out of its range after `rollout` rollouts. words: the bound, the meaning, and what to do. stops: it is
    so far out that the run should end."""

    rollout: int
    metric: str
    value: float
    words: str
    stops: bool = False


@dataclass
class Watch:
    """Follows the metrics of a run and reports each metric once when it leaves its range. Mutable: it counts.

    rounding: the difference of log-probabilities that rounding explains, in nats, as the preflight measured it. None: unknown.
    bound: the largest staleness that the plan allows, in versions; at least 1.
    silent: metrics to ignore or already reported. unwell: consecutive rollouts out of range, by metric. recent: the last values
    of metrics that may jump. falling: the (value, reward) of this window of rollouts. best: the best means of such a window; for
    eval/accuracy the best value and the low end of its interval, for teacher/divergence the first value, for rollout/filtered the
    first entropy. floor: the low bounds that follow from it, until the next window is full. own: `Bounds` of the user.
    """

    rounding: float | None = None
    bound: int = 1
    silent: set[str] = field(default_factory=set)
    unwell: Counter[str] = field(default_factory=Counter)
    recent: dict[str, list[float]] = field(default_factory=dict)
    falling: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    best: dict[str, tuple[float, float]] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    own: Bounds = field(default_factory=dict)

    def findings(self, rollout: int, metrics: Metrics, interval: Interval | None = None) -> Iterator[Finding]:
        """Yield the new findings in the metrics of the next rollout. interval: of eval/accuracy."""
        names = {metric.name for metric in WATCHED}
        more = [Metric(name, "number", "", advice=OWN) for name in self.own if name not in names]
        for metric in (*WATCHED, *more):
            value = metrics.get(metric.name)
            if value is None or (metric.name == "eval/accuracy" and math.isnan(value)):
                self.unwell[metric.name] = 0
                continue
            metric = self.bounded(metric, value, metrics, interval)
            if own := self.own.get(metric.name):
                metric = replace(metric, **own)
                metric = replace(metric, low=max(metric.low, -metric.stop), high=min(metric.high, metric.stop))
            if metric.low <= value <= metric.high:
                self.unwell[metric.name] = 0
                continue
            self.unwell[metric.name] += 1
            stops = abs(value) > metric.stop
            if stops or (self.unwell[metric.name] >= metric.after and metric.name not in self.silent):
                self.silent.add(metric.name)
                bound = f"above {metric.high:g}" if not value < metric.low else f"below {metric.low:g}"
                yield Finding(rollout, metric.name, value, f"{bound}: {metric.advice}", stops)

    def bounded(self, metric: Metric, value: float, metrics: Metrics, interval: Interval | None) -> Metric:
        """Return the metric with the bounds of this run and rollout."""
        if metric.name == "eval/accuracy" and interval:
            best = tuple(self.best.get(metric.name, (0.0, 0.0)))  # a checkpoint makes it a list
            _, low = self.best[metric.name] = max(best, (value, interval[0]))
            return replace(metric, low=round(low, 3)) if interval[1] < low else metric
        if (
            metric.name == "teacher/divergence" and value
        ):  # an estimate may be negative, but it is 0 of equal models alone
            start, _ = self.best.setdefault(metric.name, (value, 0.0))
            return replace(metric, low=-math.inf, high=max(metric.high, 3 * abs(start)))
        if metric.name == "rollout/effective_groups" and TAUGHT & metrics.keys():
            return replace(metric, low=-math.inf)  # the policy learns from more than rewards
        if metric.name == "rollout/filtered":  # harmless while the entropy does not rise
            entropy = metrics.get("loss/entropy", math.nan)  # absent where no sample has signal
            start, _ = self.best.setdefault(metric.name, (entropy, 0.0)) if math.isfinite(entropy) else (math.inf, 0.0)
            return metric if entropy > RISEN * start else replace(metric, high=1.0)
        if metric.per:
            return replace(metric, low=metric.low * metrics.get(metric.per, math.inf))
        if metric.name == "rollout/staleness":
            return replace(metric, high=max(metric.high, self.bound))
        older = metrics.get("rollout/staleness", 0)
        if older > 0 and metric.stale:  # which grows with the number of versions
            return replace(metric, high=metric.stale * max(1, older), stop=metric.stop * max(1, older))
        if metric.name == "rollout/logprob_gap" and self.rounding:
            high, stop = min(metric.high, 10 * self.rounding), min(metric.stop, 1000 * self.rounding)
            return replace(metric, high=high, stop=stop)
        if metric.jump < math.inf and value:
            before = self.recent.setdefault(metric.name, [])
            high = metric.jump * median(before) if len(before) == WINDOW else metric.high
            self.recent[metric.name] = [*before, value][-WINDOW:]
            return replace(metric, high=high)
        if metric.falls < math.inf:
            self.follow(metric, value, metrics.get("rollout/reward", 0.0))
            return replace(metric, low=self.floor.get(metric.name, metric.low))
        return metric

    def follow(self, metric: Metric, value: float, reward: float) -> None:
        """Set the floor of a metric that should not fall while the reward rises, once per window of rollouts."""
        window = self.falling.setdefault(metric.name, [])
        window.append((value, reward))
        if len(window) == WINDOW:
            now, paid = map(mean, zip(*window, strict=True))
            window.clear()
            best, then = self.best.setdefault(metric.name, (now, paid))
            if now >= best:
                self.best[metric.name] = (now, paid)
            exploited = now < best - metric.falls and paid > then
            self.floor[metric.name] = best - metric.falls if exploited else metric.low


def warnings_of(
    metrics: Mapping[int, Metrics],
    intervals: Mapping[int, Interval],
    rounding: float | None,
    bound: int = 1,
    own: Bounds | None = None,
) -> list[Finding]:
    """Return all findings of a run, at most one for each metric. metrics: by the number of rollouts learned from. intervals: of
    eval/accuracy. rounding, bound, own: see `Watch`."""
    watch = Watch(rounding, bound, own=own or {})
    findings: list[Finding] = []
    for rollouts, row in metrics.items():
        findings += watch.findings(rollouts, row, intervals.get(rollouts))
    return findings
