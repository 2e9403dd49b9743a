"""The mean of a policy over its updates, as a model of its own."""

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from grpo.models.master_weights import LOW
from grpo.system.errors import UserError


class Average:
    """theta' <- (1 - alpha) theta' + alpha theta after each update; theta' begins as the policy.

    It is a whole model, because a comparison of distributions needs its head, too. Weights that do not learn are the policy's
    own. Of an adapter each matrix is averaged by itself, so that B A of the means is not the mean of B A.
    """

    def __init__(self, policy: nn.Module, alpha: float) -> None:
        if getattr(policy, "is_mapped", False):
            reason = "needs the whole policy on every device, and strategy=fsdp2 gives each a part"
            raise UserError(f"teacher.weights=ema {reason}: set strategy=ddp, or teacher.weights=start or live")
        shared = {id(p): p for p in policy.parameters() if not p.requires_grad}
        self.policy, self.alpha = policy, alpha
        self.copy = deepcopy(policy, shared).requires_grad_(False)
        # a 16-bit mean would lose small steps
        self.exact = {name: p.detach().float() for name, (_, p) in self.pairs().items() if p.dtype in LOW}

    def pairs(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """Return each weight that learns and its mean, by name."""
        means = dict(self.copy.named_parameters())
        return {name: (p, means[name]) for name, p in self.policy.named_parameters() if p.requires_grad}

    def own(self) -> list[Tensor]:
        """Return the tensors that it holds beside the policy's."""
        return [*self.exact.values(), *(mean for _, mean in self.pairs().values())]

    def model(self) -> nn.Module:
        """Return the model, on the policy's device."""
        return self.copy.to(self.policy.device)

    @torch.no_grad()
    def move(self) -> None:
        """Take a step towards the policy."""
        self.model()
        for name, (p, mean) in self.pairs().items():
            exact = self.exact.get(name, mean).to(p.device)
            mean.copy_(exact.lerp_(p.detach().to(exact), self.alpha))
            if name in self.exact:
                self.exact[name] = exact

    def state_dict(self) -> dict[str, Tensor]:
        """Return the means by name, the exact ones where they are kept."""
        return {name: self.exact.get(name, mean.detach()) for name, (_, mean) in self.pairs().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the means of a checkpoint. Raises UserError if they are of other weights."""
        if (pairs := self.pairs()).keys() != state.keys():
            raise UserError(
                "ckpt_path has no mean of this policy for teacher.weights=ema: give the teacher= and adapter= of that run"
            )
        for name, (_, mean) in pairs.items():
            mean.copy_(state[name])
            if name in self.exact:
                self.exact[name].copy_(state[name])
