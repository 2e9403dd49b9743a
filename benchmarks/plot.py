"""Draw the figure of docs/performance.md from the --json output of vs_trl.py and scaling.py.

python benchmarks/plot.py VS_TRL.json SCALING.json --out docs/performance.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PARTS = {"generation": "#4c78a8", "update": "#f58518", "other": "#bab0ac"}


def bars(axes: plt.Axes, cases: dict) -> None:
    """Draw two bars for each case, TRL's first, and a line at the floor."""
    for place, found in enumerate(cases.values()):
        for side, shift in (("trl", -0.21), ("grpo", 0.21)):
            bottom = 0.0
            for part, colour in PARTS.items():
                height = found[side][part]
                axes.bar(place + shift, height, 0.38, bottom, color=colour, alpha=0.55 if side == "trl" else 1.0)
                bottom += height
            if side == "trl":
                axes.annotate("TRL", (place + shift, bottom), ha="center", va="bottom", fontsize=7)
        axes.hlines(found["floor"], place - 0.42, place + 0.42, color="black", linewidth=1)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in PARTS.values()]
    axes.legend([*handles, plt.Line2D([], [], color="black")], [*PARTS, "floor"], frameon=False, fontsize=8)
    axes.set_xticks(range(len(cases)), cases)
    axes.set(ylabel="CPU seconds for a cycle")


def lines(axes: plt.Axes, scaling: dict) -> None:
    for axis, colour in (("prompt", "#4c78a8"), ("answer", "#f58518"), ("group", "#54a24b")):
        sizes = [point[axis] for point in scaling[axis]["points"]]
        for measure, style in (("rollout", "--"), ("update", "-")):
            seconds = [point[measure] for point in scaling[axis]["points"]]
            label = f"{axis}, {measure}: {scaling[axis]['exponents'][measure]:.2f}"
            axes.plot(sizes, seconds, style, color=colour, marker="o", markersize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens of it, or samples", ylabel="CPU seconds")
    axes.legend(title="what grows, exponent", loc="upper left", frameon=False, fontsize=7, title_fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vs_trl", type=Path)
    parser.add_argument("scaling", type=Path)
    parser.add_argument("--out", default="docs/performance.png")
    given = parser.parse_args()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", width_ratios=[3, 2])
    bars(left, json.loads(given.vs_trl.read_text()))
    lines(right, json.loads(given.scaling.read_text()))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(given.out, dpi=150)


if __name__ == "__main__":
    main()
