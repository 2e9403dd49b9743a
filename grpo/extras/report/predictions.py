"""Predicts with a sigmoid of accuracy against compute where arms will be with more compute, and which of them wins there."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, get_args

import numpy as np
from rich.table import Table

from grpo.evaluation.display import grid, share_with_interval
from grpo.evaluation.estimates import number_and_interval
from grpo.evaluation.intervals import Estimate
from grpo.extras.curves.reading import Compute, halves, points_of, shared_metric
from grpo.extras.curves.sigmoid import FEWEST, Fit, Points, difference
from grpo.extras.report.statistics import holm
from grpo.runs.run import Run
from grpo.system.errors import UserError
from grpo.system.metrics import percent

Arms = Mapping[str, Sequence[Run]]  # runs that differ in the seed alone, by a name
TIMES = 4.0  # as much compute as the runs have had
DRAWN = 40  # points of a drawn fit


def predictions(arms: Arms, compute: Compute = "tokens", times: float = TIMES) -> dict[str, Any]:
    """Return the fit of each arm, its accuracy after `times` the compute that it has had, and its difference from the first fit.

    The content of `predictions` in metrics.json. An arm without a fit has a `reason`. The differences are after `at`, which is
    `times` the compute of the arm that has had least of it, so that no arm is predicted further than that.
    """
    metric = shared_metric(chain(*arms.values()))
    return from_fits(fits_of(arms, metric, compute), metric, compute, times)


def fits_of(arms: Arms, metric: str, compute: Compute) -> dict[str, Fit | str]:
    """Return the sigmoid of each arm, or why its curves are too short for one."""
    found: dict[str, Fit | str] = {}
    for name, runs in arms.items():
        try:
            found[name] = Fit([points_of(run, metric, compute) for run in runs])
        except UserError as error:
            found[name] = str(error)
    return found


def from_fits(tried: Mapping[str, Fit | str], metric: str, compute: Compute, times: float) -> dict[str, Any]:
    """Return `predictions` of arms. tried: their `fits_of`."""
    found: dict[str, dict[str, Any]] = {}
    fits: dict[str, Fit] = {}
    for name, fit in tried.items():
        if isinstance(fit, str):
            found[name] = {"reason": fit}
            continue
        found[name] = {"runs": len(fit.curves), "spent": spent_by(fit.curves), "reason": fit.reason}
        if fit.reason is None:
            fits[name] = fit
            values = {**fit.parameters(), "then": fit.at(times * spent_by(fit.curves))}
            found[name] |= {key: number_and_interval(value) for key, value in values.items()}
    first, *others = fits or [""]
    at = times * min((spent_by(fit.curves) for fit in fits.values()), default=0.0)
    tests = [difference(fits[first], fits[name], at) for name in others]
    adjusted = holm([p for _, p in tests])
    rows = [
        {"arm": name, "against": first, "difference": number_and_interval(value), "p_value": p, "p_holm": p_holm}
        for name, (value, p), p_holm in zip(others, tests, adjusted, strict=True)
    ]
    return {"metric": metric, "compute": compute, "times": times, "at": at, "arms": found, "comparisons": rows}


def spent_by(curves: Sequence[Points]) -> float:
    """Return the compute that the runs of an arm have had, the mean over runs."""
    return float(np.mean([curve.compute.max() for curve in curves]))


# -- in words


def amount(value: float, compute: Compute) -> str:
    """Return an amount of compute: 413k tokens, 75 s, 80 rollouts."""
    sizes = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (0, ""))
    size, letter = next((size, letter) for size, letter in sizes if value >= 0.9995 * size)
    return f"{value / (size or 1):.3g}{letter} {'s' if compute == 'seconds' else compute}"


def cell(estimate: Mapping[str, Any]) -> str:
    """Return a share with its interval."""
    return share_with_interval(Estimate(**estimate))


def as_sentences(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the head and the rows of a table of the arms that have a fit, and lines: the reasons of the others, who wins, and
    what the intervals mean. found: `predictions`."""
    compute, times = found["compute"], found["times"]
    known = {name: arm for name, arm in found["arms"].items() if arm["reason"] is None}
    accuracy = found["metric"].partition("/")[2]
    head = ["arm", f"{accuracy} at {times:g} x {compute} (95 %)", "ceiling A (95 %)", "power B", "C_mid"]
    rows = [
        [name, cell(arm["then"]), cell(arm["A"]), f"{arm['B']['value']:.2g}", amount(arm["C_mid"]["value"], compute)]
        for name, arm in known.items()
    ]
    unknown: dict[str, list[str]] = {}
    for name, arm in found["arms"].items():
        if arm["reason"]:
            unknown.setdefault(arm["reason"], []).append(name)
    lines = [f"no prediction of {'; '.join(names)}: {reason}" for reason, names in unknown.items()]
    there = amount(found["at"], compute)
    lines += [f"after {there}: {winner(row)}" for row in found["comparisons"]]
    seeds = {arm["runs"] > 1 for arm in known.values()}
    if True in seeds:
        lines.append("intervals over several runs are about other seeds, on these problems")
    if False in seeds:
        lines.append("an interval of one run is about the noise of its accuracies, and says nothing of other seeds")
    return head, rows, lines


