"""The built-in engine with weights of its own, for machines without vLLM."""

import torch
from torch import nn

from grpo.engines.builtin.engine import TransformersEngine
from grpo.extras.ahead.copies import copy_of, trained_of
from grpo.system.distributed import is_sharded
from grpo.system.errors import UserError


class CopiedEngine(TransformersEngine):
    """Samples from a copy of the policy's trained weights; the others are the policy's own. A load changes the copy in place."""

    apart = True

    def load_weights(self, model: nn.Module, version: int) -> None:
        if is_sharded(model):
            raise UserError(
                "engine=transformers_copy cannot copy a sharded policy: set engine=vllm_server, or strategy=ddp"
            )
        if self.model is None or known_by(self.model) != known_by(model):  # the first, or another model
            return super().load_weights(copy_of(model), version)
        given = trained_of(model)
        with torch.no_grad():
            for name, p in trained_of(self.model).items():
                p.copy_(given[name])
        self.version = version


def known_by(model: nn.Module) -> dict[str, int | None]:
    """Return the names of a model's parameters, with None for each that learns and the identity of each that does not."""
    return {name: None if p.requires_grad else id(p) for name, p in model.named_parameters()}
