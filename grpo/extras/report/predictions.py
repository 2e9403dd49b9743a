"""Predicts with a sigmoid of accuracy against compute where arms will be with more compute, and which one will win there."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from grpo.evaluation.display import grid, share_with_interval
from grpo.evaluation.estimates import number_and_interval
from grpo.evaluation.intervals import Estimate
from grpo.extras.curves.reading import Compute, halves, points_of, shared_metric
from grpo.extras.curves.sigmoid import FEWEST, Fit, Points, difference
from grpo.extras.report.statistics import holm
from grpo.runs.run import Run
from grpo.system.errors import UserError, plural
from grpo.system.metrics import percent

TIMES = 4.0  # as much compute as the runs have had
NOISE = "one run: intervals are about the noise of its accuracies, and say nothing of other seeds"


def predictions(arms: Mapping[str, Sequence[Run]], compute: Compute = "tokens", times: float = TIMES) -> dict[str, Any]:
    """Return the fit of each arm, its accuracy after `times` the compute that it has had, and its differences from the first.

    arms: runs that differ in the seed alone, by a name. An arm without a fit has a `reason` alone. The differences are after
    `at`, which is `times` the compute of the arm that has had least, so that no arm is predicted further than that.
    """
    metric = shared_metric(run for runs in arms.values() for run in runs)
    found: dict[str, dict[str, Any]] = {}
    fits: dict[str, Fit] = {}
    for name, runs in arms.items():
        try:
            curves = [points_of(run, metric, compute) for run in runs]
        except UserError as error:
            found[name] = {"reason": str(error)}
            continue
        found[name], fit = fitted(curves, times)
        if fit.reason is None:
            fits[name] = fit
    at = times * min((spent_by(fit.curves) for fit in fits.values()), default=np.nan)
    others = [name for name in list(arms)[1:] if name in fits] if next(iter(arms)) in fits else []
    tests = [difference(fits[next(iter(arms))], fits[name], at) for name in others]
    adjusted = holm([p for _, p in tests])
    return {
        "metric": metric,
        "compute": compute,
        "times": times,
        "at": at if fits else None,
        "arms": found,
        "comparisons": [
            {"arm": name, "against": next(iter(arms)), "difference": number_and_interval(estimate), "p_value": p, "p_holm": p_holm}
            for name, (estimate, p), p_holm in zip(others, tests, adjusted, strict=True)
        ],
    }


def spent_by(curves: Sequence[Points]) -> float:
    """Return the compute that the runs of an arm have had, the mean over runs."""
    return float(np.mean([curve.compute.max() for curve in curves]))


def fitted(curves: Sequence[Points], times: float) -> tuple[dict[str, Any], Fit]:
    """Return what is known of an arm, and its fit."""
    fit, spent = Fit(curves), spent_by(curves)
    known: dict[str, Any] = {"runs": len(curves), "spent": spent, "reason": fit.reason}
    if fit.reason is None:
        known |= {name: number_and_interval(estimate) for name, estimate in fit.parameters().items()}
        known["then"] = number_and_interval(fit.at(times * spent))
    return known, fit


# -- in words


def amount(value: float, compute: Compute) -> str:
    """Return an amount of compute: 413k tokens, 75 s, 80 rollouts."""
    for size, end in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            number = f"{value / size:.3g}{end}"
            break
    else:
        number = f"{value:.3g}"
    return f"{number} s" if compute == "seconds" else f"{number} {compute}"


def cell(estimate: Mapping[str, Any]) -> str:
    """Return a share with its interval."""
    return share_with_interval(Estimate(**estimate))


def shown(found: Mapping[str, Any] | None) -> Iterator[Table | str]:
    """Yield a table of the arms that have a fit, and lines: the others with their reasons, who wins, and what intervals mean.
    found: `predictions`; None: nothing to show."""
    if found is None:
        return
    compute, times = found["compute"], found["times"]
    known = {name: arm for name, arm in found["arms"].items() if arm["reason"] is None}
    if known:
        head = [f"{times:g} x {compute}", f"{found['metric'].partition('/')[2]} then (95 %)", "A (95 %)", "B", "C_mid"]
        rows = [
            (name, cell(arm["then"]), cell(arm["A"]), f"{arm['B']['value']:.2g}", amount(arm["C_mid"]["value"], compute))
            for name, arm in known.items()
        ]
        yield grid(head, rows)
    unknown: dict[str, list[str]] = {}
    for name, arm in found["arms"].items():
        if arm["reason"]:
            unknown.setdefault(arm["reason"], []).append(name)
    for reason, names in unknown.items():
        yield f"{'; '.join(names)}: no prediction, {reason}"
    for row in found["comparisons"]:
        yield f"after {amount(found['at'], compute)}: {winner(row)}"
    if any(arm["runs"] > 1 for arm in known.values()):
        yield "several runs: intervals of predictions are about other seeds, on these problems (jackknife, Student's t)"
    if any(arm["runs"] == 1 for arm in known.values()):
        yield NOISE


def winner(row: Mapping[str, Any]) -> str:
    """Return who wins: `B wins by 3.1 points (0.2 to 6.0), p 0.03`."""
    value, low, high = (100 * row["difference"][end] for end in ("value", "low", "high"))
    ps = f"p {row['p_value']:.2g}" + (f", p (Holm) {row['p_holm']:.2g}" if row["p_holm"] != row["p_value"] else "")
    if row["p_holm"] < 0.05:
        first, second = (row["arm"], row["against"]) if value > 0 else (row["against"], row["arm"])
        low, high = sorted((abs(low), abs(high)))
        return f"{first} wins over {second} by {abs(value):.1f} points ({low:.1f} to {high:.1f}), {ps}"
    return f"no winner: {row['arm']} - {row['against']} {value:+.1f} points ({low:.1f} to {high:.1f}), {ps}"


def check(arms: Mapping[str, Sequence[Run]], compute: Compute = "tokens") -> Iterator[Table | str]:
    """Yield how well the first half of the compute predicts the accuracies of the second: a table, and lines about it. An arm whose
    first half gives no A is in it, too, with a mark."""
    metric = shared_metric(run for runs in arms.values() for run in runs)
    rows, marked = [], ""
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
        mark = " *" if fit.reason else ""
        marked = marked or mark
        at, seen = (np.concatenate([curve[i] for curve in late]) for i in (0, 1))
        errors = fit.sigmoid.at(at) - seen
        predicted = fit.at(spent_by(curves))
        ended = float(np.mean([curve.accuracy[-1] for curve in curves]))
        points = (f"{100 * error:+.1f}" for error in (predicted.value - ended, errors.mean(), (errors**2).mean() ** 0.5))
        rows.append((name + mark, percent(ended), share_with_interval(predicted), *points))
    if rows:
        accuracy = metric.partition("/")[2]
        yield grid(["first half", f"last {accuracy}", "predicted (95 %)", "error", "mean", "rms"], rows)
        yield "error, in points: of the last accuracy; the mean and the root of the mean square over those of the second half"
    if marked:
        yield "* no A: the first half does not rise by more than its noise, or no ceiling is in sight"


def summary(arm: Mapping[str, Any], compute: Compute, times: float) -> str:
    """Return a sentence about an arm that has a fit."""
    return f"{cell(arm['then'])} after {amount(times * arm['spent'], compute)}, {times:g} times as many as in {plural(arm['runs'], 'run')}"
