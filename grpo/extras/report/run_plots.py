"""Figures of the metrics of runs, the same in notebooks and in `python -m grpo.plots`. Needs the extra `plot` (matplotlib).

A function draws on the axes that it gets. The colours are those of Okabe and Ito, which colour-blind people can distinguish.
"""

from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo.extras.report.runs import band
from grpo.runs.run import Run
from grpo.system.errors import UserError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def tidy(axes: Axes, **labels) -> None:
    """Give a panel the common style. labels: arguments of `axes.set`."""
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_size(9)
    axes.spines[["top", "right"]].set_visible(False)


def panels(n: int, columns: int = 4, width: float = 2.6, height: float = 2.1, **shape) -> tuple[Figure, list[Axes]]:
    """Return a figure with n panels and their axes. columns: panels in a line. width, height: of one panel, in inches."""
    columns = min(n, columns)
    lines = -(-n // columns)
    size = (width * columns, height * lines)
    figure, grid = plt.subplots(lines, columns, squeeze=False, figsize=size, layout="constrained", **shape)
    for axes in grid.flat:
        axes.set_prop_cycle(color=COLOURS)
    for axes in grid.flat[n:]:
        axes.remove()
    for axes in grid.flat[max(n - columns, 0) : n]:
        axes.tick_params(labelbottom=True)  # the lowest panel of its column, even if not in the last line
    return figure, list(grid.flat[:n])


def draw_curves(runs: Iterable[Run], metric: str, axes: Axes, **labels) -> None:
    """Draw the mean over seeds against rollouts: a line for each arm, and its 95 % interval as a band if it has several seeds.

    The interval of few seeds can be very wide: it extends the axis by at most the range of the means on either side.
    """
    table = band(runs, metric)
    for arm, part in table.groupby("arm", sort=False):
        few = "o" if len(part) < 15 else None
        (line,) = axes.plot(part["rollouts"], part["mean"], marker=few, markersize=3, linewidth=1.5, label=arm)
        ends = part[["low", "high"]]
        if part["mean"].between(0, 1).all():  # a share: its interval ends at 0 and 1
            ends = ends.clip(0, 1)
        axes.fill_between(part["rollouts"], ends["low"], ends["high"], color=line.get_color(), alpha=0.2, linewidth=0)
    least, most = table["mean"].min(), table["mean"].max()
    low, high = axes.get_ylim()
    if room := most - least:
        axes.set_ylim(max(low, least - room), min(high, most + room))
    tidy(axes, **{"xlabel": "rollouts", "ylabel": metric, **labels})


def metrics(runs: Sequence[Run], names: Sequence[str]) -> Figure:
    """Draw `draw_curves` of each metric that at least one run has logged, with one legend if there are several arms."""
    shown = [name for name in names if any(len(run.curve(name)) for run in runs)]
    if not shown:
        raise UserError(f"the runs have none of the metrics {', '.join(names)}: take columns of metrics.csv")
    figure, grid = panels(len(shown), width=3, height=2.4)
    for name, axes in zip(shown, grid, strict=True):
        draw_curves(runs, name, axes, title=name, ylabel="")
    lines, labels = grid[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(lines, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure
