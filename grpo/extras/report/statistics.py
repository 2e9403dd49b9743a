"""Comparisons of problems, of runs with several seeds, and of arms: intervals and tests. Knows arrays alone.

evaluation/intervals.py has the interval of one mean. NaN marks an unknown value, which is left out.
docs/evaluation.md shows which function answers which question, and how often each interval has the true value.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bdtr, stdtr

from grpo.evaluation.intervals import TINY, Bounds, Estimate, complete, mean_interval, quantile, wilson


class Comparison(NamedTuple):
    """b compared with a. better, worse, ties: on how many problems b is so. test: the name of the test, for a table."""

    difference: Estimate
    p_value: float
    better: int
    worse: int
    ties: int
    test: str


def difference_interval(d: ArrayLike, level: float = 0.95, bounds: Bounds | None = (0, 1)) -> Estimate:
    """Return the mean of differences with its interval. d: [problems], each the difference of two means within bounds.

    For shares it is the interval of Agresti and Min (2005, Statistics in Medicine 24:729), extended to every d in [-1, 1]. They
    add half a pair to each of the four cells: two problems whose d sum to 0 and whose squares sum to 1. Here the squares sum to
    q, the mean square of the d that are not 0 (1 if all are 0), which is the same for single outcomes. With S = sum d:
    S/(n+2) +- t sqrt(sum d^2 + q - S^2/(n+2)) / (n+2). It has a width even if no problem differs. bounds None: Student's t.
    """
    d = np.asarray(d, dtype=float)
    d = d[~np.isnan(d)]
    return _difference(d, *_centre(d, bounds), len(d) - 1, level, bounds)


def paired(a: ArrayLike, b: ArrayLike, level: float = 0.95, bounds: Bounds | None = (0, 1)) -> Comparison:
    """Compare b with a on the same problems. a, b: [problems], each the mean of a problem's own samples.

    The interval is `difference_interval`; bounds None is for lengths and other unbounded values. The p-value is for no
    difference: the exact McNemar test if all values are single outcomes, else a sign-flip permutation test (exact up to 13
    differences that are not 0, else 9,999 draws with a fixed seed). The interval is approximate, so near 5 % they may disagree.
    """
    (a,), (b,) = complete(a, b, bounds=bounds)
    d = np.round(b - a, 12)
    if bounds is not None and np.isin([a, b], bounds).all():
        better, differ = int((d > 0).sum()), int((d != 0).sum())
        p_value, test = min(1.0, 2 * bdtr(min(better, differ - better), differ, 0.5)), "exact McNemar"
    else:
        p_value, test = _sign_flip(d), "sign-flip permutation"
    return _comparison(d, difference_interval(d, level, bounds), p_value, test)


def over_seeds(values: ArrayLike, level: float = 0.95) -> Estimate:
    """Return the mean over runs with different seeds, [runs], with Student's t interval, which is wide for three runs."""
    return mean_interval(values, level)


def arm_interval(a: ArrayLike, level: float = 0.95, bounds: Bounds = (0, 1)) -> Estimate:
    """Return the mean share of one arm, with an interval for other seeds and other problems. a: [seeds, problems].

    The variances of seeds and problems are those of `compare_arms`, for one arm. Each has its own Student's t (Howe 1974, JASA
    69:789): h^2 = t_seeds^2 seeds + t_problems^2 max(problems - noise, 0), which enters Wilson's formula as z^2 p (1-p) / m.
    Problems with NaN in any run are left out; n is the number of the others. With one seed it equals `mean_interval`.
    """
    (a,) = complete(a, bounds=bounds)
    alone = mean_interval(a.mean(axis=0), level, bounds)
    if len(a) < 2 or alone.n < 2:
        return alone
    a = (a - bounds[0]) / (bounds[1] - bounds[0])
    n, p, (seeds, noise) = alone.n, a.mean(), _seeds(a)
    problems = max(a.mean(axis=0).var(ddof=1) / n - noise, 0.0)
    t, z = quantile(level, len(a) - 1), quantile(level, n - 1)
    variance = (t / z) ** 2 * seeds + problems
    m = n if variance < TINY else p * (1 - p) / variance
    return Estimate(alone.value, *wilson(p, m, z, bounds), n)


