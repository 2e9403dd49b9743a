"""The head of a language model: from hidden states to log-probabilities of tokens, with few logits in memory
at a time.

Shapes: n tokens, V vocabulary.
"""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from grpo.models.adapted import without_adapter
from grpo.models.temperature import temperatures
from grpo.models.token_scores import OfLogits, gradient_of_logits, scores_of_logits, temperature_at
from grpo.objectives.batch import TokenBatch
from grpo.system.memory import sent

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
LARGE = 1 << 22  # numbers of a matrix
LOGITS_AT_ONCE = {"cuda": 1 << 27, "cpu": 1 << 23}  # in one product, in float32 four bytes each


def logits_at_once(device: str) -> int:
    """Return how many logits are computed in one product on a type of device."""
    return LOGITS_AT_ONCE.get(device, 1 << 25)


def of_states(
    model: nn.Module, states: Tensor, batch: TokenBatch, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return what `logprobs.completion_logprobs` does. states: those before the sampled tokens, [n, hidden]."""
    host = batch.host or batch
    # the host does not wait for the device
    targets = sent(host.ids[:, batch.prompt_width :][host.mask], batch.ids.device)
    values = token_values(model, states, targets, temperatures(batch, temperature, packed=True), entropy_gradient)
    nothing = torch.zeros_like(batch.rollout_logprobs)
    return tuple(nothing.masked_scatter(batch.mask, of_tokens) for of_tokens in values)


def token_values(
    model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float | Tensor, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of `targets` and the entropies there, [n] each. hidden: [n, hidden];
    targets: [n].

    temperature: a number, or one for each target, [n].

    A head with an adapter, a cap or 8-bit weights is computed by its own module.
    """
    model = without_adapter(model)
    head, device = model.get_output_embeddings(), hidden.device.type
    size = max(1, logits_at_once(device) // model.config.get_text_config().vocab_size)
    factor = factor_of(model, hidden.shape[1])
    if factor and is_one_matrix(head):
        own = getattr(head, "float32_product", linear)
        casts = own is linear and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if casts else head.weight.dtype
        limited = getattr(head, "limited", None)  # some tokens may have no probability
        product = own if limited is None else lambda states, matrix: limited(own(states, matrix))
        return OfTokens.apply(
            hidden, head.weight, targets, temperature / factor, entropy_gradient, size, dtype, product
        )

    def values(hidden: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden) if factor == 1 else after_the_decoder(model, hidden)
        return of_logits(logits, targets, temperature, entropy_gradient)

    if len(targets) <= size:
        return values(hidden, targets, temperature)
    chunks = [(hidden[at], targets[at], temperature_at(temperature, at)) for at in chunks_of(len(targets), size)]
    # without checkpoint autograd would keep the logits of all chunks
    scores = [checkpoint(values, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return tuple(torch.cat(parts) for parts in zip(*scores, strict=True))


class StandIn(nn.Module):
    """Stands in a model for one of its parts, whose attributes it has, and returns what it is given."""

    def __init__(self, part: nn.Module, result: Any) -> None:
        super().__init__()
        vars(self).update(part=part, result=result, calls=[])

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["part"], name)

    def forward(self, *args, **kwargs) -> Any:
        self.calls.append(args)
        return self.result


class States(BaseModelOutputWithPast):
    """A decoder's last states, and None for everything else that it may return."""

    def __getattr__(self, name: str) -> None:
        return None


def after_the_decoder(model: nn.Module, hidden: Tensor, head: StandIn | None = None) -> Tensor:
    """Return the logits that the model's own code makes of its decoder's states, [n, V]. hidden: [n, hidden].

    head: stands for the model's. Gemma caps logits, Granite divides them, Cohere multiplies them, MiniCPM
    divides the states.
    """
    decoder = model.get_decoder()
    instead = {decoder: StandIn(decoder, States(last_hidden_state=hidden[None]))}
    if head is not None:
        instead[head.part] = head
    twin = with_parts(model, instead)
    nothing = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
    return type(twin).forward(twin, input_ids=nothing, use_cache=False).logits[0]


def with_parts(module: nn.Module, instead: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Return a module with other parts, and leave it as it is: modules on the way to them are copied, but not
    their weights."""
    if module in instead:
        return instead[module]
    parts = {name: part if part is None else with_parts(part, instead) for name, part in module._modules.items()}
    if all(part is module._modules[name] for name, part in parts.items()):
        return module
    twin = copy(module)
    vars(twin)["_modules"] = parts
    return twin


@torch.no_grad()
def factor_of(model: nn.Module, width: int) -> float | None:
    """Return the factor between the logits of the head and those of the model, found by trying; None for
    another function of the states. If the model's code cannot be tried, it is 1: `trusted` compares the
    results with the model's. width: of states.
    """
    if "_logit_factor" in vars(model):  # it was tried before
        return vars(model)["_logit_factor"]
    head = model.get_output_embeddings()
    if isinstance(head.weight, FakeTensor):  # a forecast: no numbers, and the same memory
        return 1.0
    states = torch.linspace(1, 2, width, device=head.weight.device)[None]
    scores = torch.tensor([[-500.0, -1.0, 1.0, 500.0]], device=states.device)
    try:
        stand_in = StandIn(head, scores[None])
        ratios = (after_the_decoder(model, states, stand_in) / scores).flatten()
        read = stand_in.calls[0][0].flatten()
        scaled = torch.equal(read, states.flatten()) and torch.allclose(ratios, ratios[0], rtol=1e-6)
        factor = float(ratios[0]) if scaled else None
    except Exception:  # a model's code may raise anything
        factor = 1.0
    vars(model)["_logit_factor"] = factor
    return factor


def of_logits(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of `targets` and the entropies, [...] float32 each. logits: [..., V];
    targets: [...]; temperature: a number, or [...]."""
    temperature = temperature.flatten() if isinstance(temperature, Tensor) else temperature
    scores = OfLogits.apply(logits.flatten(0, -2), targets.flatten(), temperature, entropy_gradient)
    return tuple(values.view(targets.shape) for values in scores)


def has_float32_head(model: nn.Module) -> bool:
    """Return whether a model computes its head in float32 by `model.head_dtype`."""
    return any(hasattr(type(module), "float32_product") for module in model.modules())


def is_one_matrix(head: nn.Module) -> bool:
    """Return whether the head is one matrix on this device, and nothing else; its product may be in float32."""
    hooks = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
    plain = type(head) is nn.Linear or any(hasattr(head, name) for name in ("float32_product", "limited"))
    return plain and head.bias is None and not hooks and not hasattr(head.weight, "full_tensor")


class OfTokens(Function):
    """`of_logits` of a plain head, with gradients written by hand.

    Autograd would make a gradient of the whole matrix for each chunk. Here the matrix has one, to which each
    chunk adds, and at most one chunk of logits is kept. dtype: of the products, which autocast may choose, and which
    the gradients have. product: of states and matrix, which may return logits in float32.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        entropy_gradient: bool,
        size: int,
        dtype: torch.dtype,
        product: Callable[[Tensor, Tensor], Tensor],
    ):
        states, matrix = hidden.detach().to(dtype), weight.detach().to(dtype)
        saved = hidden.new_empty(3, len(targets), dtype=torch.float32)
        # else the backward pass computes them again
        keeps = any(ctx.needs_input_grad) and len(targets) <= size
        kept = []
        with torch.autocast(hidden.device.type, enabled=False):
            for at in chunks_of(len(targets), size):
                logits = product(states[at], matrix)
                scores = scores_of_logits(logits, targets[at], temperature_at(temperature, at))
                for values, of_chunk in zip(saved, scores, strict=True):
                    values[at] = of_chunk
                kept += [logits] * keeps
        logprobs, entropy, log_sums = saved.unbind()
        ctx.save_for_backward(hidden, weight, targets, logprobs, entropy, log_sums, *kept)
        ctx.settings = temperature, entropy_gradient, size, dtype, product
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, of_logprobs: Tensor, of_entropy: Tensor):
        hidden, weight, targets, *saved = ctx.saved_tensors
        saved, kept = saved[:3], saved[3:]
        temperature, entropy_gradient, size, dtype, product = ctx.settings
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        states, matrix = hidden.to(dtype), weight.detach().to(dtype)
        of_hidden = torch.empty_like(states) if wants_hidden else None
        of_weight = torch.zeros_like(weight) if wants_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for at in chunks_of(len(targets), size):
                logits = kept[0] if kept else product(states[at], matrix)
                scores = [values[at] for values in saved]
                gradients = of_logprobs[at], of_entropy[at] if entropy_gradient else None
                here = targets[at], temperature_at(temperature, at)
                of_chunk = gradient_of_logits(logits, *here, scores, *gradients).to(dtype)  # [chunk, V]
                if wants_hidden:
                    of_hidden[at] = linear(of_chunk, matrix.T)
                if wants_weight and dtype == weight.dtype:
                    of_weight.addmm_(of_chunk.T, states[at])
                elif wants_weight:
                    of_weight += of_chunk.T @ states[at]
        return of_hidden if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, *[None] * 6


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, of a large float32 matrix on a CPU by oneDNN: MKL takes twice as long with an AMD processor."""
    fits = ONEDNN and type(weight) is Tensor and weight.numel() > LARGE and weight.device.type == "cpu"
    if fits and x.dtype == weight.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def chunks_of(count: int, size: int) -> list[slice]:
    """Return the places of each chunk."""
    return [slice(start, start + size) for start in range(0, count, size)]
