"""Numbers and figures of an objective: its loss, its gradient, its advantages and its token weights.

Every value is computed by the Algorithm itself (`loss` with autograd, `credit`, `weights`), so a figure cannot be out of date.
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
from grpo.objectives.batch import Scores
from grpo.objectives.trial import even_batch
from grpo.runs.plots import COLOURS, panels, tidy

OLD_LOGPROB = -3.0  # of every token before the update; new probabilities are at most 1 for ratios up to e^3


def against_ratio(
    algorithm: Algorithm, ratios: Tensor, advantage: float, tokens: int = 10, together: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the loss of an answer, and its gradient by one token's log-probability, for each ratio of that token.

    ratios: [R], new over old probability of the first token of an answer.
    tokens: length of the answer; its other tokens keep ratio 1, or all have the same ratio (together=True).

    Every token has weight 1, so the reduction has no influence (see `weights_by_length`).
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


def advantages_by_solved(algorithm: Algorithm, group_size: int = 8) -> tuple[Tensor, Tensor]:
    """Return the advantages of a right answer (reward 1) and of a wrong one (reward 0), [G - 1] each.

    Entry i belongs to a group with i + 1 right answers. All these groups are in one rollout, together with a group of 0 and a
    group of G right answers, because some advantage estimators use the whole rollout.
    """
    right = torch.arange(group_size) < torch.arange(group_size + 1)[:, None]  # [G + 1, G]
    rewards, short = right.float(), torch.ones(right.shape)
    scores = algorithm.shaped(Scores(rewards, {"correct": rewards}, short, short, torch.zeros_like(right)))
    advantages = algorithm.credit(scores, even_batch(right.numel(), 1, OLD_LOGPROB)).advantages.view_as(rewards)
    return advantages[1:-1, 0], advantages[1:-1, -1]


def weights_by_length(algorithm: Algorithm, lengths: Tensor) -> Tensor:
    """Return the weight of each token of an answer [B] in one update whose answers have these lengths [B]."""
    return algorithm.weights(torch.arange(int(lengths.max())) < lengths[:, None])[:, 0]


# -- figures


def alike(curves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge curves that coincide into one, under their names joined by commas."""
    found: dict[str, list[str]] = {}  # first name of each set of equal curves -> all names of the set
    for name, curve in curves.items():
        same = (other for other in found if torch.allclose(curve, curves[other], rtol=1e-3, atol=1e-6))
        found.setdefault(next(same, name), []).append(name)
    return {", ".join(names): curves[first] for first, names in found.items()}


def pairs(x: Tensor, shapes: Mapping[str, Tensor], labels: tuple[str, str], sharey: bool = True, **line) -> Figure:
    """Draw a panel for each entry of `shapes`, {title: [2, R]}: two lines against x [R]."""
    figure, grid = panels(len(shapes), sharex=True, sharey=sharey)
    for axes, (names, curves) in zip(grid, shapes.items(), strict=True):
        for curve, colour, label in zip(curves, COLOURS, labels, strict=False):
            axes.plot(x, curve, color=colour, label=label, **line)
        tidy(axes)
        axes.set_title(textwrap.fill(names, 30), fontsize=8)
    grid[0].legend(fontsize=7, frameon=False)
    return figure


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
    figure = pairs(ratios, shapes, ("A = +1", "A = \N{MINUS SIGN}1"), sharey=bound is not None)
    for axes in figure.axes:
        axes.axvline(1, color="black", linewidth=0.6, alpha=0.5)
        axes.set_xscale("log")
        axes.set_xticks([least, 1, most], [f"{tick:g}" for tick in (least, 1, most)])
        axes.minorticks_off()
        if bound is not None:
            axes.set_ylim(-bound, bound)
    figure.supxlabel("ratio of the token, new over old probability", fontsize=9)
    figure.supylabel(("change of the loss", "gradient by the log-probability")[index], fontsize=9)
    return figure


def advantages(algorithms: Mapping[str, Algorithm], group_size: int = 8) -> Figure:
    """Draw the advantages of right and wrong answers against the number of right answers in the group."""
    shapes = alike({name: torch.stack(advantages_by_solved(a, group_size)) for name, a in algorithms.items()})
    figure = pairs(torch.arange(1, group_size), shapes, ("right", "wrong"), marker="o", markersize=3)
    figure.supxlabel(f"right answers of the {group_size} in the group", fontsize=9)
    figure.supylabel("advantage", fontsize=9)
    return figure


def weights(algorithms: Mapping[str, Algorithm], lengths: Tensor) -> Figure:
    """Draw the weight of a token in the loss against the length of its answer, for one update with answers of `lengths` [B]."""
    shapes = alike({name: weights_by_length(a, lengths) for name, a in algorithms.items()})
    figure, (axes,) = panels(1, width=8, height=3)
    for names, weight in shapes.items():
        axes.plot(lengths, weight, marker="o", markersize=3, label=textwrap.fill(names, 40))
    tidy(axes, yscale="log", xlabel="tokens of the answer", ylabel="weight of each of them")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
