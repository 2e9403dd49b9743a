"""Hidden states before the sampled tokens, for what reads them in the same pass: a critic, a teacher of distributions.

A hidden state that predicts a token has seen everything before it, and not the token.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from grpo.models.head import token_values
from grpo.models.logprobs import Layout
from grpo.models.packed_attention import Kernel, attending, pack
from grpo.models.temperature import temperatures
from grpo.objectives.batch import TokenBatch
from grpo.system.memory import sent

Reader = Callable[[nn.Module, Tensor, TokenBatch], Tensor]  # model, states [n, hidden], the rows of the pass


def states_before(
    model: nn.Module, batch: TokenBatch, layout: Layout = "padded", kernel: Kernel | None = None
) -> Tensor:
    """Return a decoder's last hidden state before each sampled token, [n, hidden], ordered as `batch.mask`."""
    if layout != "padded":
        plan, places = pack(batch, layout == "shared_prompt", kernel)
        with attending(model, plan):
            states = model(input_ids=plan.ids, position_ids=plan.positions, use_cache=False)
        return states.last_hidden_state[0].index_select(0, places)
    seen = batch.attention_mask
    positions = (seen.cumsum(dim=1) - 1).clamp(min=0)
    states = model(input_ids=batch.ids, attention_mask=seen, position_ids=positions, use_cache=False).last_hidden_state
    row, column = (batch.host or batch).mask.cpu().nonzero().T
    return states[sent(row, states.device), sent(column + batch.prompt_width - 1, states.device)]


def logprobs_and_states(
    model: nn.Module,
    batch: TokenBatch,
    temperature: float,
    entropy_gradient: bool,
    layout: Layout,
    kernel: Kernel | None,
    readers: Sequence[Reader],
    learns: bool = True,
) -> tuple[Tensor, ...]:
    """Return what `completion_logprobs` does, and what each reader makes of the hidden states. learns: whether the
    log-probabilities need a gradient; without one the head is spared a backward pass."""
    states, host = states_before(model.get_decoder(), batch, layout, kernel), batch.host or batch
    targets = sent(
        host.ids[:, batch.prompt_width :][host.mask], batch.ids.device
    )  # the host does not wait for the device
    with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
        heat = temperatures(batch, temperature, packed=True)
        values = token_values(model, states, targets, heat, entropy_gradient)
    nothing = torch.zeros_like(batch.rollout_logprobs)
    logprobs, entropy = (nothing.masked_scatter(batch.mask, of_tokens) for of_tokens in values)
    return logprobs, entropy, *(reader(model, states, batch) for reader in readers)
