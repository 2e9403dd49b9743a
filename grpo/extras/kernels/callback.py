"""KernelsCallback: chooses the kernels of the update before the first rollout, and logs them."""

import logging
from typing import Any

import lightning as L
import torch

from grpo.extras.kernels.flex import FLEX, FlexKernel
from grpo.extras.kernels.liger import is_installed, takes_liger, use_liger
from grpo.models import packing, token_scores
from grpo.models.pretrained import Kernels

log = logging.getLogger(__name__)


class KernelsCallback(L.Callback):
    """Tries the layout, FlexAttention and Liger's kernels on a few tokens, forward and backward, so that what a GPU compiles is
    compiled before the first update. It comes before PreflightCallback.

    wanted: `model.kernels`. Raises UserError if it cannot be fulfilled. Mutable: found, what the run uses, by part.
    """

    def __init__(self, wanted: Kernels) -> None:
        takes_liger(wanted, torch.cuda.is_available(), is_installed())
        self.wanted, self.found = wanted, {}
        packing.ON_GPU[:] = [FLEX]

    def facts(self) -> dict[str, Any]:
        """Return what is known for the manifest."""
        return {"kernels": self.found} if self.found else {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not hasattr(module, "layout"):  # no GRPOModule
            return
        with trainer.precision_plugin.forward_context():
            layers = use_liger(module.policy, self.wanted)
            layout, attention = module.layout
            of_parts = {name: getattr(part, "layout", None) for name, part in module.parts.items()}
            self.found |= {name: ", ".join(map(_name, layout)) for name, layout in of_parts.items() if layout}
        self.found |= {
            "layout": layout,
            "attention": _name(attention),
            "head": "compiled" if module.device.type in token_scores.forward.devices else "torch",
            "layers": f"liger ({', '.join(layers)})" if layers else "transformers",
        }
        log.info("kernels: %s", ", ".join(f"{part} {name}" for part, name in self.found.items()))


def _name(choice: str | FlexKernel | None) -> str:
    """Return the name of a layout or a kernel in the manifest."""
    return {None: "sdpa", FLEX: "flex"}.get(choice, choice)
