"""Numbers and figures of an objective: its loss and its gradient against the ratio of a token.

Every value is computed by the Algorithm itself (`loss` with autograd), so a figure cannot be out of date.
Algorithms whose values agree share a panel or a line. Needs the extra `plot` (matplotlib).
"""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from matplotlib.figure import Figure
from torch import Tensor

from grpo.objectives.algorithm import Algorithm
from grpo.objectives.trial import even_batch
from grpo.runs.plots import COLOURS, panels, tidy

OLD_LOGPROB = -3.0  # of every token before the update; new probabilities are at most 1 for ratios up to e^3


def against_ratio(
    algorithm: Algorithm, ratios: Tensor, advantage: float, tokens: int = 10, together: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the loss of an answer, and its gradient by one token's log-probability, for each ratio of that token.

    ratios: [R], new over old probability of the first token of an answer.
    tokens: length of the answer; its other tokens keep ratio 1, or all have the same ratio (together=True).

    Every token has weight 1, so the reduction has no influence.
    Returns (loss [R], gradient [R]); the loss is the difference from the loss at ratio 1 for all tokens.
    """
    batch = even_batch(len(ratios) + 1, tokens, OLD_LOGPROB)
    weights = batch.weights.requires_grad_()
    moved = torch.zeros_like(weights)
    moved[:-1, slice(None) if together else slice(1)] = ratios.log()[:, None]
    logprobs = (batch.old_logprobs + moved).requires_grad_()
    batch = replace(batch, weights=weights, advantages=torch.full_like(weights, advantage))
    loss, _ = algorithm.loss(logprobs, torch.zeros_like(logprobs), batch)
    of_tokens, gradient = torch.autograd.grad(loss, (weights, logprobs))  # a loss is sum(weights x token loss)
    losses = of_tokens.sum(1)
    return losses[:-1] - losses[-1], gradient[:-1, 0]


# -- figures


def alike(curves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge curves that coincide into one, under their names joined by commas."""
    found: dict[str, list[str]] = {}  # first name of each set of equal curves -> all names of the set
    for name, curve in curves.items():
        same = (other for other in found if torch.allclose(curve, curves[other], rtol=1e-3, atol=1e-6))
        found.setdefault(next(same, name), []).append(name)
    return {", ".join(names): curves[first] for first, names in found.items()}


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
    drawn = {
        name: torch.stack([torch.stack(against_ratio(algorithm, ratios, sign, **setting)) for sign in (1.0, -1.0)], 1)
        for name, algorithm in algorithms.items()
    }  # [2, 2, R]: loss or gradient, sign of the advantage
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
