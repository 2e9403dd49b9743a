"""A sigmoid of accuracy against compute, fitted to the curve of one run or of several seeds, with intervals. Knows arrays alone.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)                     ScaleRL, arXiv 2510.13786

R0 is the accuracy without training, A the ceiling that no compute exceeds, C_mid the compute after which half of the way is done,
and B how steep the way is. For given B and C_mid the curve is linear in R0 and A, so a grid of these two has every fit.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, fdtri, logit, stdtr

from grpo.evaluation.intervals import TINY, Estimate, quantile

STEEPNESS = 0.5, 12.0  # B; at 0.5 the middle four fifths of the way take a factor of 6,561 of compute
MIDDLE = 1 / 30, 100.0  # C_mid, from this share of the first compute that is not 0 to this multiple of the last
GRID = 24, 32  # values of B and of C_mid
ZOOMS = 3  # grids, each on the part of the last one that fits the points
STARTS = np.linspace(0, 1, 15)  # values of R0 for a node of the grid, in its range
PARAMETERS = 4
FEWEST = PARAMETERS + 1  # points of a run
NARROW = 0.1  # an interval of A that ends at 1 says something if it is not wider
WIDEST = 0.5  # an interval of A over seeds that is wider says nothing
EDGE = 1e-6  # accuracies so near to 0 or 1 count as that


class Points(NamedTuple):
    """The curve of a run. compute, accuracy: [points]. samples: [points], the samples behind each accuracy; None: unknown."""

    compute: np.ndarray
    accuracy: np.ndarray
    samples: np.ndarray | None = None

    def part(self, chosen: np.ndarray) -> "Points":
        """Return the chosen points. chosen: [points] of bool."""
        return Points(*(None if column is None else column[chosen] for column in self))


class Sigmoid(NamedTuple):
    """start: R0. ceiling: A. steepness: B. middle: C_mid, in units of compute."""

    start: float
    ceiling: float
    steepness: float
    middle: float

    def at(self, compute: ArrayLike) -> np.ndarray:
        """Return the accuracies after so much compute: R0 for 0, A for infinity."""
        return self.start + (self.ceiling - self.start) * way_done(compute, self.steepness, self.middle)


def way_done(compute: ArrayLike, steepness: ArrayLike, middle: ArrayLike) -> np.ndarray:
    """Return 1 / (1 + (C_mid / C)^B), the share of the way that is done."""
    with np.errstate(divide="ignore"):
        return expit(np.asarray(steepness) * (np.log(compute) - np.log(middle)))


class Nodes(NamedTuple):
    """Least squares at nodes (B, C_mid), all [nodes]: steepness and middle; the moments of 1 - share and share (uu, uv, vv), and
    of them with the accuracy (uy, vy); the R0 and A that fit best if they are free, and the sum of squares (sse) left."""

    steepness: np.ndarray
    middle: np.ndarray
    uu: np.ndarray
    uv: np.ndarray
    vv: np.ndarray
    uy: np.ndarray
    vy: np.ndarray
    start: np.ndarray
    ceiling: np.ndarray
    sse: np.ndarray

    def chosen(self, nodes: np.ndarray) -> "Nodes":
        """Return a part of the nodes. nodes: indices, or [nodes] of bool."""
        return Nodes(*(part[nodes] for part in self))

    @property
    def variance(self) -> np.ndarray:
        """The variance of R0, if A is free."""
        return self.vv / (self.uu * self.vv - self.uv**2)

    def bounded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the R0 and A that fit best with 0 <= R0 <= A <= 1, and the sum of squares that they leave."""
        level = np.clip((self.uy + self.vy) / (self.uu + 2 * self.uv + self.vv), 0, 1)
        sides = [  # of the triangle that holds (R0, A): the best point of each
            (np.zeros_like(level), np.clip(self.vy / self.vv, 0, 1)),
            (np.clip((self.uy - self.uv) / self.uu, 0, 1), np.ones_like(level)),
            (level, level),
        ]
        rise = [(start - self.start, ceiling - self.ceiling) for start, ceiling in sides]
        worse = np.stack([self.uu * a * a + 2 * self.uv * a * b + self.vv * b * b for a, b in rise])
        free = (self.start >= 0) & (self.start <= self.ceiling) & (self.ceiling <= 1)
        side, nodes = np.where(free, 3, worse.argmin(axis=0)), np.arange(len(level))
        starts, ceilings = np.stack([*(np.stack(one) for one in sides), [self.start, self.ceiling]], axis=1)
        return starts[side, nodes], ceilings[side, nodes], self.sse + np.where(free, 0.0, worse.min(axis=0))


