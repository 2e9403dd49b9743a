"""The curves of runs for a fit: accuracy against the compute that a run had spent by then."""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import pandas as pd
from pyarrow.parquet import read_metadata

from grpo.extras.curves.sigmoid import FEWEST, Points
from grpo.runs.run import Run, numbered
from grpo.system.errors import UserError, plural
from grpo.system.metrics import TIMES

Compute = Literal["tokens", "seconds", "rollouts"]
METRICS = ("eval/accuracy", "rollout/solve_rate")  # the first is better
MOST = 100  # points of a run; a longer curve has means of neighbours


def spent(run: Run, compute: Compute) -> pd.Series:
    """Return the compute that a run had spent after each row of its metrics, by rollouts learned from.

    tokens: sampled ones. seconds: of the trainer, for rollouts, updates and weights for the engine, without evaluations.
    """
    metrics = run.metrics
    if compute == "rollouts":
        return metrics.index.to_series()
    if compute == "tokens":
        return run.curve("data/tokens").reindex(metrics.index).ffill().fillna(0.0)
    times = [run.curve(name).reindex(metrics.index).fillna(0.0) for name in TIMES if name != "time/eval"]
    return sum(times[1:], times[0]).cumsum()


def points_of(run: Run, metric: str = METRICS[0], compute: Compute = "tokens") -> Points:
    """Return the curve of a run. Raises UserError if it is too short.

    A metric of evaluations is one of the policy after a rollout; any other is one of the policy before the rollout's update, so
    its compute is that of the rollouts before.
    """
    values = run.curve(metric)
    if len(values) < FEWEST:
        more = "evaluate more often, with eval.every" if metric.startswith("eval/") else "let it learn for longer"
        line = f"a run has {plural(len(values), 'value')} of {metric}, and a sigmoid needs {FEWEST}"
        raise UserError(f"{line}: {more}")
    held_out = metric.startswith("eval/")
    after = spent(run, compute)
    at = (after if held_out else after.shift(fill_value=0.0))[values.index]
    if not at.iloc[-1] > 0:
        raise UserError(f"a run has not logged its {compute}: choose another kind of compute")
    counts = samples_behind(run, held_out).reindex(values.index)
    known = None if counts.isna().any() else counts.to_numpy(float)
    return binned(Points(at.to_numpy(float), values.to_numpy(float), known))


def samples_behind(run: Run, held_out: bool) -> pd.Series:
    """Return the number of graded samples of each evaluation (held_out) or rollout of a run; empty if it saved none."""
    if not held_out:
        files = numbered(run.folder / "rollouts")
        return pd.Series({at: read_metadata(file).num_rows for at, file in files.items()}, dtype=float)
    if not run.evaluated:
        return pd.Series(dtype=float)
    samples = run.evaluations(columns=["rollout", "set", "reward"])
    graded = samples["reward"].notna()
    if "set" in samples:  # others of eval.sets
        graded &= samples["set"].isna()
    return samples[graded].groupby("rollout").size().astype(float)


def binned(points: Points) -> Points:
    """Return a curve of at most MOST points: each the mean of neighbours, of which there are as many in every one."""
    groups = np.arange(len(points.compute)) // -(-len(points.compute) // MOST)
    if groups[-1] == len(groups) - 1:
        return points
    n = np.ones(len(groups)) if points.samples is None else points.samples
    size = np.bincount(groups, n)
    compute, accuracy = (np.bincount(groups, n * values) / size for values in points[:2])
    return Points(compute, accuracy, None if points.samples is None else size)


def shared_metric(runs: Iterable[Run]) -> str:
    """Return the metric whose curve is fitted: the held-out accuracy, or the solve rate if more runs have enough of that."""
    runs = list(runs)
    return max(METRICS, key=lambda metric: sum(len(run.curve(metric)) >= FEWEST for run in runs))


def halves(curves: Sequence[Points]) -> tuple[list[Points], list[Points]]:
    """Return the points of each run up to half of its compute, and those after it."""
    early = [curve.compute <= curve.compute.max() / 2 for curve in curves]
    first = [curve.part(chosen) for curve, chosen in zip(curves, early, strict=True)]
    return first, [curve.part(~chosen) for curve, chosen in zip(curves, early, strict=True)]
