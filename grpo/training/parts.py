"""Parts of an update beside the rewards: who else the policy learns from (a teacher, a text), or what else learns (a critic)."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Protocol

from torch import Tensor, nn

from grpo.models.logprobs import Layout
from grpo.models.states import Reader
from grpo.objectives.batch import TokenBatch
from grpo.training.batch import RolloutBatch
from grpo.training.meter import Means


class UpdatePart(Protocol):
    """A part of the update, which calls these methods in this order. A class that inherits from this one writes those it needs.

    alone: whether nothing but this part learns from the rollout. read: what `reader` made in the latest pass. checks: what a
    preflight asks before the first rollout, by name: functions of its probe that return a result (PASS, WARN, FAIL, SKIP), the
    numbers that were compared, and what to do about them.
    """

    alone: bool = False
    read: Tensor | None = None
    checks: Mapping[str, Callable[[Any], tuple[str, ...]]] = {}

    def attach(self, module: Any) -> None:
        """Called when the GRPOModule is made. Modules that learn become its own, under a name of this part."""

    def shared(self) -> None:
        """Called when the ranks have shared out the weights."""

    def assign(self, tokens: TokenBatch, batch: RolloutBatch) -> TokenBatch:
        """Add this part's numbers to the rows of a rollout before they get their advantages; rows of its own come last."""
        return tokens

    def freeze(self, tokens: TokenBatch) -> TokenBatch:
        """Add what stays fixed while the policy changes; log-probabilities of the policy and the reference are there."""
        return tokens

    def weigh(self, minibatch: TokenBatch, count: float) -> TokenBatch:
        """Turn weights into shares of the loss of an update. count: its samples on all ranks, whose gradients are averaged."""
        return minibatch

    def reader(self, tokens: TokenBatch) -> Reader | None:
        """Return what reads the hidden states of a pass that learns, if anything does."""
        return None

    def term(self, microbatch: TokenBatch, logprobs: Tensor, means: Means) -> TokenBatch:
        """Add this part's term of equation 1. logprobs: [B, C], with gradient."""
        return microbatch

    def moved(self) -> None:
        """Called after each update."""

    def learned(self, batch: RolloutBatch) -> dict[str, float]:
        """Called after the updates of a rollout. Returns metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    # -- the forecast of memory

    def models(self) -> list[nn.Module]:
        """Return the models that compute in this process for it. Asked on the meta device."""
        return []

    def own(self, phase: str = "") -> list[Tensor]:
        """Return the tensors that it holds beside the module's: always (""), in an update alone ("update"), while it scores a
        rollout, before there are gradients ("scoring"), or in the CPU's memory, pinned for a GPU ("host")."""
        return []

    def imagined(self, batch: TokenBatch, layout: Layout) -> Reader | None:
        """Make its passes over a microbatch of tensors without memory, and return what then reads the policy's states."""
        return None


class UpdateParts(dict[str, UpdatePart]):
    """The parts of an update, by name, as one. Each gets the tokens that the one before it returns."""

    @property
    def alone(self) -> bool:
        """Whether the policy stays as it is in this rollout, while a part learns alone."""
        return any(part.alone for part in self.values())

    def attach(self, module: Any) -> None:
        for part in self.values():
            part.attach(module)

    def assign(self, tokens: TokenBatch, batch: RolloutBatch) -> TokenBatch:
        return reduce(lambda tokens, part: part.assign(tokens, batch), self.values(), tokens)

    def freeze(self, tokens: TokenBatch) -> TokenBatch:
        return reduce(lambda tokens, part: part.freeze(tokens), self.values(), tokens)

    def weigh(self, minibatch: TokenBatch, count: float) -> TokenBatch:
        return reduce(lambda tokens, part: part.weigh(tokens, count), self.values(), minibatch)

    def readers(self, tokens: TokenBatch) -> dict[str, Reader]:
        """Return what reads the hidden states of a pass that learns, by part."""
        readers = {name: part.reader(tokens) for name, part in self.items()}
        return {name: reader for name, reader in readers.items() if reader is not None}

    def term(self, microbatch: TokenBatch, logprobs: Tensor, means: Means) -> TokenBatch:
        return reduce(lambda tokens, part: part.term(tokens, logprobs, means), self.values(), microbatch)

    def moved(self) -> None:
        for part in self.values():
            part.moved()

    def learned(self, batch: RolloutBatch) -> dict[str, float]:
        return {name: number for part in self.values() for name, number in part.learned(batch).items()}
