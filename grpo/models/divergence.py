"""The divergence between two distributions over the vocabulary at each token, with few logits in memory at a time.

Hidden states go through both heads chunk by chunk, and a backward pass makes the logits of a chunk again: no tensor of
[n, V] is kept. Shapes: n tokens, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo.models.head import after_the_decoder, chunks_of, factor_of, logits_at_once
from grpo.models.token_scores import divided, temperature_at


@dataclass(frozen=True)
class Distributions:
    """Predictions of a model at n tokens. states: [n, hidden], of its decoder."""

    model: nn.Module
    states: Tensor

    def logprobs(self, at: slice, temperature: float | Tensor, states: Tensor | None = None) -> Tensor:
        """Return log softmax(logits / temperature) of some tokens, [c, V] float32. states: in place of these, [c, hidden]."""
        model, states = self.model, self.states[at] if states is None else states
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter
        head, factor = model.get_output_embeddings(), factor_of(model, states.shape[1])
        logits = head(states) * factor if factor else after_the_decoder(model, states)
        return divided(logits.float(), temperature_at(temperature, at)).log_softmax(-1)


def divergences(
    student: Distributions,
    teacher: Distributions,
    targets: Tensor,
    temperature: float | Tensor,
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return function(student's log-probabilities [c, V], teacher's [c, V], targets [c]) of all n tokens, [n] float32.

    The gradient goes to the student. If the vocabularies differ in padding, the shorter one counts.
    """
    size = max(1, logits_at_once(targets.device.type) // student.model.config.get_text_config().vocab_size)

    def of_chunk(states: Tensor, at: slice) -> Tensor:
        ours = student.logprobs(at, temperature, states)
        with torch.no_grad():
            theirs = teacher.logprobs(at, temperature)
        both = min(ours.shape[-1], theirs.shape[-1])
        return function(ours[:, :both], theirs[:, :both], targets[at])

    chunks = [
        checkpoint(of_chunk, student.states[at], at, use_reentrant=False, preserve_rng_state=False)
        for at in chunks_of(len(targets), size)
    ]
    return torch.cat(chunks) if chunks else targets.new_zeros(0, dtype=torch.float32)