def winner(row: Mapping[str, Any]) -> str:
    """Return who wins: `B beats A by 3.1 points (0.2 to 6.0), p 0.03`."""
    value, low, high = (100 * row["difference"][end] for end in ("value", "low", "high"))
    p = f"p {row['p_value']:.2g}, Holm {row['p_holm']:.2g}"
    if row["p_holm"] >= 0.05:
        return f"no winner, {row['arm']} - {row['against']} is {value:+.1f} points ({low:.1f} to {high:.1f}), {p}"
    better, worse = (row["arm"], row["against"]) if value > 0 else (row["against"], row["arm"])
    low, high = (low, high) if value > 0 else (-high, -low)
    return f"{better} beats {worse} by {abs(value):.1f} points ({low:.1f} to {high:.1f}), {p}"


def printable(found: Mapping[str, Any] | None) -> Iterator[Table | str]:
    """Yield what `as_sentences` says, for a terminal. found: `predictions`; None: nothing to show."""
    if found is not None:
        head, rows, lines = as_sentences(found)
        yield from [grid(head, rows)] if rows else []
        yield from lines


def on_page(arms: Arms, drawn: bool = False) -> dict[str, Any] | None:
    """Return what a page shows of `predictions`; None if no arm has a curve that is long enough.

    drawn: also series for a chart of the only run, its accuracies and the fit with its interval, up to TIMES the compute.
    """
    metric, compute = shared_metric(chain(*arms.values())), get_args(Compute)[0]
    tried = fits_of(arms, metric, compute)
    if all(isinstance(fit, str) for fit in tried.values()):
        return None
    found = from_fits(tried, metric, compute, TIMES)
    head, rows, lines = as_sentences(found)
    content: dict[str, Any] = {"head": head, "rows": rows, "lines": lines}
    if drawn and rows:
        [fit] = tried.values()
        [points], x = fit.curves, np.linspace(0, found["at"], DRAWN)
        y, low, high, _ = zip(*(fit.at(float(compute)) for compute in x), strict=True)
        measured = {"label": "measured", "index": 0, "x": points.compute, "y": points.accuracy}
        content["series"] = [measured, {"label": "fit", "index": 1, "x": x, "y": y, "low": low, "high": high}]
    return content | {"metric": metric, "compute": compute}


# -- is it true?


def check(arms: Arms, compute: Compute = "tokens") -> Iterator[Table | str]:
    """Yield how well the first half of the compute predicts the accuracies of the second: a table, and lines about it. An arm
    whose first half gives no A has a mark."""
    metric = shared_metric(chain(*arms.values()))
    rows, marked = [], False
    for name, runs in arms.items():
        try:
            curves = [points_of(run, metric, compute) for run in runs]
        except UserError as error:
            yield f"{name}: {error}"
            continue
        early, late = halves(curves)
        if min(len(curve.compute) for curve in early) < FEWEST:
            yield f"{name}: the first half has fewer than {FEWEST} values of {metric}"
            continue
        fit = Fit(early)
        marked |= fit.reason is not None
        at, seen = (np.concatenate([curve[i] for curve in late]) for i in (0, 1))
        errors = fit.sigmoid.at(at) - seen
        predicted = fit.at(spent_by(curves))
        ended = float(np.mean([curve.accuracy[-1] for curve in curves]))
        points = (f"{100 * error:.1f}" for error in (predicted.value - ended, errors.mean(), (errors**2).mean() ** 0.5))
        rows.append((name + " *" * (fit.reason is not None), percent(ended), share_with_interval(predicted), *points))
    if rows:
        head = ["first half", f"last {metric.partition('/')[2]}", "predicted (95 %)", "error", "mean", "rms"]
        yield grid(head, rows)
        yield "error, in points: of the last accuracy; mean and root mean square over those of the second half"
    if marked:
        yield "* no A: the first half does not rise by more than its noise, or no ceiling is in sight"
