"""Checks of the update: it learns from the tokens that were sampled, from where the policy stands, whatever the microbatches."""

import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from grpo.extras.preflight.allowance import added_tokens, slowest
from grpo.extras.preflight.checked import COARSE, Checked, mean_gap, pass_or_fail
from grpo.extras.preflight.probe import Probe
from grpo.models.gradient_checkpointing import recomputing
from grpo.models.master_weights import in_float16
from grpo.objectives.batch import TokenBatch
from grpo.system import distributed
from grpo.system.errors import plural
from grpo.system.loading import not_finite
from grpo.training.meter import Means
from grpo.training.module import GRPOModule
from grpo.training.optimization import learned_by

SLICE = 1 << 16
NOTHING = 1e-6  # a norm that is rounding of nothing, as where the teacher is the policy: advantages of the check are 1 and more
SCALE = 1024.0  # of a loss in float16: below the run's, so that no gradient of the few rows is infinite


def all_weights(probe: Probe) -> Checked:
    """All weights are finite, also after a cast that came later than loading. Loading has raised an error if one was missing,
    renamed or of another shape."""
    named = dict(probe.module.policy.named_parameters())
    broken = not_finite(named.items())
    text = f"{plural(len(named), 'tensor')}, none missing or of another shape, {len(broken)} not finite"
    return pass_or_fail(not broken, text, f"the checkpoint is damaged, the first one is {next(iter(broken), '')}")


def mask(probe: Probe) -> Checked:
    """The mask has every sampled token once, in its turn, end tokens included, and nothing else; microbatches have every row
    once."""
    tokens = probe.tokens
    placed = tokens.ids[:, tokens.prompt_width :]
    wrong = 0
    for s, sample in enumerate(probe.samples):
        rows = tokens.sample == s
        good = int(tokens.mask[rows].sum()) == sample.length
        for number, turn in enumerate(sample.turns):
            in_turn = tokens.mask[rows] & (tokens.turn[rows] == number)
            values = tokens.rollout_logprobs[rows][in_turn].cpu()
            good &= placed[rows][in_turn].tolist() == list(turn.completion.ids)
            good &= torch.equal(values, torch.tensor(turn.completion.logprobs).to(values))
        wrong += not good
    every = torch.arange(len(tokens), device=tokens.ids.device)
    cut = torch.cat([rows for rows, _ in probe.module.microbatches(tokens, every)]).sort().values
    count = sum(sample.length for sample in probe.samples)
    text = f"{plural(count, 'sampled token')}, {int(tokens.mask.sum())} masked; {wrong} of {len(probe.samples)} samples differ"
    return pass_or_fail(
        not wrong and torch.equal(cut, every), text, "the loss would score other tokens: please report this"
    )


def weights(probe: Probe) -> Checked:
    """Each token has the weight in the loss that the reduction of the objective gives it."""
    tokens, algorithm, world = probe.tokens, probe.module.algorithm, distributed.world_size()
    if callable(algorithm.reduce):
        return Checked("SKIP", "the reduction is a function of yours")
    if not algorithm.policy_coef:
        return Checked("SKIP", "algo.policy_coef=0: the policy learns from no reward")
    lengths = torch.zeros(len(probe.samples), device=tokens.ids.device)
    lengths.index_add_(0, tokens.sample, tokens.mask.sum(1).float())
    ones, total, answered = torch.ones_like(lengths), lengths.sum(), (lengths > 0).sum()
    shares = {"sequence": 1 / (answered * lengths), "token": ones / total, "sum": ones / answered}
    shares["constant"] = ones / (len(lengths) * algorithm.max_tokens)
    right = torch.where(tokens.mask, shares[algorithm.reduce][tokens.sample, None] * algorithm.policy_coef, 0.0)
    ours = probe.module.weighed(tokens, len(lengths) * world).weights
    sums = f"{float(ours.sum()):.6g} together, {float(right.sum()):.6g} by {algorithm.reduce}"
    equal = torch.allclose(ours, right, rtol=1e-4, atol=0)
    return pass_or_fail(
        equal, f"{plural(int(total), 'token')} weigh {sums}", "the loss weighs its tokens wrongly: please report this"
    )


