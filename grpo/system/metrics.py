"""The dictionary of metrics: the meaning of each number, its unit, and its range in healthy runs.

Everything that shows, watches or names a metric reads it here. `python -m grpo.system.metrics` prints the table.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Literal

import yaml

from grpo.system.errors import UserError

Unit = Literal["share", "reward", "count", "tokens", "nats", "number", "tokens/s", "seconds", "bytes", "text"]


@dataclass(frozen=True)
class Metric:
    """name: as it is logged; K stands for a number, NAME for any text. words: its meaning.

    A run is healthy while low <= value <= high. advice: the meaning of a value outside, and what to do; without it there are
    no warnings. after: a warning comes after this many rollouts in a row outside. stale: `high` for samples of older weights,
    for each version that they are older, if it differs. per: low and high are multiples of this metric. jump: `high` is also
    this many times the median of the last rollouts. falls: it is too low if it is so far below its best mean of several
    rollouts, while the reward is higher. stop: a value whose size is above it ends the run, unless alarms=warn. charted: the
    report shows it by default. part: a part of the reward, so users may use its name. fault: counts failures, and is not
    shown while it is 0.
    """

    name: str
    unit: Unit
    words: str
    low: float = -math.inf
    high: float = math.inf
    advice: str = ""
    after: int = 1
    stale: float | None = None
    per: str = ""
    jump: float = math.inf
    falls: float = math.inf
    stop: float = math.inf
    charted: bool = False
    part: bool = False
    fault: bool = False


def grouped() -> dict[str, list[Metric]]:
    """Return the metrics of metrics.yaml by group. An evaluation's metric in `rollout/ and eval/NAME` has no range."""
    groups: dict[str, list[Metric]] = {}
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    # the parser in C, if there is one, takes a tenth of the time
    for title, entries in yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)).items():
        groups[title] = []
        for name, values in entries.items():
            first, _, second = name.partition(" and ")
            part = second.removeprefix("eval/")
            metric = Metric(first + part, **values)
            groups[title].append(metric)
            if second:
                free = {"low": -math.inf, "high": math.inf, "advice": "", "charted": False}
                groups[title].append(replace(metric, name=second, **free))
    return groups


GROUPS = grouped()
METRICS = tuple(metric for group in GROUPS.values() for metric in group)
WATCHED = tuple(metric for metric in METRICS if metric.advice)
# the seconds of a rollout, one kind after the other
TIMES = tuple(f"time/{kind}" for kind in ("rollout", "update", "sync", "eval"))


def _pattern(metric: Metric) -> re.Pattern:
    pattern = re.escape(metric.name).replace("NAME", ".+").replace("K", r"\d+")
    return re.compile(pattern.replace("/", "/(.+/)?", 1) if metric.part else pattern)  # a source of a mixture


# patterns that fit any name come last
_ORDERED = sorted(METRICS, key=lambda metric: (metric.name.endswith("/NAME"), "NAME" in metric.name))
_PATTERNS = [(_pattern(metric), metric) for metric in _ORDERED]


@cache
def about(name: str) -> Metric | None:
    """Return the entry of a metric; None if it has none. eval/SET/NAME, of one of several sets, has that of eval/NAME."""
    entry = _entry(name)
    if entry and entry.name == "eval/NAME":
        return _entry(re.sub("^eval/(?!reward/)[^/]+/", "eval/", name))
    return entry


@cache
def _entry(name: str) -> Metric | None:
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def require_metric(key: str, name: str, measured: Iterable[str] = ()) -> None:
    """Raise UserError, with the nearest names, if the value `name` of a key is no metric, or none of those `measured`. Names of
    another kind (eval/, loss/ ...) in `measured` do not count."""
    kind = name.partition("/")[0]
    same_kind = [metric for metric in measured if metric.partition("/")[0] == kind]
    unknown = name not in same_kind if same_kind else about(name) is None
    if unknown:
        near = get_close_matches(name, same_kind or [metric.name for metric in METRICS], cutoff=0.3)
        similar = f"; similar: {', '.join(near)}" if near else ""
        whose = " of this run" if same_kind else ""
        raise UserError(f"{key}={name} is no metric{whose}{similar}; `python -m grpo.system.metrics` lists all")


