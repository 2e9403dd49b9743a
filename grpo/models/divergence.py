"""The divergence between two distributions over the vocabulary at each token, with few logits in memory at a time.

Hidden states go through both heads chunk by chunk, and a backward pass makes the logits of a chunk again: no tensor of
[n, V] is kept. Shapes: n tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo.models.head import after_the_decoder, chunks_of, factor_of, logits_at_once
from grpo.models.token_scores import divided, temperature_at


class Predicted(Protocol):
    """Distributions at n tokens."""

    def logprobs(self, at: slice | Tensor, temperature: float | Tensor) -> Tensor:
        """Return the log-probabilities of c of the tokens, [c, V] float32. temperature: a number, or one for each of them, [c]."""


@dataclass(frozen=True)
class Distributions:
    """What a model predicts at n tokens. states: [n, hidden], of its decoder."""

    model: nn.Module
    states: Tensor

    def logprobs(self, at: slice | Tensor, temperature: float | Tensor, states: Tensor | None = None) -> Tensor:
        """Return log softmax(logits / temperature), as `Predicted`. states: in place of these, [c, hidden]."""
        model, states = self.model, self.states[at] if states is None else states
        temperature = temperature.to(states.device) if isinstance(temperature, Tensor) else temperature
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter
        head, factor = model.get_output_embeddings(), factor_of(model, states.shape[1])
        logits = head(states) * factor if factor else after_the_decoder(model, states)
        return divided(logits.float(), temperature).log_softmax(-1)


@dataclass(frozen=True)
class Joined:
    """The distributions of several models, each at tokens of its own. owner: which of the parts has a token, [n]."""

    parts: Sequence[Predicted]
    owner: Tensor

    def logprobs(self, at: slice | Tensor, temperature: float | Tensor) -> Tensor:
        """As `Predicted`."""
        owner, pieces, places = self.owner[at], [], []
        for i, part in enumerate(self.parts):
            if len(place := (owner == i).nonzero()[:, 0]):
                number = (self.owner == i).cumsum(0) - 1  # of a token among those of its part
                heat = temperature[place] if isinstance(temperature, Tensor) else temperature
                pieces.append(part.logprobs(number[at][place], heat))
                places.append(place)
        shortest = min(piece.shape[1] for piece in pieces)  # the rest is padding
        joined = [piece[:, :shortest].to(owner.device) for piece in pieces]
        return torch.cat(joined)[torch.cat(places).argsort()]


def divergences(
    student: Distributions,
    teacher: Predicted,
    targets: Tensor,
    temperature: float | Tensor,
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return function(student's log-probabilities [c, V], teacher's [c, V], targets [c]) of all n tokens, [n] float32.

    The gradient goes to the student. If the vocabularies differ in padding, the shorter one counts.
    """
    size = max(1, logits_at_once(targets.device.type) // student.model.config.get_text_config().vocab_size)

    def of_chunk(states: Tensor, at: slice) -> Tensor:
        heat = temperature_at(temperature, at)
        ours = student.logprobs(at, heat, states)
        with torch.no_grad():
            theirs = teacher.logprobs(at, heat).to(ours.device)
        both = min(ours.shape[-1], theirs.shape[-1])
        return function(ours[:, :both], theirs[:, :both], targets[at])

    chunks = [
        checkpoint(of_chunk, student.states[at], at, use_reentrant=False, preserve_rng_state=False)
        for at in chunks_of(len(targets), size)
    ]
    return torch.cat(chunks) if chunks else targets.new_zeros(0, dtype=torch.float32)
