"""The confidence interval of a mean over problems. Knows arrays, nothing of models, runs or files.

The unit is the problem. Samples of a problem resemble each other, so they are averaged first, and the estimate is the
mean over problems (arXiv 2411.00640). NaN marks an unknown value, which is left out.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from grpo.system.errors import UserError

Bounds = tuple[float, float]
TINY = 1e-12  # smaller values are rounding errors


class Estimate(NamedTuple):
    """A value, the ends of its interval, and the number n of problems (or runs) behind it. For n < 2 the ends are NaN."""

    value: float
    low: float
    high: float
    n: int


def mean_interval(values: ArrayLike, level: float = 0.95, bounds: Bounds | None = None) -> Estimate:
    """Return the mean over problems with its interval. values: [problems], each the mean of a problem's own samples.

    bounds None, for lengths and other unbounded values: mean +- t s / sqrt(n), Student's t with n - 1 degrees of freedom.

    bounds (low, high), for shares: Wilson's interval, which stays within the bounds and has a width even if all values are equal,
    (p + z^2/2m +- z sqrt(p (1-p)/m + z^2/4m^2)) / (1 + z^2/m). Here m = p (1-p) / se^2 is the effective number of samples: so
    many independent ones would have the standard error se that the problems show (Franco et al. 2019, J. Survey Statistics and
    Methodology 7:334). z is a quantile of Student's t, since se is estimated. If every value is 0 or 1 nothing is estimated:
    m = n and z is the normal quantile, which is the plain Wilson interval. If all values are equal, m = n: as if the samples of
    a problem never differed.
    """
    x = complete(values, bounds=bounds)[0][0]
    n = len(x)
    if n < 2:
        return Estimate(x[0] if n else np.nan, np.nan, np.nan, n)
    mean, t = x.mean(), quantile(level, n - 1)
    if bounds is None:
        half = t * x.std(ddof=1) / np.sqrt(n)
        return Estimate(mean, mean - half, mean + half, n)
    x = (x - bounds[0]) / (bounds[1] - bounds[0])
    p, spread = x.mean(), x.var()  # ddof 0: p (1-p) for outcomes of 0 and 1
    outcomes = np.all((x == 0) | (x == 1))
    m = n if outcomes or spread < TINY else n * p * (1 - p) / spread
    return Estimate(mean, *wilson(p, m, quantile(level, np.inf) if outcomes else t, bounds), n)


def complete(*arms: ArrayLike, bounds: Bounds | None) -> list[np.ndarray]:
    """Return each arm as [rows, problems], without the problems that are NaN in any row of any arm."""
    tables = [np.atleast_2d(np.asarray(arm, dtype=float)) for arm in arms]
    if tables[0].shape[1] != tables[-1].shape[1]:
        first, last = tables[0].shape[1], tables[-1].shape[1]
        raise UserError(f"{first} and {last} problems: give the same problems, with NaN for unknown values")
    complete = ~np.isnan(np.vstack(tables)).any(axis=0)
    tables = [table[:, complete] for table in tables]
    for table in tables:
        if bounds is not None and table.size and not bounds[0] <= table.min() <= table.max() <= bounds[1]:
            line = f"values from {table.min():g} to {table.max():g} are not within {bounds}"
            raise UserError(f"{line}: give their bounds, or bounds=None for values that are not shares")
    return tables


def wilson(p: float, m: float, z: float, bounds: Bounds) -> tuple[float, float]:
    """Return Wilson's interval of a share p from m samples, scaled to bounds."""
    half = z * np.sqrt(p * (1 - p) / m + (z / m) ** 2 / 4)
    ends = np.clip((p + z**2 / (2 * m) + np.array([-half, half])) / (1 + z**2 / m), 0, 1)
    low, high = bounds[0] + (bounds[1] - bounds[0]) * ends
    return low, high


def quantile(level: float, degrees: float) -> float:
    """Return the two-sided quantile of Student's t, which for infinite degrees of freedom is the normal one."""
    return float(stdtrit(degrees, (1 + level) / 2))
