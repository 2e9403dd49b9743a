"""Gradients of a few tokens, by which kernels are compared with torch's own."""

import torch
from torch import Tensor, nn

from grpo.models.logprobs import Layout, completion_logprobs
from grpo.models.packed_attention import Kernel
from grpo.models.packing import few_tokens
from grpo.system.distributed import one_pass


def gradient_disagreement(model: nn.Module, layout: Layout, kernel: Kernel | None) -> str:
    """Describe how far a kernel's gradient of a few embedded tokens is from that of sdpa, in the precision of the run. Empty if
    their cosine is at least 0.99."""
    of_sdpa, of_kernel = (embedding_gradient(model, layout, each) for each in (None, kernel))
    return not_parallel(of_sdpa, of_kernel[: len(of_sdpa)])


def not_parallel(gradient: Tensor, other: Tensor) -> str:
    """Describe the angle between two gradients, [n] each; empty if their cosine is at least 0.99."""
    cosine = float(torch.cosine_similarity(gradient, other, dim=0))
    return "" if cosine >= 0.99 else f"gradients have a cosine of {cosine:.2g}"


def embedding_gradient(model: nn.Module, layout: Layout, kernel: Kernel | None) -> Tensor:
    """Return the gradient of a few tokens' log-probabilities with respect to the embedded tokens, flattened, [n]. No parameter
    gets a gradient."""
    embedded: list[Tensor] = []

    def leaf(_module: nn.Module, _given: object, states: Tensor) -> Tensor:
        embedded.append(states.detach().requires_grad_())
        return embedded[-1]

    hook = model.get_input_embeddings().register_forward_hook(leaf)
    try:
        with torch.enable_grad():
            logprobs, _ = one_pass(model, completion_logprobs, few_tokens(model), 1.0, False, layout, kernel)
            return torch.autograd.grad(logprobs.sum(), embedded[0])[0].flatten().float()
    finally:
        hook.remove()
