"""GRPOModule: the update of Group Relative Policy Optimization, arXiv 2402.03300. `training_step` is the algorithm.

It sees only tensors, a TokenBatch and Scores; the objective that it calls consists of pure functions of tensors.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from grpo.models.gradient_checkpointing import layers_of, recomputing
from grpo.models.logprobs import completion_logprobs
from grpo.models.master_weights import LOW, with_masters
from grpo.models.policy import Reference
from grpo.models.states import logprobs_and_states
from grpo.models.temperature import at_half_of_it
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import TokenBatch
from grpo.objectives.entropy import EntropyController
from grpo.system import distributed, memory
from grpo.system.distributed import is_sharded, one_pass
from grpo.system.seeds import SHUFFLE, derive_seed
from grpo.training.batch import RolloutBatch
from grpo.training.meter import Means, note_engine, note_loss, of_advantages
from grpo.training.optimization import Optimization, TokensAtOnce, average_over_ranks, clipped, learned_by, settings_of
from grpo.training.parts import UpdatePart, UpdateParts
from grpo.training.rows import UpdateRows
from grpo.training.skipped import Skipped


class GRPOModule(UpdateRows):
    """Learns from rollouts. policy: the model to train. temperature: of sampling. num_rollouts: length of the whole run. parts:
    what else the update has, by name: a teacher, a critic. They are called in this order."""

    def __init__(
        self,
        policy: nn.Module,
        algorithm: Algorithm,
        optim: Optimization,
        temperature: float,
        num_rollouts: int,
        seed: int,
        parts: Mapping[str, UpdatePart | None] | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # one batch of Lightning is a rollout, and has several steps
        self.strict_loading = False  # a checkpoint lacks the parameters that an adapter leaves frozen
        if optim.gradient_checkpointing:
            layers_of(policy)  # raises if there are none
        self.policy = policy
        self.reference = Reference(policy, moves=algorithm.kl.sync_every > 0) if algorithm.kl.needs_reference else None
        self.algorithm, self.optim, self.temperature, self.seed = algorithm, optim, temperature, seed
        self.num_updates = num_rollouts * algorithm.updates_per_rollout
        self.updates = 0  # updates so far
        self.moved = False  # whether the policy has changed since the rollout
        self.at_once = TokensAtOnce(optim.tokens_at_once(next(policy.parameters()).device.type))
        self.skipped = Skipped(optim.skipped, optim.max_skipped)
        self.entropy = EntropyController(algorithm.entropy)
        self.parts = UpdateParts({name: part for name, part in (parts or {}).items() if part is not None})
        self.parts.attach(self)

    def configure_model(self) -> None:
        """Called when the ranks know each other. With strategy=fsdp2 they share out the weights."""
        if (share := getattr(self.trainer.strategy, "share", None)) and not is_sharded(self.policy):
            share(self)

    def configure_optimizers(self):
        trained, offload = self.trained(), self.optim.offload and not is_sharded(self.policy)
        optimizer = with_masters(trained, self.optim.make, offload)
        self.has_masters = offload or any(p.dtype in LOW for p in trained.values())
        self.given = settings_of(optimizer)
        return [optimizer], [self.optim.scheduled(optimizer, self.num_updates)]

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> dict[str, float]:
        """Learn from one rollout: num_epochs passes of num_minibatches updates. Returns metrics."""
        means, shape = Means(), batch.scores.rewards.shape  # N, G
        scores = batch.scores.to(batch.tokens.ids.device)
        tokens = batch.tokens = self.parts.assign(batch.tokens, batch)
        if self.algorithm.freezes_first:
            tokens = self.freeze(tokens)
        tokens = self.algorithm.credit(scores, tokens, batch.progress)  # a minibatch may divide a group
        if not self.algorithm.freezes_first:  # rows with advantage 0 need no log-probabilities
            tokens = self.freeze(tokens)
        # from the number of the rollout and not from one stream, so that a resumed run draws the same
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
        return means.result() | of_advantages(advantages) | self.parts.learned(batch)

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
        return self.parts.freeze(tokens)

    def forward_pass(self, model: nn.Module, tokens: TokenBatch, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [B, C] each, from one forward pass, whose states parts read if it learns."""
        learns, settings = torch.is_grad_enabled(), (self.temperature, entropy_gradient, *self.layout)
        readers = self.parts.readers(tokens) if learns and model is self.policy else {}
        with torch.set_grad_enabled(learns and not self.parts.alone):
            if not readers:
                return one_pass(model, completion_logprobs, tokens.passed(), *settings)
            # a row in no term has a gradient of 0 all the same, which other ranks wait for
            settings = *settings, [*readers.values()], self.algorithm.of_logprobs or tokens.teaching is None
            logprobs, entropy, *found = one_pass(model, logprobs_and_states, tokens.passed(), *settings)
        for name, numbers in zip(readers, found, strict=True):
            self.parts[name].read = numbers
        return logprobs, entropy

    # -- one update

    def update(self, minibatch: TokenBatch, means: Means, count: float) -> Tensor:
        """Make one optimizer step on the loss of a minibatch, summed over its microbatches. count: its samples on all ranks.
        Returns the log-probabilities before the step, [B, C]; 0 on rows that were skipped."""
        minibatch = self.weighed(minibatch, count)
        alpha, zero_grad, longest = self.entropy.alpha, self.optimizers().zero_grad, minibatch.ids.shape[1]
        logprobs, noted = self.at_once.fitting(lambda: self.gradients(minibatch, alpha), zero_grad, longest)
        if (stepped := self.step(minibatch, noted)) or self.scale.halved:  # a skipped one may have noted NaN
            means.take(noted)
        means.add("loss/skipped", not stepped and not self.scale.halved)
        if stepped and self.algorithm.entropy.active:
            means.add("loss/entropy_coef", alpha)
            self.entropy.update(noted.result().get("loss/entropy"))
        if (kl := self.algorithm.kl).sync_every and self.updates % kl.sync_every == 0:
            self.reference.move(kl.sync_alpha)
        self.parts.moved()
        return logprobs

    def weighed(self, minibatch: TokenBatch, count: float) -> TokenBatch:
        """Add the tokens' weights in the loss of an update. count: its samples on all ranks, whose gradients are averaged."""
        weights = self.algorithm.weights(minibatch.mask, minibatch.sample, count, minibatch.group)
        minibatch = replace(minibatch, weights=weights * distributed.world_size())
        return self.parts.weigh(minibatch, count).with_scored()

    def gradients(self, minibatch: TokenBatch, alpha: float) -> tuple[Tensor, Means]:
        """Add the gradients of a minibatch. Returns the log-probabilities, [B, C], and metrics. alpha: weight of the entropy."""
        # compare engine and trainer only under the same policy: after an update log-probabilities differ anyway
        fresh = minibatch.old_logprobs is not None or not self.moved
        before, noted, pieces = torch.zeros_like(minibatch.rollout_logprobs), Means(), self.to_learn(minibatch)
        for i, (rows, microbatch) in enumerate(pieces):
            logprobs, entropy = self.forward_pass(self.policy, microbatch, self.algorithm.entropy.active)
            before[rows, : microbatch.completion_width] = logprobs.detach()
            if microbatch.old_logprobs is None:  # in the first update these are the old policy's
                microbatch = replace(microbatch, old_logprobs=logprobs.detach())
            loss, logged = self.loss_of(logprobs, entropy, microbatch, alpha, noted)
            self.backward_here(loss, last=i == len(pieces) - 1)
            note_loss(noted, microbatch, logprobs.detach(), logged)
            if fresh:
                note_engine(noted, microbatch)
            if not self.moved:
                noted.add_tokens("loss/first_kl", logged["approx_kl"], microbatch.mask)
        return before, noted

    def loss_of(
        self, logprobs: Tensor, entropy: Tensor, microbatch: TokenBatch, alpha: float, means: Means
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a microbatch, equation 1, and numbers to log, [B, C] each. means: parts add theirs."""
        return self.algorithm.loss(logprobs, entropy, self.parts.term(microbatch, logprobs, means), alpha)

    def backward_here(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of a microbatch. Ranks sum them in the last microbatch, or if `by_hand` in `step`."""
        exchanged = distributed.world_size() == 1 or is_sharded(self.policy) or (last and not self.by_hand)
        with nullcontext() if exchanged else self.trainer.strategy.block_backward_sync():
            # not divided by the number of microbatches: the weights in the loss are shares of the whole update
            self.manual_backward(self.scale.scaled(loss, self.policy))
        if self.device.type == "cpu":
            memory.give_back(memory.KEPT)

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
        schedule.step()  # of a skipped update, too, so that the schedule ends with the run
        self.updates += 1
        return finite
