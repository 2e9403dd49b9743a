"""Agreement of a judge with people, beyond chance, and its liking for length. Knows lists of labels, nothing of rewards.

Agreement alone flatters: who always says "right" agrees with people as often as answers are right.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np


def cohen_kappa(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """Return kappa = (po - pe) / (1 - pe) of two raters of the same items (Cohen 1960). po: how often they agree; pe: how often
    they would by chance, the sum over labels c of p_a(c) p_b(c). NaN if pe = 1, or without items."""
    of_a, of_b, n = Counter(a), Counter(b), len(a)
    po = sum(x == y for x, y in zip(a, b, strict=True)) / n if n else math.nan
    pe = sum(of_a[c] * of_b[c] for c in of_a) / n**2 if n else math.nan
    return (po - pe) / (1 - pe) if pe < 1 else math.nan


def krippendorff_alpha(items: Sequence[Sequence[Hashable]]) -> float:
    """Return alpha = 1 - Do / De of nominal labels (Krippendorff 2011). items: each with the labels of its raters, which may
    be any number; items with fewer than two do not count. NaN if all labels are equal.

    Do: how often two labels of an item differ, an item of m labels with weight m. De: the same of any two of the n labels.
    """
    tallies = [Counter(labels) for labels in items if len(labels) > 1]
    of_all = sum(tallies, Counter())
    n = of_all.total()
    differ = sum(k * (tally.total() - k) / (tally.total() - 1) for tally in tallies for k in tally.values())
    expected = sum(k * (n - k) for k in of_all.values()) / max(n - 1, 1)
    return 1 - differ / expected if expected else math.nan


def correlation_inside(groups: Sequence[Hashable], a: Sequence[float], b: Sequence[float]) -> float:
    """Return Pearson's correlation of a and b after the mean of its group is taken from each. NaN if one does not vary."""
    rows = np.array([a, b], dtype=float)
    for group in set(groups):
        members = np.array([label == group for label in groups])
        rows[:, members] -= rows[:, members].mean(1, keepdims=True)
    scale = math.sqrt((rows[0] ** 2).sum() * (rows[1] ** 2).sum())
    return float(rows[0] @ rows[1]) / scale if scale > 1e-12 else math.nan