@torch.no_grad()
def first_pass(probe: Probe) -> Checked:
    """Two passes of the policy are equal (nothing in it is random), that of the update too, and so is the reference: KL 0, ratio
    1, nothing clipped."""
    few, bound = probe.few, probe.bound
    one, two = probe.trainer(few)[0], probe.trainer(few)[0]
    noise = float((one - two).abs().max())
    text = f"two passes differ by {noise:.1e} nats"
    if noise > bound:
        return Checked("FAIL", text, "something in the policy is random: set dropout to 0")
    learns = probe.module.forward_pass(probe.module.policy, few, False)[0]
    if (other := mean_gap(learns, one, few)) > bound:
        text = f"the pass that learns and the one that measures are {other:.1e} nats apart, bound {bound:.1e}"
        return Checked("FAIL", text, "they compute different numbers: look at temperature and at optim.layout")
    if probe.module.reference is None:
        return Checked("PASS", f"{text}; this run has no reference")
    few = replace(few, advantages=few.mask.float())
    frozen = probe.module.freeze(few)
    away = mean_gap(frozen.reference_logprobs, one, few)
    text += f", policy and reference by {away:.1e}, bound {bound:.1e}"
    return pass_or_fail(away <= bound, text, "the reference is not the policy: look at model.path, adapter and dtype")


def gradient(probe: Probe) -> Checked:
    """The gradient is the same with the rows cut into 1, 3 and single microbatches, and in the padded layout."""
    module, few = probe.module, objective(probe, probe.few)
    chosen = module.layout
    cuts, begun = {"3": min(3, len(few)), f"{len(few)}": len(few)}, time.perf_counter()
    gradients = {"1 microbatch": gradient_of(probe, few, 1)}
    # each piece takes about as long as the whole, because all weights have a gradient
    slow = slowest(time.perf_counter() - begun) * (1 + sum(cuts.values())) > probe.allowance.left(1 / 2)
    if not slow:
        gradients |= {name: gradient_of(probe, few, pieces) for name, pieces in cuts.items()}
    try:
        module.__dict__["layout"] = ("padded", chosen[1])
        gradients["padded"] = gradient_of(probe, few, 2 if slow else 1)
    finally:
        module.__dict__["layout"] = chosen
    first = gradients["1 microbatch"]
    norm = float(first.norm())
    if norm <= NOTHING:
        return Checked("SKIP", "the objective has no gradient on these rows")
    apart = {name: float((other - first).norm()) / norm for name, other in gradients.items()}
    bound = gradient_bound(probe)
    worst = max(apart, key=apart.get)
    size = f"{plural(len(few), 'row')}, {plural(int(few.attention_mask.sum()), 'token')}"
    ways = "as one and as 2 padded ones" if slow else f"cut into 1, 3 and {len(few)}, and padded"
    text = f"{size}, {ways}: at most {apart[worst]:.1e} apart ({worst}), bound {bound:.1e}"
    remedy = f"optim.layout={chosen[0]} or the loss depends on microbatches: set optim.layout=padded, or mend the loss"
    return pass_or_fail(apart[worst] <= bound, text, remedy)


def devices(probe: Probe) -> Checked:
    """Each device holds the same policy, and the gradients of their shares of the rows add up to that of all rows."""
    if (count := distributed.world_size()) == 1:
        return Checked("SKIP", "the run has one device")
    few = objective(probe, probe.few)
    whole, mine = gradient_of(probe, few, 1), distributed.share(len(few))
    share = few.rows(slice(mine.start, mine.stop)) if mine else few.rows(slice(0, 1)).silenced()
    part = gradient_of(probe, share, 1)
    summed = distributed.is_sharded(probe.module.policy)  # the ranks have their mean already
    total = part * count if summed else distributed.all_sum(part.to(few.ids.device)).cpu()
    apart = max(distributed.all_gather([float((total - whole).norm() / whole.norm().clamp(min=1e-30))]))
    bound = gradient_bound(probe)
    text = f"the sum over {count} devices and the whole: {apart:.1e} apart, bound {bound:.1e}"
    return pass_or_fail(
        apart <= bound, text, "the devices hold different weights: give all of them the same model and seed"
    )


def objective(probe: Probe, tokens: TokenBatch) -> TokenBatch:
    """Return these rows ready for the loss, with advantages 1, -2, 3, -4 ...: of both signs, and equal rows do not cancel."""
    module, tokens = probe.module, probe.assigned(tokens)
    number = torch.arange(1, len(tokens) + 1, device=tokens.ids.device)
    advantages = torch.where(number % 2 == 1, 1.0, -1.0) * number
    tokens = replace(tokens, advantages=tokens.mask * advantages[:, None])
    tokens = module.weighed(tokens, float(len(tokens.sample.unique()) * distributed.world_size()))
    with torch.no_grad():
        tokens = module.freeze(tokens)
    return tokens if tokens.old_logprobs is not None else replace(tokens, old_logprobs=probe.trainer(tokens)[0])


