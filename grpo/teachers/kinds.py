"""Teachers: where a second set of log-probabilities or of tokens comes from. conf/teacher has one choice for each class."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from grpo.models.policy import Reference
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.rollout.rollouts import Rollouts
from grpo.system.errors import UserError
from grpo.training.batch import RolloutBatch


class Teacher:
    """No teacher but the tokens of a rollout (teacher=tokens), and the base of all teachers."""

    has_model = False  # whether it scores tokens
    policy: nn.Module

    def attach(self, policy: nn.Module) -> None:
        """Called when the policy is made, on whatever device it is; on the meta device for a forecast."""
        self.policy = policy

    def own(self) -> list[Tensor]:
        """Return the tensors that it holds in memory beside the policy's."""
        return []

    def extended(self, tokens: TokenBatch, batch: RolloutBatch, rollouts: Rollouts) -> tuple[TokenBatch, Tensor | None]:
        """Return this rank's tokens with more rows, and which tokens are demonstrations, [B, C] bool; None: none."""
        return tokens, None

    def reading(self, tokens: TokenBatch, batch: RolloutBatch, rollouts: Rollouts) -> tuple[TokenBatch, Tensor | None]:
        """Return what the teacher reads: the same completions after its own prompts; and the rows that it can judge, [B] bool;
        None: all."""
        return tokens, None

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        """Yield the model, on the policy's device. Until the end of the `with`, the policy may hold the teacher's weights."""
        raise UserError(
            "teacher=tokens scores no tokens, but algo.teacher.coef is above 0: choose teacher=model or another"
        )
        yield

    def moved(self) -> None:
        """Called after each update."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Start(Teacher):
    """The policy as it was before training (teacher=reference)."""

    has_model = True

    def attach(self, policy: nn.Module) -> None:
        super().attach(policy)
        self.start = Reference(policy)

    def own(self) -> list[Tensor]:
        return self.start.own()

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with self.start.model() as model:
            yield model


class Model(Teacher):
    """Another model that reads the policy's tokens (teacher=model)."""

    has_model = True

    def __init__(self, model: Pretrained) -> None:
        self.pretrained = model

    def attach(self, policy: nn.Module) -> None:
        super().attach(policy)
        imagined = next(policy.parameters()).is_meta  # for the memory forecast
        self.loaded = (self.pretrained.outline() if imagined else self.pretrained.model()).requires_grad_(False)

    def own(self) -> list[Tensor]:
        return [*self.loaded.parameters(), *self.loaded.buffers()]

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        self.loaded.to(self.policy.device)
        yield self.loaded
