"""KernelsCallback: chooses the kernels of the update before the first rollout, logs them, and lets the run go on without one."""

import logging
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch

from grpo.extras.kernels.fallback import WithoutKernels
from grpo.extras.kernels.flex import FLEX, FlexKernel
from grpo.extras.kernels.liger import LIGER, is_installed, takes_liger, use_liger
from grpo.extras.kernels.on_cpu import use_own, use_products
from grpo.models import packing, token_scores
from grpo.models.compiled import first_said
from grpo.models.pretrained import Kernels
from grpo.system.output.console import to_logs

log = logging.getLogger(__name__)
ONEDNNS = " with oneDNN's products"


class KernelsCallback(L.Callback):
    """Tries the layout, FlexAttention and Liger's kernels on a few tokens, forward and backward, so that what a GPU compiles is
    compiled before the first update. It comes before PreflightCallback.

    wanted: `model.kernels`. Raises UserError if it cannot be fulfilled. Mutable: found, what the run uses, by part; used, which
    of it may fail later; lost, the names of what has failed when memory was last counted; sizes, parts: of the forecast.
    """

    sizes: Any = None
    parts: Sequence[Any] = ()

    def __init__(self, wanted: Kernels) -> None:
        takes_liger(wanted, torch.cuda.is_available(), is_installed())
        self.wanted, self.found, self.used = wanted, {}, ()
        packing.ON_GPU[:] = [FLEX]
        self.lost = lost()

    def facts(self) -> dict[str, Any]:
        """Return what is known for the manifest: `failed` has the kernels that the run went on without, with the reasons."""
        failed = {each.name: each.failed for each in self.used if each.failed}
        return {"kernels": self.found | ({"failed": failed} if failed else {})} if self.found else {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not hasattr(module, "layout"):  # no GRPOModule
            return
        on_gpu = module.device.type in token_scores.forward.devices
        if self.parts:
            self.again = self.sizes.again(trainer, self.parts)
        begins = first_said("kernels: compiling and comparing attention, head and layers", said=not on_gpu)
        with begins, trainer.precision_plugin.forward_context():
            layers = use_liger(module.policy, self.wanted)
            own = module.optim.layout != "padded" and use_own(module.policy, self.wanted)
            products = not own and use_products(module.policy, self.wanted)
            layout, attention = module.layout
            of_parts = {name: getattr(part, "layout", None) for name, part in module.parts.items()}
            self.found |= {name: ", ".join(map(_name, layout)) for name, layout in of_parts.items() if layout}
        self.found |= {
            "layout": layout,
            "attention": _name(attention),
            "head": "compiled" if on_gpu and not token_scores.forward.failed else "torch",
            "layers": f"liger ({', '.join(layers)})"
            if layers
            else "own"
            if own
            else "transformers" + ONEDNNS * products,
        }
        of_attention = [attention, *(pair[1] for pair in of_parts.values() if pair)]
        self.used = tuple(kernel for kernel, used in ((FLEX, FLEX in of_attention), (LIGER, layers)) if used)
        if self.used or on_gpu:
            module.at_once = WithoutKernels(module.at_once.most, self.used, self.recount)
        line = f"kernels: {', '.join(f'{part} {name}' for part, name in self.found.items())}"
        (log.info if self.used or on_gpu else to_logs)(line)  # a CPU has no choice
        self.recount()

    def recount(self) -> None:
        """Log what an update takes by the forecast if a kernel has failed since memory was counted. Called between updates."""
        before, self.lost = self.lost, lost()
        if self.parts and self.lost != before:
            log.warning("memory: without %s an update takes by the forecast %s", " and ".join(self.lost), self.again())


def lost() -> list[str]:
    """Return the names of the kernels that have failed in this process."""
    head = token_scores.forward.failed or token_scores.backward.failed
    return [*(kernel.name for kernel in (FLEX, LIGER) if kernel.failed), *["the compiled head"] * head]


def _name(choice: str | FlexKernel | None) -> str:
    """Return the name of a layout or a kernel in the manifest."""
    return {None: "sdpa", FLEX: "flex"}.get(choice, choice)
