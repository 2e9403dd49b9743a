"""Measure how often 95 % intervals contain the true value: those of grpo.evaluation.intervals, and naive ones.

    python benchmarks/intervals.py            # the worlds of the table of docs/evaluation.md, some minutes
    python benchmarks/intervals.py --json     # every case

Problems, their samples and runs are drawn from distributions with a known true value: 4,000 data sets a case, always the same.
Single outcomes need no drawing, since the binomial distribution gives their coverage. The naive interval takes all samples as
independent: for a difference it ignores the pairing, for two arms that seeds differ, for one arm that problems differ.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from itertools import groupby, product
from pathlib import Path

import numpy as np
from scipy.stats import binom

sys.path.insert(0, str(Path(__file__).parents[1]))
from grpo.evaluation.intervals import Estimate, mean_interval
from grpo.extras.report.statistics import arm_interval, compare_arms, difference_interval, over_seeds

SHARE = (0, 1)
Draw = Callable[[np.random.Generator], tuple[Estimate, Estimate | None, float]]

# probabilities to solve a problem, and their mean
ABILITIES = {
    "all alike, 0.3": (lambda rng, n: np.full(n, 0.3), 0.3),
    "Beta(2, 2)": (lambda rng, n: rng.beta(2, 2, n), 0.5),
    "Beta(0.5, 0.5)": (lambda rng, n: rng.beta(0.5, 0.5, n), 0.5),
    "Beta(1, 9), hard": (lambda rng, n: rng.beta(1, 9, n), 0.1),
    "40 % never, 30 % always, rest even": (lambda rng, n: np.clip(rng.uniform(-4 / 3, 2, n), 0, 1), 0.45),
}
FEW, SATURATED = "Beta(0.2, 1.8), most near 0", "2 % never, rest 99 %"
LIMITS = {
    FEW: (lambda rng, n: rng.beta(0.2, 1.8, n), 0.1),
    SATURATED: (lambda rng, n: np.where(rng.random(n) < 0.02, 0, 0.99), 0.98 * 0.99),
}


def covered(draw: Draw, sets: int) -> dict:
    """Return the shares of data sets for which our interval and the naive one contain the true value."""
    rng = np.random.default_rng(0)
    ours, naive = [], []
    for _ in range(sets):
        estimate, other, truth = draw(rng)
        ours.append(estimate.low <= truth <= estimate.high)
        if other is not None:
            naive.append(other.low <= truth <= other.high)
    return {"coverage": np.mean(ours), "naive": np.mean(naive) if naive else None}


def single(p: float, n: int) -> dict:
    """Return the exact coverage, one sample a problem. at_p jumps with p, as counts are whole; coverage averages p +- 0.02."""
    counts = np.arange(n + 1)
    low, high = np.array([mean_interval(np.arange(n) < count, bounds=SHARE)[1:3] for count in counts]).T

    def at(p: float) -> float:
        return binom.pmf(counts, n, p)[(low <= p) & (p <= high)].sum()

    return {"coverage": np.mean([at(q) for q in np.linspace(p - 0.02, p + 0.02, 41)]), "at_p": at(p)}


def clustered(ability: str, n: int, k: int) -> Draw:
    def draw(rng: np.random.Generator) -> tuple[Estimate, Estimate, float]:
        make, truth = (ABILITIES | LIMITS)[ability]
        chances = make(rng, n)
        right = rng.binomial(k, chances)
        naive = mean_interval(np.arange(n * k) < right.sum(), bounds=SHARE)
        return mean_interval(right / k, bounds=SHARE), naive, truth

    return draw


def lengths(n: int, k: int) -> Draw:
    """Lengths are log-normal over problems and over their samples; for large k a problem's mean has skewness 1.8."""

    def draw(rng: np.random.Generator) -> tuple[Estimate, Estimate, float]:
        x = 100 * np.exp(rng.normal(0, 0.5, (n, 1)) + rng.normal(0, 0.3, (n, k)))
        return mean_interval(x.mean(axis=1)), mean_interval(x.ravel()), 100 * np.exp((0.5**2 + 0.3**2) / 2)

    return draw


def unpaired(a: np.ndarray, b: np.ndarray, k: int) -> Estimate:
    """Return the textbook interval for two independent shares, from all samples. a, b: [problems], k samples a problem."""
    p, q, n = a.mean(), b.mean(), len(a) * k
    half = 1.96 * np.sqrt((p * (1 - p) + q * (1 - q)) / n)
    return Estimate(q - p, q - p - half, q - p + half, n)


def pairs(ability: str, gain: float, n: int, k: int) -> Draw:
    """a solves a problem with probability p, b with p + gain p (1 - p): certain outcomes stay certain."""

    def draw(rng: np.random.Generator) -> tuple[Estimate, Estimate, float]:
        p = ABILITIES[ability][0](rng, n)
        q = p + gain * p * (1 - p)
        truth = gain * {"Beta(2, 2)": 0.2, "Beta(0.5, 0.5)": 0.125, "40 % never, 30 % always, rest even": 0.05}[ability]
        a, b = rng.binomial(k, p) / k, rng.binomial(k, q) / k
        return difference_interval(b - a), unpaired(a, b, k), truth

    return draw


