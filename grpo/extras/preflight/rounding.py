"""How far rounding alone takes log-probabilities apart, measured on the model at hand."""

from typing import Any

import torch
from torch import Tensor

from grpo.models.logprobs import completion_logprobs
from grpo.system.distributed import one_pass

UNSURE = 1e-3  # the least probability of all other tokens, where log-odds are compared


@torch.no_grad()
def bounds(probe: Any) -> tuple[float, float]:
    """Return the largest mean differences that rounding explains: of log-probabilities, in nats, and of log-odds.

    They are measured on this model: the difference between passes over all rows and passes over each row alone in the padded
    layout, and the precision of the number type times what hidden states (near 1) and logits lose of it. In float32 nats are at
    least 3e-5, and more for a large vocabulary, over which a CPU's log_softmax adds up: an engine may use that. They are two to
    three times what was measured between vLLM and the trainer (docs/preflight.md).
    """
    few, alone = probe.few, []
    together = probe.trainer(few)[0]
    for i in range(len(few)):
        one = few.rows(slice(i, i + 1))
        values, _ = one_pass(probe.module.policy, completion_logprobs, one, probe.module.temperature)
        alone.append(values[one.mask])
    apart, together = torch.cat(alone) - together[few.mask], together[few.mask]
    one = few.rows(slice(0, 1))
    kept = torch.arange(-one.completion_width, 0, device=one.ids.device)
    given = {"input_ids": one.ids, "attention_mask": one.attention_mask, "logits_to_keep": kept}
    logits = probe.module.policy(**given, use_cache=False).logits
    lowest = min([*probe.rollouts.plan.sampling.temperatures, probe.module.temperature])
    lost = probe.eps * (3 + float(logits.abs().amax(-1).float().mean() / lowest) / 4)
    vocabulary = probe.module.policy.config.get_text_config().vocab_size
    nats = max(3e-5, 8e-10 * vocabulary, 3 * float(apart.abs().mean()), lost)
    return nats, max(3 * lost, 2 * odds(apart, together))


def odds(apart: Tensor, logprobs: Tensor) -> float:
    """Return the mean difference of log-odds, which is that of log-probabilities as a share of what other tokens have; 0 if all
    are sure. A fault shows in each token by it; in nats the rare tokens, where rounding is largest, hide the others.

    apart: differences of the log-probabilities of n tokens, [n]; logprobs: [n].
    """
    others = -torch.expm1(logprobs.double())
    unsure = others > UNSURE
    return float((apart.double().abs() / others)[unsure].mean()) if bool(unsure.any()) else 0.0
