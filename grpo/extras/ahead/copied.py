"""The built-in engine with weights of its own, for machines without vLLM."""

import torch
from torch import nn

from grpo.engines.builtin.engine import TransformersEngine
from grpo.extras.ahead.copies import copy_of, trained_of


class CopiedEngine(TransformersEngine):
    """Samples from a copy of the policy's trained weights; the others are the policy's own. A load changes the copy in place."""

    apart = True

    def load_weights(self, model: nn.Module, version: int) -> None:
        if self.model is None:
            return super().load_weights(copy_of(model), version)
        given = trained_of(model)
        with torch.no_grad():
            for name, p in trained_of(self.model).items():
                p.copy_(given[name])
        self.version = version
