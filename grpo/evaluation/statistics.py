"""How sure is a number? Intervals and tests for evaluations. It knows arrays, nothing of models, runs or files.

The unit is the problem: its samples resemble each other, so they are first averaged to one value, whatever their number, and
what is estimated is the mean over problems (arXiv 2411.00640). NaN is a value that nobody could tell, and is left out.
docs/statistics.md: which interval answers which question, and how often each holds the truth.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bdtr, stdtr, stdtrit

from grpo.system.errors import UserError

Bounds = tuple[float, float]
TINY = 1e-12  # what is below it is rounding


class Estimate(NamedTuple):
    """A value, its interval, and how many problems (or runs) it stands on. Below two the interval is NaN: no spread is known."""

    value: float
    low: float
    high: float
    n: int


class Comparison(NamedTuple):
    """b against a. better, worse, ties: on how many problems b was. test: what gave the p-value, in a few words for a table."""

    difference: Estimate
    p_value: float
    better: int
    worse: int
    ties: int
    test: str


def mean_interval(values: ArrayLike, level: float = 0.95, bounds: Bounds | None = None) -> Estimate:
    """The mean over problems. values: [problems], each the mean of a problem's own samples.

    bounds None, for lengths and the like: mean +- t s / sqrt(n), Student's t with n - 1 degrees of freedom.
    bounds (low, high), for shares: Wilson's interval, which stays inside of them and has a width where all is right,
    (p + z^2/2m +- z sqrt(p (1-p)/m + z^2/4m^2)) / (1 + z^2/m), where m = p (1-p) / se^2 independent samples would have the error
    that the spread of the problems shows (Franco et al. 2019, J. Survey Statistics and Methodology 7:334), and z is Student's t,
    since se is measured. Where every value is 0 or 1 nothing is: m = n, z is the normal's, it is the plain Wilson interval.
    Where all values are equal m = n: as if the samples of a problem never differed.
    """
    x = _known(values, bounds=bounds)[0][0]
    n = len(x)
    if n < 2:
        return Estimate(x[0] if n else np.nan, np.nan, np.nan, n)
    mean, t = x.mean(), _quantile(level, n - 1)
    if bounds is None:
        half = t * x.std(ddof=1) / np.sqrt(n)
        return Estimate(mean, mean - half, mean + half, n)
    x = (x - bounds[0]) / (bounds[1] - bounds[0])
    p, spread = x.mean(), x.var()  # ddof 0: p (1-p) for outcomes of 0 and 1
    outcomes = np.all((x == 0) | (x == 1))
    m = n if outcomes or spread < TINY else n * p * (1 - p) / spread
    return Estimate(mean, *_wilson(p, m, _quantile(level, np.inf) if outcomes else t, bounds), n)


def difference_interval(d: ArrayLike, level: float = 0.95, bounds: Bounds | None = (0, 1)) -> Estimate:
    """The mean of differences, d: [problems], each between two means of a problem's own samples, which lie within bounds.

    For shares the interval of Agresti and Min (2005, Statistics in Medicine 24:729), for every d in [-1, 1]. They add half a pair
    to each of the four cells: two problems whose d sum to 0 and whose squares sum to 1. Here the squares sum to q, the mean
    square of the d that are not 0 (1 where all are), which is the same for single outcomes: with S = sum d,
    S/(n+2) +- t sqrt(sum d^2 + q - S^2/(n+2)) / (n+2). It has a width where no problem differs. bounds None: Student's t.
    """
    d = np.asarray(d, dtype=float)
    d = d[~np.isnan(d)]
    return _difference(d, *_centre(d, bounds), len(d) - 1, level, bounds)


def paired(a: ArrayLike, b: ArrayLike, level: float = 0.95, bounds: Bounds | None = (0, 1)) -> Comparison:
    """b - a over the same problems. a, b: [problems], each the mean of a problem's own samples. Interval: `difference_interval`.

    p-value of no difference: exact McNemar where all are single outcomes, else random signs of the differences (exact up to 13
    that are not 0, else 9,999 draws, always the same). Near 5 % it and the interval, which approximates, may disagree.
    bounds None: for lengths and the like.
    """
    (a,), (b,) = _known(a, b, bounds=bounds)
    d = np.round(b - a, 12)
    if bounds is not None and np.isin([a, b], bounds).all():
        better, differ = int((d > 0).sum()), int((d != 0).sum())
        p_value, test = min(1.0, 2 * bdtr(min(better, differ - better), differ, 0.5)), "exact McNemar"
    else:
        p_value, test = _sign_flip(d), "sign-flip permutation"
    return _comparison(d, difference_interval(d, level, bounds), p_value, test)


def over_seeds(values: ArrayLike, level: float = 0.95) -> Estimate:
    """The mean over runs that differ in their seed, [runs]: Student's t, wide for three runs because three say little."""
    return mean_interval(values, level)


