"""Tries the functions of an Algorithm's axes on random numbers, before a model is loaded."""

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo.objectives.arguments import OF_TOKENS, call, named, parameters
from grpo.objectives.batch import TokenBatch
from grpo.objectives.loss import policy_log_ratio, token_weights
from grpo.system.errors import UserError
from grpo.system.progress import Progress

if TYPE_CHECKING:
    from grpo.objectives.algorithm import Algorithm


def kl_in_reward(a: "Algorithm") -> bool:
    """Return whether the KL enters the rewards of samples, not those of tokens."""
    return a.kl.in_reward and a.kl.place == "reward"


def check_functions(a: "Algorithm", prompts: int, group_size: int) -> None:
    """Raises UserError for a function that raises, returns no finite tensor of the right shape, or leaves nothing to learn."""
    some = partial(torch.rand, (prompts, group_size), generator=torch.Generator().manual_seed(0))
    least = -1.0 if a.overlong_share or kl_in_reward(a) else 0.0  # these make rewards negative
    rewards, shape = some() + least, (prompts, group_size)
    given = {"rewards": rewards, "lengths": 1 + some(), "parts": defaultdict(some), "progress": Progress()}
    given |= {"steps": rewards[..., None], "observations": [[["a"]] * group_size] * prompts}
    rows = even_batch(prompts * group_size, 3, -1.0)
    given |= {name: getattr(rows, name, None) for name in OF_TOKENS}
    own, takes = copy.deepcopy(a.advantage), parameters(a.advantage)  # it may have a state
    if "examples" not in takes:  # whose columns are unknown
        shapes = ((prompts * group_size, 3),) if "mask" in takes else (shape, (*shape, 1))
        advantages = tried(a, "advantage", lambda: call(own, given), *shapes)
        if group_size == 1 and not advantages.any():
            least = "at least 2 are needed (algo=reinforce_pp takes 1)"
            raise UserError(f"rollout.group_size=1: advantages compare the samples of a prompt, {least}")
    logprobs, batch = random_batch()
    if callable(a.level):
        tried(a, "level", lambda: policy_log_ratio(logprobs, batch.old_logprobs, batch.mask, a.level), (2, 3))
    if callable(a.reduce):
        tried(a, "reduce", lambda: token_weights(batch.mask, a.reduce, a.max_tokens), (2, 3))
    term, logged, _ = tried(a, "surrogate", lambda: a.policy_term(logprobs, batch), (2, 3))
    if a.correction is not None:
        old = batch.old_logprobs
        given = {"log_w": torch.zeros(2, 3), "mask": batch.mask, "old_logprobs": old, "rollout_logprobs": old}
        tried(a, "correction", lambda: call(a.correction, given), (2, 3))
    if a.choice is not None:
        given = {"logprobs": some().flatten(), "entropy": some().flatten(), "advantages": some().flatten()}
        tried(a, "choice", lambda: call(a.choice, given | {"rng": torch.Generator()}), (prompts * group_size,))
    if not term.requires_grad:
        raise UserError(f"{named(a, 'surrogate')} has no gradient: it must depend on logprobs or ratio")
    for name, values in logged.items():
        if not isinstance(values, Tensor) or values.shape != (2, 3):
            raise UserError(f"{named(a, 'surrogate')} logs {name!r}, which must be [B, C] like the loss")


def tried(a: "Algorithm", axis: str, attempt: Callable[[], Any], *shapes: tuple[int, ...]) -> Any:
    """Return the result of the attempt. Raises UserError unless it is, or begins with, a finite tensor of one of the shapes."""
    try:
        result = attempt()
    except UserError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise UserError(f"{named(a, axis)} fails on random numbers: {type(error).__name__}: {error}") from error
    tensor = result[0] if isinstance(result, tuple) else result
    found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    if found not in shapes:
        allowed = " or ".join(str([*shape]) for shape in shapes)
        raise UserError(f"{named(a, axis)} must return a tensor of shape {allowed}, and gave {found}")
    if not tensor.isfinite().all():
        raise UserError(f"{named(a, axis)} gives numbers that are not finite on random ones: look at its settings")
    return result


def silent_without_advantage(a: "Algorithm") -> bool:
    """Return whether the surrogate has no gradient where the advantage is 0. A user's surrogate may have other terms."""
    logprobs, batch = random_batch()
    with torch.enable_grad():
        some = torch.tensor([[True], [False]]).expand(2, 3)  # counted
        term, _, _ = a.policy_term(logprobs, replace(batch, advantages=torch.zeros(2, 3), counted=some))
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
