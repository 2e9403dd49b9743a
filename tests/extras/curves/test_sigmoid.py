"""The sigmoid of accuracy against compute: numbers by hand, curves of known parameters, how often intervals have the truth."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import minimize

from grpo.evaluation.intervals import Estimate, quantile
from grpo.extras.curves.sigmoid import Fit, Points, Sigmoid, difference

DEMO, LATE, SLOW = Sigmoid(0.27, 0.93, 2.0, 6.0), Sigmoid(0.05, 0.6, 4.0, 20.0), Sigmoid(0.2, 0.7, 0.7, 8.0)
STRAIGHT = Sigmoid(0.2, 0.8, 1.0, 100.0)
EVERY_4 = np.arange(0, 81, 4.0)


def drawn(sigmoid: Sigmoid, compute: np.ndarray, n: int, rng: np.random.Generator) -> Points:
    """Return a curve with the noise of n problems."""
    return Points(compute, rng.binomial(n, sigmoid.at(compute)) / n, np.full(len(compute), n))


def test_the_curve_by_hand():
    """Half of the compute of C_mid with B = 2: 1 / (1 + 2^2) of the way."""
    accuracy = Sigmoid(0.2, 0.8, 2.0, 100.0).at([0, 50, 100, 200, np.inf])
    assert accuracy == pytest.approx([0.2, 0.2 + 0.6 / 5, 0.5, 0.2 + 0.6 * 4 / 5, 0.8])


@pytest.mark.parametrize("samples", [None, np.full(21, 200)])
@pytest.mark.parametrize("truth", [DEMO, SLOW, Sigmoid(0.5, 1.0, 1.5, 5.0)])
def test_without_noise_the_parameters_are_found(truth, samples):
    fit = Fit([Points(EVERY_4, truth.at(EVERY_4), samples)])
    assert fit.sigmoid == pytest.approx(truth, rel=1e-6)
    assert fit.at(320.0).value == pytest.approx(truth.at(320.0), rel=1e-6)


def test_a_curve_in_other_units_has_the_same_shape():
    units = [Fit([drawn(DEMO, EVERY_4, 200, np.random.default_rng(0))._replace(compute=k * EVERY_4)]) for k in (1, 3e6)]
    one, many = (fit.parameters() for fit in units)
    assert many["C_mid"][:3] == pytest.approx([3e6 * end for end in one["C_mid"][:3]], rel=1e-5)
    assert [many[name][:3] for name in ("A", "B", "R0")] == [
        pytest.approx(one[name][:3], rel=1e-5) for name in ("A", "B", "R0")
    ]


def test_what_is_flat_or_straight_is_refused():
    rng = np.random.default_rng(0)
    fit = Fit([drawn(Sigmoid(0.4, 0.4, 1.0, 20.0), EVERY_4, 200, rng)])
    assert fit.reason == "the accuracy does not rise by more than its noise"
    assert "no ceiling is in sight: any from" in Fit([drawn(STRAIGHT, EVERY_4, 1000, rng)]).reason
    falling = Points(EVERY_4, DEMO.at(EVERY_4)[::-1], np.full(21, 200))
    assert Fit([falling]).reason == "the accuracy does not rise by more than its noise"
    assert Fit([Points(EVERY_4, np.full(21, 0.3))]).reason
    assert Fit([drawn(DEMO, EVERY_4, 200, rng)]).reason is None


def test_seeds_that_differ_give_no_ceiling():
    """Two runs with ceilings of 93 and 85 %: in log-odds 2.59 and 1.73, so half of the interval is 12.7 x 0.43 = 5.4."""
    low = Sigmoid(0.27, 0.85, 2.0, 6.0)
    two = [Points(EVERY_4, one.at(EVERY_4), np.full(21, 200)) for one in (DEMO, low)]
    assert Fit(two).reason == "these seeds leave any ceiling from 3 % to 100 %: add seeds"
    assert Fit([two[0]] * 2).reason is None


def test_the_weight_of_a_point_is_the_inverse_of_its_variance():
    """A curve without noise: p (1 - p) / n with one more right and one more wrong answer among n + 2."""
    fit = Fit([Points(EVERY_4, DEMO.at(EVERY_4), np.full(21, 200))])
    p = (200 * DEMO.at(EVERY_4) + 1) / 202
    assert (
        fit.w == pytest.approx(200 / (p * (1 - p)), rel=0.1) and Fit([Points(EVERY_4, DEMO.at(EVERY_4))]).w.max() == 1
    )


def test_no_accuracy_is_above_one():
    fit = Fit([drawn(Sigmoid(0.5, 1.0, 1.5, 5.0), EVERY_4, 200, np.random.default_rng(0))])
    assert fit.reason is None and 0.95 < fit.at(320.0).high <= fit.at(np.inf).high == 1


def test_an_end_of_an_interval_is_as_far_from_the_points_as_it_may_be():
    """Another way to the same number: the nearest sigmoid among those that have this accuracy there, by a general minimizer."""
    fit = Fit([drawn(DEMO, EVERY_4, 200, np.random.default_rng(1))])
    limit = max(quantile(0.95, np.inf) ** 2, quantile(0.95, 17) ** 2 * fit.least / 17)
    for end in fit.at(320.0)[1:3]:

        def squares(free: np.ndarray, end: float = end) -> float:
            start, steepness, middle = free[0], *np.exp(free[1:])
            done = 1 / (1 + (middle / 320.0) ** steepness)
            ceiling = start + (end - start) / done
            return fit.squares(Sigmoid(start, ceiling, steepness, middle)) + 1e6 * max(0.0, ceiling - 1)

        begin = [fit.sigmoid.start, *np.log(fit.sigmoid[2:])]
        found = minimize(squares, begin, method="Nelder-Mead", options={"maxfev": 2000})
        assert found.fun - fit.least == pytest.approx(limit, rel=0.03)


def test_several_runs_have_the_interval_of_a_jackknife():
    """t of two degrees of freedom is 4.303; the variance is (n - 1) / n times the squares about the mean of the n fits."""
    rng = np.random.default_rng(0)
    curves = [drawn(DEMO._replace(ceiling=a), EVERY_4, 200, rng) for a in (0.9, 0.92, 0.95)]
    found = Fit(curves).at(320.0)
    parts = np.array([Fit(curves[:i] + curves[i + 1 :]).sigmoid.at(320.0) for i in range(3)])
    logs = np.log(parts / (1 - parts))
    centre = np.log(found.value / (1 - found.value))
    half = 4.3026527 * np.sqrt(2 / 3 * ((logs - logs.mean()) ** 2).sum())
    assert found[1:] == pytest.approx((1 / (1 + np.exp(half - centre)), 1 / (1 + np.exp(-half - centre)), 3))
    assert found.high - found.low > 2 * (Fit(curves[:1]).at(320.0).high - Fit(curves[:1]).at(320.0).low)


def test_a_difference_by_hand():
    """The half towards 0 is sqrt(0.05^2 + 0.1^2) = 0.1118; p is Student's for 0.2 / 0.1118 of its quantile."""
    a = SimpleNamespace(at=lambda *given: Estimate(0.5, 0.47, 0.6, 9), curves=[0] * 5)
    b = SimpleNamespace(at=lambda *given: Estimate(0.7, 0.65, 0.72, 9), curves=[0] * 5)
    estimate, p = difference(a, b, 100.0)
    assert estimate[:3] == pytest.approx((0.2, 0.2 - 0.0125**0.5, 0.2 + (0.02**2 + 0.03**2) ** 0.5))
    assert 0.001 < p < 0.05
    swapped, same = difference(b, a, 100.0)
    assert swapped.value == pytest.approx(-0.2) and same == pytest.approx(p)
    b.at = lambda *given: Estimate(0.6, 0.5, 0.7, 9)
    estimate, p = difference(a, b, 100.0)
    assert estimate.low < 0 and p > 0.05
    b.at = lambda *given: Estimate(0.5 + 0.0125**0.5, 0.45 + 0.0125**0.5, 0.7, 9)  # the interval begins at 0
    estimate, p = difference(a, b, 100.0)
    assert (estimate.low, p) == (pytest.approx(0, abs=1e-9), pytest.approx(0.05))