def is_taken(part: str) -> bool:
    """Return whether rollout/PART or eval/PART is a metric of ours, which a part of the reward must not hide."""
    if any(metric.name == f"rollout/{part}_std" for metric in METRICS):
        return True
    entries = (_entry(f"rollout/{part}"), _entry(f"eval/{part}"))
    return any(entry is not None and not entry.part for entry in entries)


@cache
def name_of_part(part: str) -> str:
    """Return the metric of a part of the reward, after rollout/ or eval/: its own name, or reward/NAME if that is taken.

    Two parts never get the same name: a part called reward/NAME, with a taken NAME, becomes reward/reward/NAME.
    """
    bare = re.sub("^(reward/)+", "", part)
    return f"reward/{part}" if is_taken(bare) else part


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share as a percentage: 0.125 is 12.5 %. digits: after the point."""
    return "-" if share is None or math.isnan(share) else f"{100 * share:.{digits}f} %"


def written(name: str, value: float | None) -> str:
    """Return a value as text: a share as a percentage, anything else with four digits, - for None and NaN."""
    entry = about(name)
    if value is None or math.isnan(value) or (entry and entry.unit == "share"):
        return percent(value)
    return f"{value:.4g}"


def is_result(name: str, value: float) -> bool:
    """Return whether a number of an evaluation is shown: not its time, and not a fault that never happened."""
    entry = about(name)
    return name.startswith("eval/") and (value != 0 or not (entry and entry.fault))


def metric_table() -> str:
    """Return all metrics as a Markdown table."""
    lines = ["| metric | unit | what it is | healthy | ends the run |", "|---|---|---|---|---|"]
    for title, metrics in GROUPS.items():
        lines.append(f"| **{title}** | | | | |")
        for words, same in groupby(metrics, key=lambda metric: metric.words):
            first, *others = same
            names = " ".join(f"`{metric.name}`" for metric in (first, *others))
            stop = f"above {first.stop:g}" if first.stop < math.inf else ""
            lines.append(f"| {names} | {first.unit} | {words} | {healthy(first)} | {stop} |")
    return "\n".join(lines)


def healthy(metric: Metric) -> str:
    """Return the range of a metric in healthy runs, as text; empty if it has none."""
    only_ends = metric.high == metric.stop < math.inf  # such a bound says nothing of health
    if not metric.advice or only_ends:
        return ""
    if metric.jump < math.inf:
        return f"at most {metric.jump:g} times its median"
    if metric.per:
        return f"at least {metric.low:g} times `{metric.per}`"
    if metric.name == "rollout/filtered":
        return f"at most {metric.high:g}, or `loss/entropy` at most 1.5 times its first value"
    if metric.name == "rollout/staleness":
        return f"at most `rollout.max_staleness`, or {metric.high:g} if that is less"
    if metric.name == "eval/accuracy":
        return "its 95 % interval overlaps that of the best evaluation"
    if metric.falls < math.inf:
        return f"at most {metric.falls:g} below its best mean of 10 rollouts, unless the reward has fallen, too"
    low, high = f"{metric.low:,.7g}", f"{metric.high:,.7g}"
    within = f"at most {high}" if metric.low in (0, -math.inf) else f"{low} to {high}"
    within = within.replace(" to inf", " or more")
    late = f"; a warning comes after {metric.after} rollouts outside" if metric.after > 1 else ""
    stale = f", with samples of older weights {metric.stale:g} for each version" if metric.stale else ""
    return f"{'above 0' if 0 < metric.low < 1e-6 else within}{stale}{late}"


if __name__ == "__main__":
    print(metric_table())
