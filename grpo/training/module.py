"""GRPOModule: the update of Group Relative Policy Optimization, arXiv 2402.03300. `training_step` is the algorithm.

It sees only tensors, a TokenBatch and Scores; the objective that it calls consists of pure functions of tensors.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from grpo.models.gradient_checkpointing import layers_of, recomputing
from grpo.models.logprobs import Layout, completion_logprobs
from grpo.models.master_weights import LOW, with_masters
from grpo.models.packed_attention import Kernel
from grpo.models.packing import in_microbatches, trusted
from grpo.models.policy import Reference
from grpo.models.temperature import at_half_of_it
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import TokenBatch
from grpo.objectives.entropy import EntropyController
from grpo.system import distributed
from grpo.system.distributed import is_sharded, one_pass
from grpo.system.seeds import SHUFFLE, derive_seed
from grpo.training.batch import RolloutBatch
from grpo.training.meter import Means, note_engine, note_loss, of_advantages
from grpo.training.module_state import ModuleState
from grpo.training.optimization import Optimization, TokensAtOnce, average_over_ranks, clipped, learned_by, settings_of
from grpo.training.skipped import Skipped


class GRPOModule(ModuleState):
    """Learns from rollouts. policy: the model to train. temperature: of sampling. num_rollouts: length of the whole run."""

    def __init__(
        self,
        policy: nn.Module,
        algorithm: Algorithm,
        optim: Optimization,
        temperature: float,
        num_rollouts: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # a checkpoint lacks the parameters that an adapter leaves frozen
        if optim.gradient_checkpointing:
            layers_of(policy)  # raises if there are none
        self.policy = policy
        self.reference = Reference(policy, moves=algorithm.kl.sync_every > 0) if algorithm.kl.needs_reference else None
        self.algorithm, self.optim, self.temperature, self.seed = algorithm, optim, temperature, seed
        self.num_updates = num_rollouts * algorithm.updates_per_rollout
        self.updates = 0  # updates so far
        self.moved = False  # whether the policy has changed since the rollout
        self.at_once = TokensAtOnce(optim.max_tokens_per_microbatch)
        self.skipped = Skipped(optim.skipped, optim.max_skipped)
        self.entropy = EntropyController(algorithm.entropy)

    def configure_model(self) -> None:
        """Called when the ranks know each other. With strategy=fsdp2 they share out the weights."""
        if (share := getattr(self.trainer.strategy, "share", None)) and not is_sharded(self.policy):
            share(self)

    def configure_optimizers(self):
        trained, offload = self.trained(), self.optim.offload and not is_sharded(self.policy)
        optimizer = with_masters(trained, self.optim.make, offload)
        self.by_hand = offload or any(p.dtype in LOW for p in trained.values())  # DDP sees no masters
        self.given = settings_of(optimizer)
        return [optimizer], [self.optim.scheduled(optimizer, self.num_updates)]

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> dict[str, float]:
        """Learn from one rollout: num_epochs passes of num_minibatches updates. Returns metrics."""
        means, shape = Means(), batch.scores.rewards.shape  # N, G
        scores, tokens = batch.scores.to(batch.tokens.ids.device, non_blocking=True), batch.tokens
        if self.algorithm.freezes_first:
            tokens = self.freeze(tokens)
        tokens = self.algorithm.credit(scores, tokens, batch.progress)
        if not self.algorithm.freezes_first:  # rows with advantage 0 need no log-probabilities
            tokens = self.freeze(tokens)
        rng = torch.Generator().manual_seed(derive_seed(self.seed, SHUFFLE, batch.rollout))
        tokens = self.algorithm.choose(tokens, rng)
        self.compare(tokens, means)
        advantages = tokens.sample_means(tokens.advantages, shape).cpu()
        batch.advantages = advantages.tolist()
        samples = sum(map(len, batch.groups)) or scores.rewards.numel()
        self.moved, count = False, samples / self.algorithm.num_minibatches  # samples of an update
        with recomputing(self.policy, self.optim.gradient_checkpointing):
            for epoch in range(self.algorithm.num_epochs):
                for minibatch in self.minibatches(tokens, shape, rng):
                    logprobs = self.update(minibatch, means, count)
                means.end_epoch(epoch, self.algorithm.num_epochs)
                if tokens.old_logprobs is None and self.algorithm.old_policy == "trainer":
                    tokens = replace(tokens, old_logprobs=logprobs)  # there is one minibatch, so these are all rows
        return means.result() | of_advantages(advantages)

    # -- before the updates

    @torch.no_grad()
    def freeze(self, tokens: TokenBatch) -> TokenBatch:
        """Add what stays fixed while the policy changes: the reference's log-probabilities and the old ones. With a single
        update per rollout the old ones need no pass: `update` uses its own log-probabilities."""
        if self.reference is not None:
            with self.reference.model() as model:
                reference_logprobs, _ = self.logprobs_of(model, tokens, self.live(tokens))
            tokens = replace(tokens, reference_logprobs=reference_logprobs)
        if self.algorithm.needs_old and tokens.old_logprobs is None:
            every = self.algorithm.choice is not None  # it compares the tokens of all rows
            rows = torch.arange(len(tokens)) if every else self.live(tokens)
            old_logprobs, old_entropy = self.logprobs_of(self.policy, tokens, rows)
            tokens = replace(tokens, old_logprobs=old_logprobs, old_entropy=old_entropy)
        if self.algorithm.takes("prob_squares"):  # p(y)^2 / q(y), where q has half the temperature, whatever y is
            sharper, _ = self.logprobs_of(self.policy, at_half_of_it(tokens, self.temperature), self.live(tokens))
            tokens = replace(tokens, prob_squares=(2 * tokens.old_logprobs - sharper).exp())
        return tokens

    def compare(self, tokens: TokenBatch, means: Means) -> None:
        """Note the difference of engine and trainer on the first row, if the updates may not: they skip rows with advantage 0."""
        seen = self.algorithm.num_minibatches == 1 if tokens.old_logprobs is None else len(self.live(tokens)) > 0
        row = tokens.rows(slice(0, 1))  # no row means no pass, unless another rank needs one
        logprobs, _ = self.logprobs_of(self.policy, row, torch.arange(int(not seen)))
        if not seen:
            note_engine(means, replace(row, old_logprobs=logprobs))

    @torch.no_grad()
    def logprobs_of(self, model: nn.Module, tokens: TokenBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [B, C] each, of these rows, by microbatches; 0 on the other rows."""
        logprobs, entropy = torch.zeros_like(tokens.rollout_logprobs), torch.zeros_like(tokens.rollout_logprobs)
        settings = self.temperature, False, *self.layout
        for indices, microbatch in self.microbatches(tokens, rows):
            width = microbatch.completion_width
            numbers = one_pass(model, completion_logprobs, microbatch, *settings)
            logprobs[indices, :width], entropy[indices, :width] = numbers
        return logprobs, entropy

    def forward_pass(self, model: nn.Module, tokens: TokenBatch, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [B, C] each, from one forward pass."""
        return one_pass(model, completion_logprobs, tokens, self.temperature, entropy_gradient, *self.layout)

    # -- which rows

    def minibatches(self, tokens: TokenBatch, shape: tuple[int, int], rng: torch.Generator) -> Iterator[TokenBatch]:
        """Yield this rank's rows of each minibatch. The groups of all ranks are shuffled and cut into pieces whose numbers of
        samples differ by at most one; all rows of a sample are in one piece. shape: N, G."""
        if self.algorithm.num_minibatches == 1:
            yield tokens
            return
        prompts, size = shape
        of_groups = torch.randperm(prompts, generator=rng).argsort()  # each group's place in a random order
        of_samples = (of_groups[:, None] * size + torch.arange(size)).flatten()
        places = of_samples[tokens.sample.cpu()]  # each row's
        order = places.argsort(stable=True)
        for piece in torch.arange(prompts * size).tensor_split(self.algorithm.num_minibatches):
            mine = order[torch.isin(places[order], piece)]
            yield tokens.rows(mine) if len(mine) else tokens.rows(slice(0, 1)).silenced()

    def live(self, tokens: TokenBatch) -> Tensor:
        """Return the indices of the rows that have a gradient, [n], in the host's memory."""
        rows = torch.arange(len(tokens))
        if tokens.advantages is None or not self.algorithm.skips_zero_advantages:
            return rows
        return rows[tokens.advantages.any(dim=1).cpu()]

    def microbatches(self, tokens: TokenBatch, rows: Tensor) -> list[tuple[Tensor, TokenBatch]]:
        """Cut these rows, [n], into pieces that go through the model at once. Returns the indices, [b], and the rows of each."""
        return in_microbatches(tokens, rows, self.layout[0], self.at_once.most, self.policy)

    def to_learn(self, minibatch: TokenBatch) -> list[tuple[Tensor, TokenBatch]]:
        """Return the microbatches of an update: at least one, because every rank needs a backward pass. A rank without a live
        row passes its first row with an empty mask. If no rank has a live row and this pass must give the old log-probabilities,
        the mask stays."""
        live = self.live(minibatch)
        anywhere = distributed.all_sum(torch.full((), float(len(live)), device=minibatch.ids.device))
        if len(live):
            return self.microbatches(minibatch, live)
        measured = not anywhere and minibatch.old_logprobs is None
        return self.microbatches(minibatch if measured else minibatch.silenced(), torch.zeros(1, dtype=torch.int64))

    @cached_property
    def layout(self) -> tuple[Layout, Kernel | None]:
        """The layout that gives correct results for this policy, and its kernel. First read when the policy is on its device."""
        return trusted(self.policy, self.optim.layout)

    # -- one update

    def update(self, minibatch: TokenBatch, means: Means, count: float) -> Tensor:
        """Make one optimizer step on the loss of a minibatch, summed over its microbatches. count: its samples on all ranks.
        Returns the log-probabilities before the step, [B, C]; 0 on rows that were skipped."""
        minibatch = self.weighed(minibatch, count)
        alpha, zero_grad, longest = self.entropy.alpha, self.optimizers().zero_grad, minibatch.ids.shape[1]
        logprobs, noted = self.at_once.fitting(lambda: self.gradients(minibatch, alpha), zero_grad, longest)
        if (stepped := self.step(minibatch, noted)) or self.scale.halved:
            means.take(noted)
        means.add("loss/skipped", not stepped and not self.scale.halved)
        if stepped and self.algorithm.entropy.active:
            means.add("loss/entropy_coef", alpha)
            self.entropy.update(noted.result().get("loss/entropy"))
        if (kl := self.algorithm.kl).sync_every and self.updates % kl.sync_every == 0:
            self.reference.move(kl.sync_alpha)
        return logprobs

    def weighed(self, minibatch: TokenBatch, count: float) -> TokenBatch:
        """Add the tokens' weights in the loss of an update. count: its samples on all ranks, whose gradients are averaged."""
        weights = self.algorithm.weights(minibatch.mask, minibatch.sample, count)
        return replace(minibatch, weights=weights * distributed.world_size())

    def gradients(self, minibatch: TokenBatch, alpha: float) -> tuple[Tensor, Means]:
        """Add the gradients of a minibatch. Returns the log-probabilities, [B, C], and metrics. alpha: weight of the entropy."""
        # compare engine and trainer only under the same policy: after an update log-probabilities differ anyway
        fresh = minibatch.old_logprobs is not None or not self.moved
        before, noted, pieces = torch.zeros_like(minibatch.rollout_logprobs), Means(), self.to_learn(minibatch)
        for i, (rows, microbatch) in enumerate(pieces):
            logprobs, entropy = self.forward_pass(self.policy, microbatch, self.algorithm.entropy.active)
            before[rows, : microbatch.completion_width] = logprobs.detach()
            if microbatch.old_logprobs is None:
                microbatch = replace(microbatch, old_logprobs=logprobs.detach())
            loss, logged = self.loss_of(logprobs, entropy, microbatch, alpha)
            self.backward_here(loss, last=i == len(pieces) - 1)
            note_loss(noted, microbatch, logprobs.detach(), logged)
            if fresh:
                note_engine(noted, microbatch)
            if not self.moved:
                noted.add_tokens("loss/first_kl", logged["approx_kl"], microbatch.mask)
        return before, noted

    def loss_of(self, logprobs: Tensor, entropy: Tensor, microbatch: TokenBatch, alpha: float) -> tuple[Tensor, dict]:
        """Return the loss of a microbatch, and numbers to log, [B, C] each."""
        return self.algorithm.loss(logprobs, entropy, microbatch, alpha)

    def backward_here(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of a microbatch. Ranks sum them in the last microbatch, or if `by_hand` in `step`."""
        exchanged = distributed.world_size() == 1 or is_sharded(self.policy) or (last and not self.by_hand)
        with nullcontext() if exchanged else self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.scale.scaled(loss, self.policy))

    def step(self, minibatch: TokenBatch, means: Means) -> bool:
        """Clip the gradient, then step the optimizer and the schedule. Returns False if the gradient is not finite: no step."""
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        if self.by_hand:
            average_over_ranks(learned_by(optimizer), self.device)
        finite = clipped(optimizer, self.optim.max_grad_norm, means, self.scale)
        means.add("lr", optimizer.param_groups[0]["lr"])
        if finite:
            optimizer.step()
            self.moved, self.skipped.row = True, 0
        elif not self.scale.halved:
            self.skipped.note(self.position(), self.policy, minibatch)
        optimizer.zero_grad()
        schedule.step()
        self.updates += 1
        return finite
