"""Log-probabilities of the sampled tokens under a model, in one of three layouts that give the same numbers.

padded: one row per sequence, as usual. packed: no padding. shared_prompt: packed, and each prompt is computed once per group.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from grpo.models.head import of_logits, token_values
from grpo.models.packed_attention import Kernel, attending, pack
from grpo.models.temperature import temperatures
from grpo.objectives.batch import TokenBatch
from grpo.system.memory import sent

Layout = Literal["padded", "packed", "shared_prompt"]


def completion_logprobs(
    model: nn.Module,
    batch: TokenBatch,
    temperature: float,
    entropy_gradient: bool = False,
    layout: Layout = "padded",
    kernel: Kernel | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) of every completion token, and the entropy there, [B, C] float32 each.

    temperature: of sampling, where the batch has none; any other makes every ratio wrong. entropy_gradient: whether that has one.
    Both are 0 outside `batch.mask`: padding then has ratio 1 and KL 0, and cannot overflow. The softmax is computed in
    float32: in bfloat16 it alone would lose most of the agreement with the engine.
    """
    if layout == "padded":
        logprobs, entropy = padded(model, batch, temperature, entropy_gradient)
        return logprobs.masked_fill(~batch.mask, 0.0), entropy.masked_fill(~batch.mask, 0.0)
    plan, places = pack(batch, layout == "shared_prompt", kernel)
    with attending(model, plan):
        states = model.get_decoder()(input_ids=plan.ids, position_ids=plan.positions, use_cache=False)
    hidden = states.last_hidden_state[0].index_select(0, places)
    host = batch.host or batch
    targets = sent(host.ids[:, batch.prompt_width :][host.mask], batch.ids.device)
    values = token_values(model, hidden, targets, temperatures(batch, temperature, packed=True), entropy_gradient)
    nothing = torch.zeros_like(batch.rollout_logprobs)
    return tuple(nothing.masked_scatter(batch.mask, of_tokens) for of_tokens in values)


def padded(model: nn.Module, batch: TokenBatch, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """Return the values of `completion_logprobs` in the padded layout, before the mask, [B, C] each."""
    width = batch.completion_width
    positions = (batch.attention_mask.cumsum(dim=1) - 1).clamp(min=0)  # those of the row alone: padding takes none
    # the last prompt token predicts the first completion token. A tensor gives contiguous rows; with a slice, a CPU copies a
    # frozen head in bfloat16 once for each row
    kept = torch.arange(-width - 1, 0, device=batch.ids.device)
    logits = model(
        input_ids=batch.ids,
        attention_mask=batch.attention_mask,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=kept,
    ).logits[:, :-1]  # [B, C, V]
    targets = batch.ids[:, batch.prompt_width :].clamp(min=0)  # ids of pictures, which nothing samples, are below 0
    return of_logits(logits, targets, temperatures(batch, temperature), entropy_gradient)