def gradient_bound(probe: Probe) -> float:
    """Return the relative difference of gradients that rounding explains. In bfloat16 rows of 32 tokens were up to 0.11 apart
    in two layouts."""
    return max(1e-4, (3 if probe.eps > COARSE else 1) * probe.eps**0.5)


def gradient_of(probe: Probe, tokens: TokenBatch, pieces: int) -> Tensor:
    """Return the gradient of the loss of these rows as one vector: of each parameter evenly spaced numbers, about SLICE at most.
    The parameters have no gradient afterwards. pieces: into how many microbatches the rows are cut. In float16 it is scaled
    by SCALE."""
    [optimizer] = probe.module.trainer.optimizers
    half = in_float16(probe.module.policy, probe.module.device.type)
    probe.sleep()

    def added() -> None:
        for rows in torch.arange(len(tokens)).tensor_split(pieces):
            backward(probe.module, tokens.rows(rows.to(tokens.ids.device)), SCALE if half else 1.0)

    try:
        if limit := getattr(probe.module, "at_once", None):  # it goes on without a kernel that fails
            # the pieces are given, so that fewer tokens at once would not help
            limit.fitting(added, optimizer.zero_grad, longest=limit.most)
        else:  # a module of another kind
            added()
        flat = [distributed.full(p.grad.detach()).flatten() for p in learned_by(optimizer) if p.grad is not None]
        return torch.cat([grad[:: math.ceil(len(grad) / SLICE)].float().cpu() for grad in flat])
    finally:
        optimizer.zero_grad()


def backward(module: GRPOModule, microbatch: TokenBatch, scale: float = 1.0) -> tuple[float, dict[str, Tensor]]:
    """Add the gradients of a microbatch's loss times `scale`, as `GRPOModule.update` does. Returns the loss, and numbers of
    tokens, [B, C]."""
    with recomputing(module.policy, module.optim.gradient_checkpointing):
        logprobs, entropy = module.forward_pass(module.policy, microbatch, module.algorithm.entropy.active)
        if microbatch.old_logprobs is None:
            microbatch = replace(microbatch, old_logprobs=logprobs.detach())
        loss, logged = module.loss_of(logprobs, entropy, microbatch, module.entropy.alpha, Means())
        (loss * scale).backward()
    return float(loss.detach()), {"logprobs": logprobs.detach(), **logged}


def seconds(probe: Probe) -> float:
    """Return the seconds that an update on the probe's episodes takes, by those of as many of its rows as there is time for. As
    in a run, groups without signal are skipped (if none has any, the share that was found among others counts), and less goes
    through the model at once if memory runs out."""
    module, scores = probe.module, probe.scores
    live = scores.has_signal().repeat_interleave(probe.rollouts.plan.group_size) | probe.beyond_rewards
    rows = live[probe.tokens.sample.cpu()].nonzero().flatten().to(module.device)
    share = 1.0
    if not len(rows):
        rows, share = torch.arange(len(probe.tokens), device=module.device), 1.0 if probe.live is None else probe.live
    if not share:
        return 0.0
    lengths = added_tokens(probe.tokens.rows(rows), module)
    passes = 1 + 4 * module.algorithm.num_epochs
    fit = probe.allowance.left(1 / 3) / passes / probe.token_seconds
    count = max(1, int((lengths.cumsum(0) <= fit).sum()))
    timed, [optimizer] = probe.tokens.rows(rows[:count]), module.trainer.optimizers
    probe.sleep()

    def learned() -> float:
        """Return the seconds of the gradients of these rows."""
        begun = time.perf_counter()
        tokens = objective(probe, timed)
        for _ in range(module.algorithm.num_epochs):
            for _, microbatch in module.microbatches(tokens, torch.arange(len(tokens), device=module.device)):
                backward(module, microbatch)
        return time.perf_counter() - begun

    try:
        spent = module.at_once.fitting(learned, optimizer.zero_grad, timed.ids.shape[1])
    finally:
        optimizer.zero_grad()
    return share * spent * float(lengths.sum() / lengths[:count].sum())
