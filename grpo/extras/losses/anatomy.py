"""The anatomy of an objective: its loss and its gradient against the ratio of a token.

The Algorithm itself computes every value (`loss` with autograd), so none can be out of date.
"""

from dataclasses import replace

import torch
from torch import Tensor

from grpo.objectives.algorithm import Algorithm
from grpo.objectives.trial import even_batch

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