def test_the_arm_that_is_better_with_more_compute_is_found():
    """b is behind for half of the runs, and far ahead later."""
    rng = np.random.default_rng(0)
    a, b = Sigmoid(0.2, 0.6, 2.0, 5.0), Sigmoid(0.2, 0.85, 2.0, 45.0)
    x = np.arange(0, 81, 5.0)
    fits = [Fit([drawn(arm, x, 2000, rng) for _ in range(3)]) for arm in (a, b)]
    assert [fit.reason for fit in fits] == [None, None]
    estimate, p = difference(*fits, 4 * 80.0)
    assert estimate.low > 0 and p < 0.05
    assert estimate.low < b.at(320.0) - a.at(320.0) < estimate.high


def coverage(truth: Sigmoid, x: np.ndarray, n: int, runs: int, sets: int, spread: float = 0.0) -> tuple[float, float]:
    """Return how many of the data sets are refused, and how often the interval after four times the compute has the truth in the
    others. spread: the standard deviation of A over seeds."""
    rng, found = np.random.default_rng(0), []
    for _ in range(sets):
        seeds = [truth._replace(ceiling=truth.ceiling + spread * rng.normal()) for _ in range(runs)]
        fit = Fit([drawn(seed, x, n, rng) for seed in seeds])
        if fit.reason is None:
            _, low, high, _ = fit.at(4 * x[-1])
            found.append(low <= truth.at(4 * x[-1]) <= high)
    return 1 - len(found) / sets, float(np.mean(found)) if found else 1.0


def test_an_interval_has_the_truth():
    refused, covered = coverage(DEMO, EVERY_4, 200, runs=1, sets=12)
    assert refused == 0 and covered >= 10 / 12


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("truth", "x", "n", "runs", "spread", "most"),
    [
        (DEMO, EVERY_4, 200, 1, 0, 0.05),
        (LATE, np.arange(0, 41, 4.0), 200, 1, 0, 0.3),
        (SLOW, np.arange(0, 101, 5.0), 500, 1, 0, 0.3),
        (DEMO, EVERY_4, 200, 3, 0, 0.05),
        (DEMO, EVERY_4, 200, 3, 0.02, 0.05),
        (LATE, np.arange(0, 41, 4.0), 200, 3, 0.02, 0.5),
        (SLOW, np.arange(0, 101, 5.0), 500, 5, 0.02, 0.3),
    ],
)
def test_every_interval_has_the_truth(truth, x, n, runs, spread, most):
    """In 200 data sets. most: the share that may be refused."""
    refused, covered = coverage(truth, x, n, runs, 200, spread)
    print(f"{truth}, {runs} runs, A +- {spread}: {refused:.3f} refused, {covered:.3f} of the others have the truth")
    assert refused <= most and covered >= 0.9


@pytest.mark.nightly
def test_a_straight_curve_gets_a_wrong_number_as_rarely_as_it_may():
    """A number that is given at all is wrong here, as a bend was chance: in 5 % of the data sets at most, and their noise."""
    refused, _ = coverage(STRAIGHT, np.arange(0, 41, 4.0), 200, 1, 200)
    assert refused >= 0.92
