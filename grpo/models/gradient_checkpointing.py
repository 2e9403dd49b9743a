"""Gradient checkpointing: the layers of a model are computed again in the backward pass (arXiv 1604.06174)."""

from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.models.packed_attention import attending
from grpo.system.errors import UserError


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers would recompute. Raises UserError where there is nothing."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        line = (
            f"optim.gradient_checkpointing=true: {type(model).__name__} has no layers that transformers can recompute"
        )
        raise UserError(f"{line}: set it to false, and lower optim.max_tokens_per_microbatch")
    return layers


@contextmanager
def recomputing(model: nn.Module, active: bool = True):
    """A forward pass in this `with` keeps only the inputs of each layer. The gradients are the same, bit by bit.

    transformers' own switch acts on layers in training mode alone, where some have dropout, and takes the cache away from
    whoever samples meanwhile or later. Here `forward` itself is wrapped, and after the `with` it is the class's own again.
    """

    def forgotten(forward, *args, **kwargs):
        name = model.config.get_text_config()._attn_implementation

        def once(*args, **kwargs):
            with attending(model, name):  # the backward pass is outside of the caller's `with`
                return forward(*args, **kwargs)

        # no random numbers in evaluation mode
        return checkpoint(once, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    layers = layers_of(model) if active else []
    for layer in layers:
        layer.forward = partial(forgotten, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
