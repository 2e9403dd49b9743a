"""The layers that an adapter covers: PEFT's refusals with the setting that works, and the share of the
weights.

The base below an adapter may be quantized. A quantized layer says so by its method `dequantized`, which
returns the weight, [out, in], that it computes with.
"""

import logging
import re
from collections import Counter

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from grpo.system.errors import UserError

log = logging.getLogger(__name__)


def without_adapter(model: nn.Module) -> nn.Module:
    """Return the model, whose layers have the adapter's weights, in place of the adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def refusal(error: str) -> str:
    """Return PEFT's error in one line. error: its text, which may list the layers of a Mamba that it cannot
    adapt."""
    line = error.splitlines()[0]
    if listed := re.search(r"Incompatible modules: \{(.*?)\}", line):
        names = sorted(re.findall(r"\w+", listed[1]))
        line = f"PEFT cannot adapt {', '.join(names)} of this model: set +adapter.exclude_modules=[{','.join(names)}]"
    return line


@torch.no_grad()
def check_adapted(policy: nn.Module) -> None:
    """Log how much of the model an adapter covers. Raises UserError for a linear layer that does not return
    what it computes.

    The routers of Llama 4 and Phi-3.5 MoE return more: PEFT adapts them, and then fails when the model runs.
    """
    adapters = {name: m for name, m in policy.named_modules() if hasattr(m, "lora_A")}
    # experts have no layers
    kinds = {name: getattr(m, "parameter_name", "weight") for name, m in adapters.items()}
    uses = Counter(id(p) for m in policy.modules() for p in m._parameters.values() if p is not None)
    if shared := [n for n, m in adapters.items() if uses[id(getattr(m.get_base_layer(), kinds[n], None))] > 1]:
        line = f"adapter: {len(shared)} layers share weights with others, as {shared[0]} does"
        leaves = ",".join(sorted({name.rpartition(".")[2] for name in shared}))
        raise UserError(
            f"{line}: merged weights would have the adapters of all of them; set +adapter.exclude_modules=[{leaves}]"
        )
    for name, layer in ((name, m.get_base_layer()) for name, m in adapters.items()):
        if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
            continue
        state = layer.weight.new_zeros(1, layer.in_features)
        # other numbers are of quantized layers
        if state.is_floating_point() and not isinstance(layer(state), Tensor):
            out = f"+adapter.exclude_modules=[{name.rpartition('.')[2]}]"
            raise UserError(f"adapter: PEFT cannot adapt a {type(layer).__name__}, as {name} is: set {out}")
    if any(isinstance(p, FakeTensor) for p in policy.parameters()):
        return  # the forecast builds the policy once more
    base = {name: p for name, p in policy.named_parameters() if "lora_" not in name}
    covered = sum(getattr(m.get_base_layer(), kinds[name]).numel() for name, m in adapters.items())
    left = [name for name, p in base.items() if p.ndim == 3 and ".experts." in name and "base_layer" not in name]
    share, but = 100 * covered / sum(p.numel() for p in base.values()), " (not its experts)" if left else ""
    leaves = {name.rpartition(".")[2] if kind == "weight" else f"experts' {kind}" for name, kind in kinds.items()}
    log.info("LoRA covers %.0f %% of the weights%s: %s", share, but, ", ".join(sorted(leaves)))


def dequantize(model: nn.Module) -> nn.Module:
    """Turn the quantized layers of a model into plain ones with the same values, in place."""
    for layer in model.modules():
        if hasattr(layer, "dequantized"):
            layer.weight = nn.Parameter(layer.dequantized(), requires_grad=False)
            layer.__class__ = nn.Linear
    return model


def refuse_quantized(model: nn.Module, by: str, instead: str) -> None:
    """Raise UserError if a layer of the model is quantized. by: the setting that refuses it. instead: what to
    set."""
    if any(hasattr(layer, "dequantized") for layer in model.modules()):
        raise UserError(f"{by} does not take a quantized base: set {instead}")
