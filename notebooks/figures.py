"""Figures and a table that only these notebooks show. Needs the extra `plot` (matplotlib).

`grpo/extras/report/run_plots.py` has the figures that programs draw, too.
"""

import math
import textwrap
from collections.abc import Mapping
from typing import Literal

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from grpo.extras.losses.anatomy import against_ratio
from grpo.extras.report.run_plots import COLOURS, panels, tidy
from grpo.extras.report.runs import differences
from grpo.extras.report.statistics import over_seeds
from grpo.objectives.algorithm import Algorithm
from grpo.runs.run import Run


def error_bars(table: pd.DataFrame, axes: Axes, **labels) -> None:
    """Draw the columns value, low and high as points with error bars against the index: numbers to scale, names side by side."""
    numbers = pd.api.types.is_numeric_dtype(table.index)
    x = table.index if numbers else range(len(table))
    bars = [table["value"] - table["low"], table["high"] - table["value"]]
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


def effects(done: Mapping[str, list[Run]]) -> dict[str, pd.DataFrame]:
    """Return a table for each key that differs: value, low, high, n over all runs that share a value of the key."""
    runs = [run for members in done.values() for run in members]
    accuracy = pd.Series([run.accuracy.iloc[-1] for run in runs])
    tables = {}
    for one in differences(runs):
        values = [
            value if isinstance(value := one.values[run], int | float) else str(value or "default") for run in runs
        ]
        rows = {value: over_seeds(part)._asdict() for value, part in accuracy.groupby(values, sort=False)}
        table = pd.DataFrame(rows).T.rename_axis(one.name)
        # numbers are sorted by size
        tables[one.name] = table.sort_index(key=lambda index: pd.to_numeric(index, errors="coerce"), kind="stable")
    return tables


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