def compare_arms(a: ArrayLike, b: ArrayLike, level: float = 0.95, bounds: Bounds | None = (0, 1)) -> Comparison:
    """Compare arm b with arm a, for other seeds and other problems. a: [seeds of a, problems], b: [seeds of b, problems].

    Seeds and problems are both random effects (two-way analysis of variance). The problems are the same in both arms, the seeds
    are not paired. With S seeds in an arm:

        seeds     var(means of the runs) / S, summed over arms; it contains the noise of the samples
        noise     residual mean square / (S problems), summed over arms
        problems  the variance in `difference_interval`, of the means over seeds; it contains the noise once more

    V = seeds + max(problems - noise, 0), and at least noise/4, in case a few runs agree by chance. The degrees of freedom are
    V^2 / sum(V_k^2 / df_k) (Satterthwaite 1946). Interval and p-value come from the same t. Problems with NaN in any run are left
    out. With one seed in an arm the effect of seeds is unknown: the result is `paired`, and `test` adds "seeds not varied".
    """
    a, b = complete(a, b, bounds=bounds)
    if min(len(a), len(b), a.shape[1]) < 2:
        comparison = paired(a.mean(axis=0), b.mean(axis=0), level, bounds)
        return comparison._replace(test=f"{comparison.test}, seeds not varied")

    d = np.round(b.mean(axis=0) - a.mean(axis=0), 12)
    centre, problems = _centre(d, bounds)
    (of_a, noise_a), (of_b, noise_b) = _seeds(a), _seeds(b)
    noise = noise_a + noise_b
    parts = [  # variances with their degrees of freedom
        (of_a, len(a) - 1),
        (of_b, len(b) - 1),
        (max(problems - noise, 0.0), len(d) - 1),
    ]
    variance = max(sum(part for part, _ in parts), noise / 4, TINY**2)  # TINY: in case nothing varies
    degrees = variance**2 / max(sum(part**2 / df for part, df in parts), TINY**4)
    p_value = 2 * stdtr(degrees, -abs(centre) / variance**0.5)
    difference = _difference(d, centre, variance, degrees, level, bounds)
    return _comparison(d, difference, p_value, "t over seeds and problems")


def holm(p_values: ArrayLike) -> list[float]:
    """Return p-values of several tests, adjusted so that the probability of any false positive stays below the level.

    Holm (1979): the i-th smallest of m is multiplied by m + 1 - i, and is never below the one before it. NaN stays NaN and does
    not count.
    """
    p = np.array(p_values, dtype=float)
    order = np.argsort(p)  # NaN last
    factors = np.count_nonzero(~np.isnan(p)) - np.arange(len(p))
    p[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1)
    return p.tolist()


def _seeds(arm: np.ndarray) -> tuple[float, float]:
    """Return the variance of an arm's mean due to its seeds, and the part of it that is noise of the samples."""
    runs = arm.mean(axis=1)
    residual = arm - runs[:, None] - arm.mean(axis=0) + arm.mean()
    noise = (residual**2).sum() / ((len(arm) - 1) * (arm.shape[1] - 1)) / arm.size
    return runs.var(ddof=1) / len(arm), noise


def _centre(d: np.ndarray, bounds: Bounds | None) -> tuple[float, float]:
    """Return the centre of the interval in `difference_interval`, and its variance."""
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
    half = quantile(level, degrees) * np.sqrt(variance)
    widest = np.inf if bounds is None else bounds[1] - bounds[0]
    low, high = np.clip([centre - half, centre + half], -widest, widest)
    return Estimate(d.mean() if len(d) else np.nan, low, high, len(d))


def _comparison(d: np.ndarray, difference: Estimate, p_value: float, test: str) -> Comparison:
    better, worse = int((d > 0).sum()), int((d < 0).sum())
    ties = len(d) - better - worse
    return Comparison(difference, float(p_value) if len(d) else np.nan, better, worse, ties, test)


def _sign_flip(d: np.ndarray) -> float:
    """Return the two-sided p-value of the hypothesis that the signs of d are random. Zeros are left out."""
    d = d[d != 0]
    if len(d) < 2:
        return 1.0  # permutation_test needs two; for one, both signs are equally extreme
    from scipy.stats import permutation_test  # imported here, since it takes half a second

    return permutation_test((d,), np.mean, permutation_type="samples", vectorized=True, batch=500, rng=0).pvalue
