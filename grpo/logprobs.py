"""Layer 1 - log-probabilities of the sampled tokens under a model. The plain padded layout, the one to trust."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo.tokens import TokenBatch


def completion_logprobs(
    model: nn.Module, batch: TokenBatch, temperature: float, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) of every completion token, and the entropy there, with gradient if so asked.

    temperature: the one they were sampled at, or every ratio is wrong. Returns two [B, C] float32, 0 outside `batch.mask`:
    a ratio is 1 there and a KL 0, where the numbers of padding could overflow. The softmax is in float32: in bfloat16 it
    alone would cost most of the agreement with the engine.
    """
    width = batch.completion_width
    positions = (batch.attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(
        input_ids=batch.ids,
        attention_mask=batch.attention_mask,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=width + 1,  # the last prompt token predicts the first of the completion
    ).logits[:, :-1]  # [B, C, V]
    log_softmax = F.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = log_softmax.gather(-1, batch.ids[:, -width:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(log_softmax.exp() * log_softmax.clamp(min=-1e4)).sum(dim=-1)  # a logit of -inf adds 0
    return logprobs.masked_fill(~batch.mask, 0.0), entropy.masked_fill(~batch.mask, 0.0)
