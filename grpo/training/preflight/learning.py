"""Checks of the update: it learns from the tokens that were sampled, from where the policy stands, whatever the microbatches."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from grpo.objectives.batch import TokenBatch
from grpo.training.preflight.probe import Checked, Probe, judged

SLICE = 1 << 16


def mask(probe: Probe) -> Checked:
    """The mask has every sampled token once, end tokens included, and nothing else; microbatches have every row once."""
    tokens = probe.tokens
    placed = tokens.ids[:, -tokens.completion_width :]
    wrong = 0
    for s, sample in enumerate(probe.samples):
        rows = tokens.sample == s
        drawn = [i for turn in sample.turns for i in turn.completion.ids]
        reported = torch.tensor([value for turn in sample.turns for value in turn.completion.logprobs])
        found = placed[rows][tokens.mask[rows]].tolist()
        values = tokens.rollout_logprobs[rows][tokens.mask[rows]].cpu()
        wrong += drawn != found or not torch.equal(values, reported.to(values))
    every = torch.arange(len(tokens), device=tokens.ids.device)
    cut = torch.cat([rows for rows, _ in probe.module.microbatches(tokens, every)]).sort().values
    count = sum(sample.length for sample in probe.samples)
    text = (
        f"{count} sampled tokens, {int(tokens.mask.sum())} in the mask; {wrong} of {len(probe.samples)} samples differ"
    )
    return judged(not wrong and torch.equal(cut, every), text, "the loss would score other tokens: please report this")


@torch.no_grad()
def first_pass(probe: Probe) -> Checked:
    """Two passes of the policy are equal (nothing in it is random), and so is the reference: KL 0, ratio 1, nothing clipped."""
    few, bound = probe.few, probe.bound
    one, two = probe.trainer(few)[0], probe.trainer(few)[0]
    noise = float((one - two).abs().max())
    if noise > bound:
        return Checked(
            "FAIL", f"two passes differ by {noise:.1e} nats", "something in the policy is random: set dropout to 0"
        )
    if probe.module.reference is None:
        return Checked("PASS", f"two passes differ by {noise:.1e} nats; this run has no reference")
    few = replace(few, advantages=few.mask.float())
    frozen = probe.module.freeze(few)
    away = float((frozen.reference_logprobs - one)[few.mask].abs().mean())
    text = f"two passes differ by {noise:.1e} nats, policy and reference by {away:.1e}, bound {bound:.1e}"
    return judged(
        away <= bound, text, "the reference is not the policy at the start: look at model.path, adapter and dtype"
    )


def gradient(probe: Probe) -> Checked:
    """The gradient is the same with the rows cut into 1, 3 and single microbatches, and in the padded layout."""
    module, few = probe.module, probe.few
    number = torch.arange(1, len(few) + 1, device=few.ids.device)
    credit = torch.where(number % 2 == 1, 1.0, -1.0) * number  # equal rows do not cancel
    few = replace(few, advantages=few.mask * credit[:, None], weights=module.algorithm.weights(few.mask, few.sample))
    with torch.no_grad():
        few = module.freeze(few)
    if few.old_logprobs is None:
        few = replace(few, old_logprobs=probe.trainer(few)[0])
    chosen = module.layout
    cuts = {"1 microbatch": 1, "3": min(3, len(few)), f"{len(few)}": len(few)}
    found = {name: gradient_of(probe, few, pieces) for name, pieces in cuts.items()}
    try:
        module.__dict__["layout"] = ("padded", chosen[1])
        found["padded"] = gradient_of(probe, few, 1)
    finally:
        module.__dict__["layout"] = chosen
    first = found["1 microbatch"]
    norm = float(first.norm())
    if not norm:
        return Checked("SKIP", "the objective has no gradient on these rows")
    apart = {name: float((other - first).norm()) / norm for name, other in found.items()}
    bound = max(1e-4, probe.eps**0.5)
    worst = max(apart, key=apart.get)
    text = f"cut into 1, 3 and {len(few)}, and padded: at most {apart[worst]:.1e} apart ({worst}), bound {bound:.1e}"
    remedy = (
        f"optim.layout={chosen[0]} or the loss depends on the microbatches: set optim.layout=padded, or mend the loss"
    )
    return judged(apart[worst] <= bound, text, remedy)


def gradient_of(probe: Probe, tokens: TokenBatch, pieces: int) -> Tensor:
    """Return the gradient of the loss of these rows as one vector, at most SLICE numbers per parameter. Leaves none behind."""
    module = probe.module
    [optimizer] = module.trainer.optimizers
    learned = [p for group in optimizer.param_groups for p in group["params"]]
    for rows in torch.arange(len(tokens)).tensor_split(pieces):
        microbatch = tokens.rows(rows.to(tokens.ids.device))
        logprobs, entropy = module.forward_pass(module.policy, microbatch, module.algorithm.entropy.active)
        loss, _ = module.algorithm.loss(logprobs, entropy, microbatch, module.entropy.alpha)
        loss.backward()
    flat = [p.grad.detach().flatten() for p in learned if p.grad is not None]
    vector = torch.cat([grad[:: math.ceil(len(grad) / SLICE)].float().cpu() for grad in flat])
    optimizer.zero_grad()
    return vector
