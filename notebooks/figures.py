"""Figures and a table that only these notebooks show. Needs the extra `plot` (matplotlib).

`grpo/extras/report/run_plots.py` has the figures that programs draw, too.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from grpo.extras.losses.anatomy import against_ratio
from grpo.extras.report.comparison import compared
from grpo.extras.report.run_plots import COLOURS, panels, tidy
from grpo.extras.report.runs import arms, differences, in_digits
from grpo.extras.report.statistics import over_seeds
from grpo.objectives.algorithm import Algorithm
from grpo.runs.run import Run


def error_bars(table: pd.DataFrame, axes: Axes, **labels) -> None:
    """Draw the columns value, low and high as points with error bars against the index: numbers to scale, names side by side.
    A value without an interval has no bar."""
    numbers = pd.api.types.is_numeric_dtype(table.index)
    x = table.index if numbers else range(len(table))
    ends = table["value"] - table["low"], table["high"] - table["value"]
    bars = [end.fillna(0).clip(lower=0) for end in ends]  # rounding
    axes.errorbar(x, table["value"], yerr=bars, fmt="o-" if numbers else "o", markersize=4, capsize=3, linewidth=1.5)
    if not numbers:
        axes.set_xticks(x, table.index)
        axes.set_xlim(-0.5, len(table) - 0.5)
    tidy(axes, **labels)


def stack(table: pd.DataFrame, axes: Axes, **labels) -> None:
    """Draw the columns of a table as stacked areas against its index."""
    axes.stackplot(table.index, table.fillna(0).T, labels=list(table), colors=COLOURS, alpha=0.8)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    tidy(axes, **{"xlabel": "rollouts", **labels})


# -- sweeps


def last_accuracy(run: Run) -> float:
    """Return the held-out accuracy of the last evaluation."""
    return float(run.accuracy.iloc[-1])


def by_seed(done: Mapping[str, list[Run]]) -> pd.DataFrame:
    """Return the last accuracies as a table: a row for each arm, a column for each seed, then those of `compared`."""
    seeds = {arm: {f"seed {run.seed}": last_accuracy(run) for run in runs} for arm, runs in done.items()}
    names = sorted({run.seed for runs in done.values() for run in runs})
    table = pd.DataFrame.from_dict(seeds, orient="index", columns=None)[[f"seed {name}" for name in names]]
    return table.join(compared(done).drop(columns="seeds")).rename_axis("arm")


def in_words(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of `by_seed` as texts, each number with its interval in one column. Unknown numbers are empty."""

    def percent(name: str) -> pd.Series:
        return table[name].map("{:.1%}".format, na_action="ignore")

    def with_interval(name: str, before: str = "") -> pd.Series:
        ends = [(100 * table[f"{before}{end}"]).map("{:.1f}".format, na_action="ignore") for end in ("low", "high")]
        return percent(name) + (" (" + ends[0] + " to " + ends[1] + ")").fillna("")

    words = pd.DataFrame({name: percent(name) for name in table if name.startswith("seed ")})
    words["accuracy (95 %)"] = with_interval("value")
    if "difference" in table:
        words["difference (95 %)"] = with_interval("difference", "difference_")
        words[["p", "p (Holm)"]] = table[["p", "p (Holm)"]].map("{:.2g}".format, na_action="ignore")
        counts = [table[name].map("{:.0f}".format, na_action="ignore") for name in ("better", "worse", "ties")]
        words["better / worse / ties"] = counts[0] + " / " + counts[1] + " / " + counts[2]
    return words.fillna("")


def effects(done: Mapping[str, list[Run]]) -> dict[str, pd.DataFrame]:
    """Return a table for each key that differs: value, low, high, n over all runs that share a value of the key.

    Where a single key differs these are the arms, so the intervals are those of `compared`.
    """
    runs = [run for members in done.values() for run in members]
    accuracy = pd.Series(map(last_accuracy, runs))
    found = differences(runs)
    tables = {}
    for one in found:
        values = values_of(runs, one.values)
        rows = {value: over_seeds(part)._asdict() for value, part in accuracy.groupby(values, sort=False)}
        table = pd.DataFrame(rows).T.rename_axis(one.name)
        if len(found) == 1:
            of = dict(zip(runs, values, strict=True))
            names = {arm: of[members[0]] for arm, members in arms(runs, found).items()}
            table.update(compared(arms(runs, found)).rename(names)[["value", "low", "high"]])
        # numbers are sorted by size
        tables[one.name] = table.sort_index(key=lambda index: pd.to_numeric(index, errors="coerce"), kind="stable")
    return tables