class Fit:
    """The sigmoid nearest to the curves of an arm, of one run or of several that differ in the seed alone, with its intervals.

    The points have the weights of binomial shares, or equal ones if the numbers of samples are unknown. 0 <= R0 <= A <= 1.

    With several runs an interval is about other seeds: the fit to all points, without one run at a time (jackknife), with
    Student's t for the number of runs, on the scale of log-odds for accuracies and of logarithms for B and C_mid.

    With one run it is about the noise of its evaluations, and says nothing of other seeds: a value is in it if a sigmoid that has
    it is near enough to the points (profile likelihood), near enough for their binomial noise and for what they scatter.
    """

    def __init__(self, curves: Sequence[Points]) -> None:
        """curves: of each run, with FEWEST points at least, of which one has some compute."""
        self.curves = list(curves)
        self.regions: dict[float, tuple[Nodes, np.ndarray]] = {}  # by level, what `near` has found
        self.x, self.y = (np.concatenate([curve[i] for curve in curves]).astype(float) for i in (0, 1))
        counts = [curve.samples for curve in curves]
        self.n = None if any(count is None for count in counts) else np.concatenate(counts).astype(float)
        self.last = self.x.max()
        self.degrees = len(self.x) - PARAMETERS
        self.w = self.weights(np.full_like(self.y, self.y.mean()))
        self.w = self.weights(self.at_node(self.best).at(self.x))  # of the noise about the curve, not about the points
        self.sigmoid = self.nearest()
        self.least = self.squares(self.sigmoid)

    def weights(self, accuracy: np.ndarray) -> np.ndarray:
        """Return the inverse variances of the points if these are the true accuracies. They are never infinite."""
        if self.n is None:
            return np.ones_like(self.y)
        p = (self.n * accuracy + 1) / (self.n + 2)
        return self.n / (p * (1 - p))

    def squares(self, sigmoid: Sigmoid) -> float:
        """Return the weighted sum of squared distances of the points from a sigmoid."""
        return float(self.w @ (self.y - sigmoid.at(self.x)) ** 2)

    # -- the nearest sigmoid

    def nodes(self, steepness: np.ndarray, middle: np.ndarray) -> Nodes:
        """Return the nodes at these B and C_mid, [nodes] each."""
        v = way_done(self.x, steepness[:, None], middle[:, None])
        u, w, y = 1 - v, self.w, self.y
        uu, uv, vv, uy, vy = (u * u) @ w, (u * v) @ w, (v * v) @ w, u @ (w * y), v @ (w * y)
        determinant = uu * vv - uv**2
        start, ceiling = (vv * uy - uv * vy) / determinant, (uu * vy - uv * uy) / determinant
        sse = ((y - start[:, None] * u - ceiling[:, None] * v) ** 2) @ w
        found = Nodes(steepness, middle, uu, uv, vv, uy, vy, start, ceiling, sse)
        return found.chosen(determinant > 1e-9 * uu * vv)  # the others have all points on one height

    def grid(self, ends: np.ndarray) -> Nodes:
        """Return a grid of nodes. ends: the logarithms of B and C_mid between which it is, [2, 2]."""
        values = (np.exp(np.linspace(*two, n)) for two, n in zip(ends, GRID, strict=True))
        steepness, middle = np.meshgrid(*values)
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.nodes(steepness.ravel(), middle.ravel())

    @cached_property
    def range(self) -> np.ndarray:
        """The logarithms of B and of C_mid between which a sigmoid is looked for: [2, 2]."""
        first = self.x[self.x > 0].min()
        return np.log([STEEPNESS, (MIDDLE[0] * first, MIDDLE[1] * self.last)])

    def nearest(self) -> Sigmoid:
        """Return the sigmoid with the smallest sum of squares, for the weights that the points have now."""
        from scipy.optimize import least_squares  # imported here, since it takes a quarter of a second

        best = self.best

        def sigmoid(logarithms: np.ndarray) -> Sigmoid:
            steepness, middle = np.exp(np.clip(logarithms, *self.range.T))[:, None]
            nodes = self.nodes(steepness, middle)
            return self.at_node(nodes if len(nodes.start) else best)

        def distances(logarithms: np.ndarray) -> np.ndarray:
            return self.w**0.5 * (self.y - sigmoid(logarithms).at(self.x))

        begin = np.log([best.steepness[0], best.middle[0]])
        exact = {"method": "lm", "xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14}
        return sigmoid(least_squares(distances, begin, **exact).x)

    @property
    def best(self) -> Nodes:
        """The node of the grid whose sigmoid has the smallest sum of squares, for the weights that the points have now."""
        nodes = self.grid(self.range)
        return nodes.chosen([nodes.bounded()[2].argmin()])

    def at_node(self, nodes: Nodes) -> Sigmoid:
        """Return the sigmoid of the first node."""
        start, ceiling, _ = nodes.bounded()
        return Sigmoid(*(float(part[0]) for part in (start, ceiling, nodes.steepness, nodes.middle)))

    # -- is there a sigmoid at all?

    @cached_property
    def reason(self) -> str | None:
        """Why the points do not give A, B and C_mid; None if they do. The points must rise by more than their noise explains, and
        the 95 % interval of A must end below 1, or not be wider than NARROW; over seeds it must not be wider than WIDEST."""
        mean = (self.w @ self.y) / self.w.sum()
        rise = (self.w @ (self.y - mean) ** 2 - self.least) / (PARAMETERS - 1)
        scatter = self.least / self.degrees
        noise = scatter if self.n is None else max(1.0, scatter)
        if rise <= TINY + fdtri(PARAMETERS - 1, self.degrees, 0.99) * noise:
            return "the accuracy does not rise by more than its noise"
        _, low, high, _ = self.profile(np.inf)
        if high > 1 - EDGE and high - low > NARROW:
            return f"no ceiling is in sight: any from {100 * low:.0f} % to 100 % fits the points"
        if len(self.curves) > 1:
            _, low, high, _ = self.at(np.inf)
            if high - low > WIDEST:
                return f"these seeds leave any ceiling from {100 * low:.0f} % to {100 * high:.0f} %: add seeds"
        return None

    # -- intervals

    def at(self, compute: float, level: float = 0.95) -> Estimate:
        """Return the accuracy after so much compute with its interval: R0 for 0, A for infinity. n: runs, or one run's points."""
        if len(self.curves) > 1:
            return self.over_seeds(lambda sigmoid: sigmoid.at(compute), logit, expit, level)
        return self.profile(compute, level)

    def parameters(self, level: float = 0.95) -> dict[str, Estimate]:
        """Return A, B, C_mid and R0 with their intervals."""
        return {
            "A": self.at(np.inf, level),
            "B": self.of_shape("steepness", level),
            "C_mid": self.of_shape("middle", level),
            "R0": self.at(0.0, level),
        }

    def of_shape(self, name: str, level: float) -> Estimate:
        """Return B ("steepness") or C_mid ("middle") with its interval, which for one run ends at the ends of the grid."""
        if len(self.curves) > 1:
            return self.over_seeds(lambda sigmoid: getattr(sigmoid, name), np.log, np.exp, level)
        value = getattr(self.sigmoid, name)
        values = [value, *getattr(self.near(level)[0], name)]
        return Estimate(value, min(values), max(values), len(self.x))

    @cached_property
    def without(self) -> list[Sigmoid]:
        """The sigmoid nearest to all runs but one, for each of them."""
        return [Fit(curves).sigmoid for curves in combinations(self.curves, len(self.curves) - 1)]

    def over_seeds(self, of: Callable[[Sigmoid], float], scale: Callable, back: Callable, level: float) -> Estimate:
        """Return a value of the sigmoid with the interval of a jackknife over runs. scale: on which it is; back: its inverse."""
        whole, *parts = (float(of(sigmoid)) for sigmoid in (self.sigmoid, *self.without))
        if scale is logit:
            whole, parts = np.clip(whole, EDGE, 1 - EDGE), np.clip(parts, EDGE, 1 - EDGE)
        centre, others = scale(whole), scale(np.array(parts))
        n = len(others)
        half = quantile(level, n - 1) * np.sqrt((n - 1) * others.var())
        return Estimate(float(whole), float(back(centre - half)), float(back(centre + half)), n)

    def near(self, level: float) -> tuple[Nodes, np.ndarray]:
        """Return nodes with sigmoids that are near enough to the points, and for each the sum of squares that it may have more.

        It is near enough if its sum of squares is above the least one by no more than t^2 times what the points scatter, or, if
        their binomial noise is known, z^2.
        """
        if level in self.regions:
            return self.regions[level]
        limit = quantile(level, self.degrees) ** 2 * self.least / self.degrees
        if self.n is not None:
            limit = max(limit, quantile(level, np.inf) ** 2)
        limit += self.least
        ends = self.range
        nodes = self.grid(ends)
        for _ in range(ZOOMS):
            inside = nodes.bounded()[2] <= limit
            steps = np.diff(ends)[:, 0] / (np.array(GRID) - 1)
            found = (np.append(part[inside], best) for part, best in zip(nodes[:2], self.sigmoid[2:], strict=True))
            ends = np.array([(np.log(part.min()), np.log(part.max())) for part in found])
            ends = np.clip(ends + steps[:, None] * [-1, 1], *(self.range.T[:, :, None]))
            nodes = self.grid(ends)
        nodes = nodes.chosen(nodes.bounded()[2] <= limit)
        self.regions[level] = nodes, limit - nodes.sse
        return self.regions[level]

    def profile(self, compute: float, level: float = 0.95) -> Estimate:
        """Return the accuracy after so much compute with the interval of all sigmoids that are near enough to the points.

        At a node, R0 is in an interval, and A in another one for each R0; both are cut to 0 <= R0 <= A <= 1. Every accuracy of
        the curve grows with A.
        """
        nodes, slack = self.near(level)
        wide = np.sqrt(slack * nodes.variance)
        nodes, slack, wide = Nodes(*(part[:, None] for part in nodes)), slack[:, None], wide[:, None]
        least, most = np.clip(nodes.start - wide, 0, 1), np.clip(nodes.start + wide, 0, 1)
        start = least + (most - least) * STARTS
        room = np.maximum(slack - (start - nodes.start) ** 2 / nodes.variance, 0)
        middle, half = (nodes.vy - nodes.uv * start) / nodes.vv, np.sqrt(room / nodes.vv)
        fits = (middle + half >= start) & (middle - half <= 1)
        value, done = float(self.sigmoid.at(compute)), way_done(compute, nodes.steepness, nodes.middle)
        ends = [np.clip(end, start, 1) for end in (middle - half, middle + half)]
        low, high = ((start + (end - start) * done)[fits] for end in ends)
        return Estimate(value, min([value, *low]), max([value, *high]), len(self.x))


def difference(a: Fit, b: Fit, compute: float, level: float = 0.95) -> tuple[Estimate, float]:
    """Return by how much b is above a after so much compute, with its interval, and the p-value of no difference.

    The interval joins those of both (MOVER, Zou and Donner 2008, Statistics in Medicine 27:1693). The p-value is Student's, with
    the half of the interval towards 0 as its measure and Satterthwaite's degrees of freedom, so it is below 1 - level if and only
    if the interval excludes 0.
    """
    one, two = a.at(compute, level), b.at(compute, level)
    value = two.value - one.value
    downs = np.array([one.high - one.value, two.value - two.low])
    ups = np.array([one.value - one.low, two.high - two.value])
    down, up = np.linalg.norm(downs), np.linalg.norm(ups)
    estimate = Estimate(value, value - down, value + up, min(one.n, two.n))
    sides, half = (downs, down) if value > 0 else (ups, up)
    if half == 0:
        return estimate, float(value == 0)
    degrees = np.array([len(fit.curves) - 1 or fit.degrees for fit in (a, b)])
    variances = (sides / [quantile(level, df) for df in degrees]) ** 2
    df = variances.sum() ** 2 / (variances**2 / degrees).sum()
    return estimate, float(2 * stdtr(df, -abs(value) / half * quantile(level, df)))
