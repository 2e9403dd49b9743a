"""Gradient checkpointing: the backward pass computes the layers of a model again (arXiv 1604.06174)."""

from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.models.packed_attention import PLAN, attending
from grpo.system.errors import UserError


def recomputable(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers can recompute."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers can recompute. Raises UserError if there are none."""
    if not (layers := recomputable(model)):
        line = f"optim.gradient_checkpointing=true: {type(model).__name__} has no layers for transformers to recompute"
        raise UserError(f"{line}: set it to false, and lower optim.max_tokens_per_microbatch")
    return layers


@contextmanager
def recomputing(model: nn.Module, active: bool = True):
    """A forward pass in this `with` keeps only the inputs of each layer. The gradients are the same, bit by
    bit.

    transformers' own switch works only in training mode, where some layers have dropout, and it disables the
    KV cache for any sampling at the same time or later. Here `forward` itself is wrapped; the end of the
    `with` restores the class's own.
    """

    def forgotten(forward, *args, **kwargs):
        name, plan = model.config.get_text_config()._attn_implementation, PLAN.get()

        def once(*args, **kwargs):
            with attending(model, plan, name):  # the backward pass runs outside the caller's `with`
                return forward(*args, **kwargs)

        # evaluation mode draws no random numbers
        return checkpoint(once, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    layers = layers_of(model) if active else []
    for layer in layers:
        layer.forward = partial(forgotten, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