def values_of(runs: Sequence[Run], values: Mapping[Run, Any]) -> list[float | str]:
    """Return the value of a key in each run: numbers if all are numbers, else words."""
    found = [values[run] for run in runs]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in found):
        return found
    return ["default" if value is None else in_digits(value) for value in found]


def swept(done: Mapping[str, list[Run]]) -> Figure | None:
    """Draw the accuracy against each key that differs: a dot for each run, and the means of `effects` with their intervals.
    Numbers that are ten times apart are on a scale of logarithms. None if no key differs."""
    runs = [run for members in done.values() for run in members]
    tables = effects(done)
    if not tables:
        return None
    figure, grid = panels(len(tables), width=4.5, height=3)
    for axes, one in zip(grid, differences(runs), strict=True):
        table = tables[one.name]
        error_bars(table, axes, xlabel=one.name, ylabel="held-out accuracy, last evaluation")
        at = values_of(runs, one.values)
        if (numbers := pd.api.types.is_numeric_dtype(table.index)) and min(at) > 0 and max(at) >= 10 * min(at):
            axes.set_xscale("log")
            axes.minorticks_off()
        if numbers and len(table) <= 8:
            axes.set_xticks(table.index, [in_digits(float(value), 4) for value in table.index])
        elif numbers:  # a search has drawn them
            axes.minorticks_on()
        else:
            at = [table.index.get_loc(value) for value in at]
            axes.set_xticks(range(len(table)), [textwrap.fill(str(name), 14) for name in table.index])
        axes.scatter(at, list(map(last_accuracy, runs)), s=14, color=COLOURS[1], alpha=0.8, zorder=3)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure


# -- objectives


def alike(curves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge curves that coincide into one, under their names joined by commas. A curve: a tensor of any shape."""
    sets: dict[str, list[str]] = {}  # first name of each set of equal curves -> all names of the set
    for name, curve in curves.items():
        same = (other for other in sets if torch.allclose(curve, curves[other], rtol=1e-3, atol=1e-6))
        sets.setdefault(next(same, name), []).append(name)
    return {", ".join(names): curves[first] for first, names in sets.items()}


def objectives(
    algorithms: Mapping[str, Algorithm],
    what: Literal["loss", "gradient"] = "loss",
    least: float = 0.25,
    most: float = 4.0,
    bound: float | None = 4.0,
    **setting,
) -> Figure:
    """Draw the loss or its gradient against the ratio. Algorithms that agree in both share a panel.

    least, most: range of the ratio.
    bound: range of the y-axis, from -bound to bound; with None each panel has its own range.
    setting: further arguments of `against_ratio`.
    """
    ratios = torch.linspace(math.log(least), math.log(most), 401).exp()
    drawn = {}  # [2, 2, R] each: loss or gradient, sign of the advantage
    for name, algorithm in algorithms.items():
        signs = [torch.stack(against_ratio(algorithm, ratios, sign, **setting)) for sign in (1.0, -1.0)]
        drawn[name] = torch.stack(signs, dim=1)
    index = ("loss", "gradient").index(what)
    shapes = {names: curves[index] for names, curves in alike(drawn).items()}
    figure, grid = panels(len(shapes), sharex=True, sharey=bound is not None)
    for axes, (names, of_signs) in zip(grid, shapes.items(), strict=True):
        for curve, colour, label in zip(of_signs, COLOURS, ("A = +1", "A = \N{MINUS SIGN}1"), strict=False):
            axes.plot(ratios, curve, color=colour, label=label)
        tidy(axes)
        axes.set_title(textwrap.fill(names, 30), fontsize=8)
        axes.axvline(1, color="black", linewidth=0.6, alpha=0.5)
        axes.set_xscale("log")
        axes.set_xticks([least, 1, most], [f"{tick:g}" for tick in (least, 1, most)])
        axes.minorticks_off()
        if bound is not None:
            axes.set_ylim(-bound, bound)
    grid[0].legend(fontsize=7, frameon=False)
    figure.supxlabel("ratio of the token, new over old probability", fontsize=9)
    figure.supylabel(("change of the loss", "gradient by the log-probability")[index], fontsize=9)
    return figure
