"""The policy, a Hugging Face causal LM with or without an adapter, and the frozen reference."""

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo.models.adapted import check_adapted, refusal
from grpo.models.language import beside_language
from grpo.models.pretrained import frozen_copy
from grpo.system.distributed import part_of
from grpo.system.errors import UserError

if TYPE_CHECKING:
    from peft import PeftConfig  # at run time only where there is an adapter: peft takes seconds to import


def with_adapter(model: nn.Module, adapter: "PeftConfig | None") -> nn.Module:
    """Return the policy: `model` itself, or `model` with a new adapter, which is then the only part that learns."""
    if adapter is None:
        return model
    from peft import get_peft_model

    if beside := [*beside_language(model)]:
        excluded = adapter.exclude_modules or []
        adapter.exclude_modules = [*([excluded] if isinstance(excluded, str) else excluded), *beside]
    try:
        policy = get_peft_model(model, adapter).eval()
    except ValueError as error:
        raise UserError(f"adapter: {refusal(str(error))}") from error
    check_adapted(policy)
    return policy


class Reference:
    """The policy as it was before training: a frozen copy, or the policy itself with its adapter switched off.

    moves: it will move towards the policy (TR-DPO, arXiv 2404.09656). It then keeps a copy of the trained weights, and puts them
    into the policy while it is used. With LoRA these are the adapter's two matrices, each averaged separately.
    It is not part of the module tree, so the optimizer never sees it.
    """

    def __init__(self, policy: nn.Module, moves: bool = False) -> None:
        self.policy, self.moves = policy, moves
        # no copy where an adapter learns: below it stands the policy as it was
        self.copy = None if moves or hasattr(policy, "peft_config") else frozen_copy(policy)
        self.begin()

    def begin(self) -> None:
        """Take the policy's weights as the reference's, if it moves. Called again when the ranks have shared them out."""
        trained = ((name, p) for name, p in self.policy.named_parameters() if p.requires_grad)
        # the weights that move, by the policy's names; in float32, since a 16-bit mean loses small steps
        self.weights = {name: p.detach().to(torch.float32, copy=True) for name, p in trained} if self.moves else {}

    def own(self) -> list[Tensor]:
        """Return the tensors that the reference holds in memory beside the policy's."""
        return [*self.weights.values(), *(self.copy.parameters() if self.copy is not None else ())]

    @contextmanager
    def model(self):
        """Yield the reference. Until the end of the `with`, the policy may hold the reference's weights."""
        if self.copy is not None:
            yield self.copy.to(self.policy.device)
        elif not self.moves:
            with self.policy.disable_adapter():
                yield self.policy
        else:
            with self.swapped():
                yield self.policy

    @contextmanager
    def swapped(self):
        """Give the policy the weights of the reference until the end of the `with`."""
        trained = {name: p for name, p in self.policy.named_parameters() if name in self.weights}
        kept = {name: p.detach().clone() for name, p in trained.items()}
        self.weights = {name: weight.to(trained[name].device) for name, weight in self.weights.items()}
        try:
            self.put(trained, self.weights)
            yield
        finally:
            self.put(trained, kept)

    @torch.no_grad()
    def put(self, trained: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
        """Copy values into the trained parameters; both by name, of equal shapes."""
        for name, p in trained.items():
            p.copy_(values[name])
        torch.clear_autocast_cache()  # it caches casts by parameter, even if its data changes

    @torch.no_grad()
    def move(self, alpha: float) -> None:
        """Move the reference: reference <- alpha policy + (1 - alpha) reference."""
        trained = dict(self.policy.named_parameters())
        for name, weight in self.weights.items():
            weight.lerp_(trained[name].detach().to(weight), alpha)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Restore the weights of a moving reference, by the policy's names."""
        for name, weight in self.weights.items():
            weight.copy_(part_of(weights[name], weight))
