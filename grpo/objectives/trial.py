"""Tries functions of tensors on a few made-up tokens, before a model is loaded."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo.objectives.batch import TokenBatch
from grpo.system.errors import UserError


def tried(name: str, attempt: Callable[[], Any], *shapes: tuple[int, ...]) -> Any:
    """Return the result of the attempt. Raises UserError unless it is, or begins with, a finite tensor of one of the shapes.

    name: of the function, for the error.
    """
    try:
        result = attempt()
    except UserError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise UserError(f"{name} fails on random numbers: {type(error).__name__}: {error}") from error
    tensor = result[0] if isinstance(result, tuple) else result
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    if shape not in shapes:
        allowed = " or ".join(str([*shape]) for shape in shapes)
        raise UserError(f"{name} must return a tensor of shape {allowed}, and gave {shape}")
    if not tensor.isfinite().all():
        raise UserError(f"{name} gives numbers that are not finite on random ones: look at its settings")
    return result


def silent_without_advantage(policy_term: Callable[[Tensor, TokenBatch], tuple]) -> bool:
    """Return whether a surrogate has no gradient where the advantage is 0. A user's surrogate may have other terms.

    policy_term: that of an Algorithm.
    """
    logprobs, batch = random_batch()
    with torch.enable_grad():
        counted = torch.tensor([[True], [False]]).expand(2, 3)
        term, _, _ = policy_term(logprobs, replace(batch, advantages=torch.zeros(2, 3), counted=counted))
        return not torch.autograd.grad(term.sum(), logprobs, materialize_grads=True)[0].any()


def random_batch() -> tuple[Tensor, TokenBatch]:
    """Return log-probabilities [2, 3] and a batch that fits them, to try functions on."""
    logprobs, old, rollout = -torch.rand(3, 2, 3, generator=torch.Generator().manual_seed(0))
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    batch = replace(even_batch(2, 3, 0.0), rollout_logprobs=rollout, old_logprobs=old, advantages=advantages)
    return logprobs.requires_grad_(), batch


def even_batch(rows: int, tokens: int, logprob: float) -> TokenBatch:
    """Return a batch of [rows, tokens], each token with this log-probability (rollout, old and reference) and weight 1."""
    old, ones = torch.full((rows, tokens), logprob), torch.ones(rows, tokens)
    return TokenBatch(
        ids=torch.zeros(rows, tokens + 1, dtype=torch.int64),
        attention_mask=torch.ones(rows, tokens + 1, dtype=torch.int64),
        mask=ones.bool(),
        rollout_logprobs=old,
        sample=torch.arange(rows),
        turn=torch.zeros(rows, tokens, dtype=torch.int64),
        values=torch.zeros(rows, tokens),
        group=torch.zeros(rows, dtype=torch.int64),
        old_logprobs=old,
        prob_squares=old.exp(),
        reference_logprobs=old,
        weights=ones,
    )
