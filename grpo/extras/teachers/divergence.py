"""The divergence between two distributions over the vocabulary at each token, with few logits in memory at a time.

Hidden states go through both heads chunk by chunk, and a backward pass makes the logits of a chunk again: no tensor of
[n, V] is kept. Shapes: n tokens, c of a chunk, V vocabulary.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo.models.adapted import without_adapter
from grpo.models.head import after_the_decoder, chunks_of, factor_of, logits_at_once, with_parts
from grpo.models.token_scores import divided, temperature_at
from grpo.system.memory import sent

TENSORS = 4  # a chunk holds eight [c, V] in float32 at most, where the head alone holds two of its larger chunks


class Predicted(Protocol):
    """Distributions at n tokens. width: V, with the padding of a vocabulary."""

    @property
    def width(self) -> int: ...

    def logprobs(self, at: slice | Tensor, temperature: float | Tensor, width: int) -> Tensor:
        """Return the log-probabilities of c of the tokens over the first `width` entries, [c, width] float32. An entry that is
        excluded has -1e4. at: a tensor is in the host's memory. temperature: a number, or one for each of them, [c]."""


@dataclass(frozen=True)
class Distributions:
    """The predictions of a model at n tokens. states: [n, hidden], of its decoder. own: a head in place of the model's."""

    model: nn.Module
    states: Tensor
    own: nn.Module | None = None

    @property
    def head(self) -> nn.Module:
        """The module that turns states into logits."""
        return without_adapter(self.model).get_output_embeddings() if self.own is None else self.own

    @property
    def width(self) -> int:
        """V, with the padding of the model's vocabulary."""
        return self.head.out_features

    def logprobs(
        self, at: slice | Tensor, temperature: float | Tensor, width: int, states: Tensor | None = None
    ) -> Tensor:
        """Return log softmax(logits / temperature), as `Predicted`. states: in place of these, [c, hidden]."""
        at = sent(at, self.states.device) if isinstance(at, Tensor) else at
        model, states = without_adapter(self.model), self.states[at] if states is None else states
        temperature = temperature.to(states.device) if isinstance(temperature, Tensor) else temperature
        plain = factor_of(model, states.shape[1]) == 1
        if not plain and self.own is not None:
            model = with_parts(model, {model.get_output_embeddings(): self.own})
        logits = self.head(states) if plain else after_the_decoder(model, states)
        return divided(logits[:, :width].float(), temperature).log_softmax(-1).clamp(min=-1e4)


@dataclass(frozen=True)
class Joined:
    """The distributions of several models, each at tokens of its own. owner: which of the parts has a token, [n], in the host's
    memory. device: of the result."""

    parts: Sequence[Predicted]
    owner: Tensor
    device: torch.device

    @property
    def width(self) -> int:
        """The smallest V; the rest is padding."""
        return min(part.width for part in self.parts)

    def logprobs(self, at: slice | Tensor, temperature: float | Tensor, width: int) -> Tensor:
        """As `Predicted`."""
        owner = self.owner[at]
        found = torch.zeros(len(owner), width, device=self.device)
        for i, part in enumerate(self.parts):
            mine, number = (owner == i).nonzero()[:, 0], (self.owner == i).cumsum(0) - 1  # among the tokens of its part
            place = sent(mine, self.device)
            heat = temperature[place] if isinstance(temperature, Tensor) else temperature
            found[place] = part.logprobs(number[at][mine], heat, width).to(self.device)
        return found


def own_head(model: nn.Module) -> nn.Module:
    """Return a copy of the model's head: a policy that was a teacher for a moment gets its own weights back, and the teacher is
    asked again in the backward pass. A sharded model is whole during the pass in which this is called."""
    return deepcopy(without_adapter(model).get_output_embeddings()).requires_grad_(False)


def divergences(
    student: Distributions,
    teacher: Predicted,
    targets: Tensor,
    temperature: float | Tensor,
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return function(student's log-probabilities [c, V], teacher's [c, V], targets [c]) of all n tokens, [n] float32.

    The log-probabilities are finite. The gradient goes to the student. Padding of the larger vocabulary is cut off before the
    softmax.
    """
    width = min(student.width, teacher.width)
    size = max(1, logits_at_once(targets.device.type) // (TENSORS * width))

    def of_chunk(states: Tensor, at: slice) -> Tensor:
        heat = temperature_at(temperature, at)
        ours = student.logprobs(at, heat, width, states)
        with torch.no_grad():
            theirs = teacher.logprobs(at, heat, width).to(ours.device)
        return function(ours, theirs, targets[at])

    chunks = [
        checkpoint(of_chunk, student.states[at], at, use_reentrant=False, preserve_rng_state=False)
        for at in chunks_of(max(1, len(targets)), size)  # without a token, too: the head needs a gradient on every rank
    ]
    return torch.cat(chunks)