def greedy(better: float, worse: float, n: int) -> Draw:
    """One outcome a problem in each arm, mostly equal, like greedy answers before and after training."""

    def draw(rng: np.random.Generator) -> tuple[Estimate, Estimate, float]:
        u, right = rng.random(n), rng.random(n) < 0.5
        a = np.where(u < better, 0, np.where(u < better + worse, 1, right))
        b = np.where(u < better, 1, np.where(u < better + worse, 0, right))
        return difference_interval(b - a), unpaired(a, b, 1), better - worse

    return draw


def arms(seeds: int, n: int, k: int, spread: float) -> Draw:
    """Two arms whose gain differs by problem and whose runs differ by up to +- spread in accuracy."""

    def draw(rng: np.random.Generator) -> tuple[Estimate, Estimate, float]:
        base, gain = rng.uniform(0.25, 0.65, n), 0.05 + rng.uniform(-0.1, 0.1, n)
        chances = [base + shift + rng.uniform(-spread, spread, (seeds, 1)) for shift in (0, gain)]
        a, b = (rng.binomial(k, chance) / k for chance in chances)
        return compare_arms(a, b).difference, difference_interval(b.mean(axis=0) - a.mean(axis=0)), 0.05

    return draw


def arm(seeds: int, n: int, k: int, spread: float) -> Draw:
    """One such arm. The naive interval uses the seeds alone and ignores that there are other problems."""

    def draw(rng: np.random.Generator) -> tuple[Estimate, Estimate, float]:
        a = rng.binomial(k, rng.uniform(0.25, 0.65, n) + rng.uniform(-spread, spread, (seeds, 1))) / k
        return arm_interval(a), over_seeds(a.mean(axis=1)), 0.45

    return draw


def runs(n: int) -> Draw:
    """Scores of runs are normal."""

    def draw(rng: np.random.Generator) -> tuple[Estimate, None, float]:
        return over_seeds(rng.normal(size=n)), None, 0.0

    return draw


def cases(sets: int) -> Iterator[dict]:
    for p in (0.05, 0.3, 0.5, 0.9):
        for n in (50, 200, 1000):
            yield {"what": "share, 1 sample a problem", "world": f"p = {p}", "n": n, **single(p, n)}
    drawn: list[tuple[str, str, int, int, Draw]] = []
    for ability in ABILITIES:
        for n in (50, 200):
            for k in (4, 8, 16):
                drawn.append(("share, 4 to 16 samples", ability, n, k, clustered(ability, n, k)))
    for n in (10, 20):
        drawn.append(("share, few problems", FEW, n, 8, clustered(FEW, n, 8)))
    for n in (50, 200):
        drawn.append(("share, nearly all solved", SATURATED, n, 8, clustered(SATURATED, n, 8)))
    for n in (50, 200, 1000):
        for k in (1, 8):
            drawn.append(("length", "log-normal", n, k, lengths(n, k)))
    for better, worse in ((0.2, 0.05), (0.1, 0.1), (0.1, 0.02)):
        for n in (50, 200, 1000):
            drawn.append(("difference, 1 sample", f"better {better}, worse {worse}", n, 1, greedy(better, worse, n)))
    for n in (50, 200):
        drawn.append(("difference, few differ", "better 0.05, worse 0.01", n, 1, greedy(0.05, 0.01, n)))
    for ability, gain in (("Beta(2, 2)", 0), ("Beta(0.5, 0.5)", 0.5), ("40 % never, 30 % always, rest even", 0.5)):
        for n in (50, 200):
            for k in (4, 16):
                drawn.append(("difference, 4 to 16 samples", ability, n, k, pairs(ability, gain, n, k)))
    for what, make in (("two arms, 3 and 5 seeds", arms), ("one arm, 3 and 5 seeds", arm)):
        for spread, seeds, n, k in product((0.0, 0.02, 0.08), (3, 5), (50, 200), (1, 8)):
            drawn.append((what, f"seeds move it by up to {spread:g}", n, k, make(seeds, n, k, spread)))
    for n in (3, 5, 10):
        drawn.append(("mean of runs", f"normal, {n} runs", n, 1, runs(n)))
    for what, world, n, k, draw in drawn:
        yield {"what": what, "world": world, "n": n, "k": k, **covered(draw, sets)}


def percent(found: list[float]) -> str:
    low, high = (f"{100 * value:.1f}" for value in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sets", type=int, default=4000, help="data sets a case")
    args = parser.parse_args()
    found = list(cases(args.sets))
    if args.json:
        print(json.dumps(found))
        sys.exit()
    print("| estimated | world | problems or runs | cases | coverage, % | naive, % |\n|---|---|---|---|---|---|")
    for (what, world), group in groupby(found, lambda case: (case["what"], case["world"])):
        rows = list(group)
        sizes = sorted({row["n"] for row in rows})
        naive = [row["naive"] for row in rows if row.get("naive") is not None]
        print(
            f"| {what} | {world} | {', '.join(map(str, sizes))} | {len(rows)} "
            f"| {percent([row['coverage'] for row in rows])} | {percent(naive) if naive else ''} |"
        )
