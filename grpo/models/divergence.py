"""The divergence between two distributions over the vocabulary at each token, with few logits in memory at a time.

Hidden states go through both heads chunk by chunk, and a backward pass makes the logits of a chunk again: no tensor of
[n, V] is kept. Shapes: n tokens, c of a chunk, V vocabulary.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo.models.head import after_the_decoder, chunks_of, factor_of, logits_at_once, with_parts
from grpo.models.token_scores import divided, temperature_at

TENSORS = 8  # of [c, V] in float32 that a chunk needs at once, where the head itself needs one or two


@dataclass(frozen=True)
class Distributions:
    """What a model predicts at n tokens. states: [n, hidden], of its decoder."""

    model: nn.Module
    states: Tensor

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of some tokens, [c, V]. states: theirs, [c, hidden]."""
        model = without_adapter(self.model)
        plain = factor_of(model, states.shape[1]) == 1
        return model.get_output_embeddings()(states) if plain else after_the_decoder(model, states)


def without_adapter(model: nn.Module) -> nn.Module:
    """Return the model, whose layers have the adapter's weights, in place of the adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def with_own_head(model: nn.Module) -> nn.Module:
    """Return the model with a copy of its head: a policy that was a teacher for a moment gets its own weights back, but the teacher
    is asked again in the backward pass."""
    model = without_adapter(model)
    head = model.get_output_embeddings()
    return with_parts(model, {head: deepcopy(head).requires_grad_(False)})


def divergences(
    student: Distributions,
    teacher: Distributions,
    targets: Tensor,
    temperature: float | Tensor,
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return function(student's log-probabilities [c, V], teacher's [c, V], targets [c]) of all n tokens, [n] float32.

    The log-probabilities are finite: what a model excludes has -1e4. The gradient goes to the student. If the vocabularies differ
    in padding, both are cut to the shorter one.
    """
    size = max(1, logits_at_once(targets.device.type) // (TENSORS * student.model.config.get_text_config().vocab_size))

    def of_chunk(states: Tensor, at: slice) -> Tensor:
        with torch.no_grad():
            theirs = teacher.logits(teacher.states[at])
        ours, heat = student.logits(states), temperature_at(temperature, at)
        shorter = min(ours.shape[-1], theirs.shape[-1])
        S, T = (divided(z[:, :shorter].float(), heat).log_softmax(-1).clamp(min=-1e4) for z in (ours, theirs))
        return function(S, T, targets[at])

    chunks = [
        checkpoint(of_chunk, student.states[at], at, use_reentrant=False, preserve_rng_state=False)
        for at in chunks_of(max(1, len(targets)), size)  # without a token, too: the head needs a gradient on every rank
    ]
    return torch.cat(chunks)