def arm_interval(a: ArrayLike, level: float = 0.95, bounds: Bounds = (0, 1)) -> Estimate:
    """The mean share of an arm, for other seeds and other problems. a: [seeds, problems].

    Seeds and problems have the variances of `compare_arms`, for one arm. Each takes its own Student's t (Howe 1974, JASA 69:789):
    h^2 = t_seeds^2 seeds + t_problems^2 max(problems - noise, 0), which Wilson's formula gets as z^2 p (1-p) / m. Problems with
    NaN anywhere are left out, n are left. With one seed it is `mean_interval`.
    """
    (a,) = _known(a, bounds=bounds)
    alone = mean_interval(a.mean(axis=0), level, bounds)
    if len(a) < 2 or alone.n < 2:
        return alone
    a = (a - bounds[0]) / (bounds[1] - bounds[0])
    n, p, (seeds, noise) = alone.n, a.mean(), _seeds(a)
    problems = max(a.mean(axis=0).var(ddof=1) / n - noise, 0.0)
    t, z = _quantile(level, len(a) - 1), _quantile(level, n - 1)
    variance = (t / z) ** 2 * seeds + problems
    m = n if variance < TINY else p * (1 - p) / variance
    return Estimate(alone.value, *_wilson(p, m, z, bounds), n)


def iqm(scores: ArrayLike, level: float = 0.95, seed: int = 0) -> Estimate:
    """The interquartile mean, the mean of the middle half of all scores, over runs [runs] or [runs, tasks] (arXiv 2108.13264).

    Interval: percentiles of 2,000 bootstrap samples, runs drawn anew within each task. From three runs it is far too narrow: of
    one task it holds the truth in three cases of four. `over_seeds` is the honest one there. Runs with NaN are left out.
    """
    scores = np.atleast_2d(np.asarray(scores, dtype=float).T).T  # [runs, tasks]
    from scipy.stats import (  # here: a comparison of two runs needs none of it, and it takes half a second
        bootstrap,
        trim_mean,
    )

    scores = scores[~np.isnan(scores).any(axis=1)]
    n = len(scores)
    if n < 2:
        return Estimate(trim_mean(scores, 0.25, axis=None) if n else np.nan, np.nan, np.nan, n)

    def statistic(*tasks: np.ndarray, axis: int) -> np.ndarray:
        return trim_mean(np.concatenate(tasks, axis=axis), 0.25, axis=axis)

    options = {"n_resamples": 2000, "confidence_level": level, "method": "percentile", "rng": seed}
    low, high = bootstrap(tuple(scores.T), statistic, **options).confidence_interval
    return Estimate(trim_mean(scores, 0.25, axis=None), low, high, n)


def compare_arms(a: ArrayLike, b: ArrayLike, level: float = 0.95, bounds: Bounds | None = (0, 1)) -> Comparison:
    """b - a for other seeds and other problems. a: [seeds of a, problems], b: [seeds of b, problems], the same problems.

    Seeds and problems are both random effects (two-way analysis of variance). With S seeds in an arm,
    seeds    = var(means of the runs) / S, summed over arms: they are not paired. It holds the noise of the samples too,
    noise    = residual mean square / (S problems), summed over arms,
    problems = the variance in `difference_interval`, of the means over seeds: it holds the noise once more.
    V = seeds + max(problems - noise, 0), and not below noise/4, for the case that few runs agree by luck. Degrees of freedom:
    V^2 / sum(V_k^2 / df_k) (Satterthwaite 1946). Interval and p-value are of the same t. Problems with NaN anywhere are left out.
    With one seed in an arm nobody can tell what seeds do: it is `paired`, and `test` says so.
    """
    a, b = _known(a, b, bounds=bounds)
    if min(len(a), len(b), a.shape[1]) < 2:
        found = paired(a.mean(axis=0), b.mean(axis=0), level, bounds)
        return found._replace(test=f"{found.test}, seeds not varied")

    d = np.round(b.mean(axis=0) - a.mean(axis=0), 12)
    centre, problems = _centre(d, bounds)
    (of_a, noise_a), (of_b, noise_b) = _seeds(a), _seeds(b)
    noise = noise_a + noise_b
    parts = [(of_a, len(a) - 1), (of_b, len(b) - 1), (max(problems - noise, 0.0), len(d) - 1)]  # and degrees of freedom
    variance = max(sum(part for part, _ in parts), noise / 4, TINY**2)  # TINY: where nothing varies at all
    degrees = variance**2 / max(sum(part**2 / df for part, df in parts), TINY**4)
    p_value = 2 * stdtr(degrees, -abs(centre) / variance**0.5)
    difference = _difference(d, centre, variance, degrees, level, bounds)
    return _comparison(d, difference, p_value, "t over seeds and problems")


