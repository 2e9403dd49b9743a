"""Layer 3 - figures: what runs left and what objectives are, drawn alike everywhere. Needs the extra `plot` (matplotlib).

A function draws on the axes it is given, or makes a figure of small multiples and returns it. Colours are Okabe's and Ito's,
which colour-blind people tell apart; bands are 95 % intervals.
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def tidy(axes: Axes, **labels) -> None:
    """The look of every panel. labels: as `axes.set` takes them."""
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def panels(n: int, columns: int = 4, width: float = 2.6, height: float = 2.1, **shape) -> tuple[Figure, list[Axes]]:
    """A figure of n panels, so many in a line. width, height: of one panel, inches."""
    columns = min(n, columns)
    lines = -(-n // columns)
    size = (width * columns, height * lines)
    figure, grid = plt.subplots(lines, columns, squeeze=False, figsize=size, layout="constrained", **shape)
    for axes in grid.flat:
        axes.set_prop_cycle(color=COLOURS)
    for axes in grid.flat[n:]:
        axes.remove()
    for axes in grid.flat[max(n - columns, 0) : n]:
        axes.tick_params(labelbottom=True)  # though its line is not the last one
    return figure, list(grid.flat[:n])