def holm(p_values: ArrayLike) -> list[float]:
    """p-values of several tests, adjusted so that the chance of a single false alarm among all of them stays below the level.

    Holm (1979): the i-th smallest of m times m + 1 - i, and none below the one before it. NaN stays, and does not count.
    """
    p = np.array(p_values, dtype=float)
    order = np.argsort(p)  # NaN last
    factors = np.count_nonzero(~np.isnan(p)) - np.arange(len(p))
    p[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1)
    return p.tolist()


def _known(*arms: ArrayLike, bounds: Bounds | None) -> list[np.ndarray]:
    """Each arm as [rows, problems], without the problems that are NaN in any row of any arm."""
    tables = [np.atleast_2d(np.asarray(arm, dtype=float)) for arm in arms]
    if tables[0].shape[1] != tables[-1].shape[1]:
        first, last = tables[0].shape[1], tables[-1].shape[1]
        raise UserError(f"{first} and {last} problems: compare the same ones, NaN where there is no answer")
    known = ~np.isnan(np.vstack(tables)).any(axis=0)
    tables = [table[:, known] for table in tables]
    for table in tables:
        if bounds is not None and table.size and not bounds[0] <= table.min() <= table.max() <= bounds[1]:
            found = f"values from {table.min():g} to {table.max():g} are not within {bounds}"
            raise UserError(f"{found}: give their bounds, or bounds=None for what is no share")
    return tables


def _seeds(arm: np.ndarray) -> tuple[float, float]:
    """The variance of an arm's mean that its seeds show, and the part of that which is the samples' noise."""
    runs = arm.mean(axis=1)
    residual = arm - runs[:, None] - arm.mean(axis=0) + arm.mean()
    noise = (residual**2).sum() / ((len(arm) - 1) * (arm.shape[1] - 1)) / arm.size
    return runs.var(ddof=1) / len(arm), noise


def _wilson(p: float, m: float, z: float, bounds: Bounds) -> tuple[float, float]:
    """Of a share p from m samples, scaled to bounds."""
    half = z * np.sqrt(p * (1 - p) / m + (z / m) ** 2 / 4)
    ends = np.clip((p + z**2 / (2 * m) + np.array([-half, half])) / (1 + z**2 / m), 0, 1)
    low, high = bounds[0] + (bounds[1] - bounds[0]) * ends
    return low, high


def _quantile(level: float, degrees: float) -> float:
    return float(stdtrit(degrees, (1 + level) / 2))  # the normal's for infinitely many


def _centre(d: np.ndarray, bounds: Bounds | None) -> tuple[float, float]:
    """The middle of the interval of the mean of d, and its variance: see `difference_interval`."""
    n = len(d)
    if n < 2:
        return np.nan, np.nan
    if bounds is None:
        return d.mean(), d.var(ddof=1) / n
    squares = np.sum(d**2)
    q = squares / np.count_nonzero(d) if squares > TINY else (bounds[1] - bounds[0]) ** 2
    return d.sum() / (n + 2), (squares + q - d.sum() ** 2 / (n + 2)) / (n + 2) ** 2


def _difference(
    d: np.ndarray, centre: float, variance: float, degrees: float, level: float, bounds: Bounds | None
) -> Estimate:
    half = _quantile(level, degrees) * np.sqrt(variance)
    widest = np.inf if bounds is None else bounds[1] - bounds[0]
    low, high = np.clip([centre - half, centre + half], -widest, widest)
    return Estimate(d.mean() if len(d) else np.nan, low, high, len(d))


def _comparison(d: np.ndarray, difference: Estimate, p_value: float, test: str) -> Comparison:
    better, worse = int((d > 0).sum()), int((d < 0).sum())
    return Comparison(difference, float(p_value) if len(d) else np.nan, better, worse, len(d) - better - worse, test)


def _sign_flip(d: np.ndarray) -> float:
    """Two-sided p-value of "each d could as well have had the other sign". Where d is 0 there is nothing to flip."""
    d = d[d != 0]
    if len(d) < 2:
        return 1.0  # permutation_test wants two; of one, either sign is as extreme
    from scipy.stats import permutation_test  # half a second

    return permutation_test((d,), np.mean, permutation_type="samples", vectorized=True, batch=500, rng=0).pvalue
