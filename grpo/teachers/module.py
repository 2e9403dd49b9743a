"""Taught: the update with all three parts of equation 1. Before the update, every token gets its weight in each part; in the
update, a teacher scores the tokens that the policy learns from.

Each part has a denominator of its own, over all ranks and microbatches of an update.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from grpo.models.critic import states_before
from grpo.models.divergence import Distributions, divergences, with_own_head
from grpo.models.head import token_values
from grpo.models.logprobs import Layout, completion_logprobs
from grpo.models.packing import trusted
from grpo.models.temperature import temperatures
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import TokenBatch
from grpo.objectives.loss import token_weights
from grpo.objectives.teaching import Teaching
from grpo.rollout.rollouts import Rollouts
from grpo.system import distributed
from grpo.system.distributed import one_pass
from grpo.system.errors import UserError
from grpo.teachers.kinds import Teacher
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.meter import Means
from grpo.training.module import GRPOModule
from grpo.training.optimization import Optimization


class Taught(GRPOModule):
    """Learns from rollouts, from a text and from a teacher, as the algorithm weighs them."""

    def __init__(
        self,
        policy: nn.Module,
        algorithm: Algorithm,
        optim: Optimization,
        temperature: float,
        num_rollouts: int,
        seed: int,
        teacher: Teacher,
        critic: object = None,
    ) -> None:
        if critic is not None:
            raise UserError("teacher and critic: a run has one of them; set critic=none or teacher=none")
        super().__init__(policy, algorithm, optim, temperature, num_rollouts, seed)
        self.teacher = teacher
        teacher.attach(policy)
        self.read: TokenBatch | None = None  # what the teacher reads, row by row of the rollout
        self.beyond = False  # whether a token outside of the mask is learned from
        self.divergence: Tensor | None = None  # [B, C] of the latest pass that learns, with gradient
        self.parts = Means()  # of the two parts, in the latest update
        self.seconds = 0.0  # of the teacher, in this rollout

    @property
    def rollouts(self) -> Rollouts:
        """What made the rollout that is learned from."""
        return next(c.rollouts for c in self.trainer.callbacks if isinstance(c, RolloutCallback))

    @cached_property
    def teacher_layout(self) -> tuple[Layout, str]:
        """The layout that gives correct results for the teacher's model, and its kernel."""
        with self.teacher.model() as model:
            return trusted(model, self.optim.layout)

    # -- before the updates

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> dict[str, float]:
        """Give every token its weight in each part, then learn from the rollout."""
        batch.tokens, self.seconds = self.assigned(batch), 0.0
        metrics = super().training_step(batch, batch_idx)
        return metrics | ({"time/teacher": self.seconds} if self.algorithm.teacher.coef else {})

    def assigned(self, batch: RolloutBatch) -> TokenBatch:
        """Return the rows of a rollout, and the demonstrations, with the weight of each token in the two other parts."""
        of, teaching = self.algorithm.imitation, self.algorithm.teacher
        tokens, given = self.teacher.extended(batch.tokens, batch, self.rollouts)
        group = tokens.sample // batch.scores.rewards.shape[1]
        tokens = replace(tokens, row=torch.arange(len(tokens), device=tokens.ids.device), group=group)
        given = torch.zeros_like(tokens.mask) if given is None else given
        observed = self.observed(tokens, batch) & ~given if of.observed else torch.zeros_like(given)
        self.read, judged = self.teacher.reading(tokens, batch, self.rollouts)
        taught = tokens.mask if judged is None else tokens.mask & judged[:, None]
        texts = given | observed
        self.beyond = bool(texts.any())
        if self.beyond:  # a text has no temperature of sampling
            own = torch.zeros_like(tokens.rollout_logprobs) if tokens.temperature is None else tokens.temperature
            tokens = replace(tokens, temperature=torch.where(texts, 1.0, own))
        return replace(
            tokens,
            imitation=of.sampled * tokens.mask + of.observed * observed + of.given * given,
            teaching=teaching.coef * taught if teaching.coef else None,
        )

    def observed(self, tokens: TokenBatch, batch: RolloutBatch) -> Tensor:
        """Return which tokens the environment wrote after the policy's first one, [B, C]."""
        return tokens.attention_mask[:, tokens.prompt_width :].bool() & ~tokens.mask & (tokens.mask.cumsum(1) > 0)

    def freeze(self, tokens: TokenBatch) -> TokenBatch:
        """Add what stays fixed while the policy changes, the teacher's log-probabilities among it."""
        tokens, teaching = super().freeze(tokens), self.algorithm.teacher
        if tokens.teaching is None or teaching.of_distributions:
            return tokens
        with self.timed():
            judged = self.judged(tokens)
        return teaching.fixed(replace(tokens, teacher_logprobs=judged))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds of this block to those of the teacher. A GPU works on when its calls return, so it is waited for."""
        begun = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - begun

    @torch.no_grad()
    def judged(self, tokens: TokenBatch) -> Tensor:
        """Return the teacher's log-probabilities, [B, C], 0 on tokens that it does not judge."""
        logprobs = torch.zeros_like(tokens.rollout_logprobs)
        rows = (tokens.teaching > 0).any(1).nonzero()[:, 0]
        read = replace(self.read, mask=tokens.teaching > 0)
        with self.teacher.model() as model:
            layout = self.teacher_layout
            for indices, microbatch in self.microbatches(read, rows):  # as many on every rank, as a sharded policy needs
                width = microbatch.completion_width
                numbers, _ = one_pass(model, completion_logprobs, microbatch, self.temperature, False, *layout)
                logprobs[indices, :width] = numbers
        return logprobs

    def live(self, tokens: TokenBatch) -> Tensor:
        """Return the indices of the rows that have a gradient in any part, [n], in the host's memory."""
        live = torch.zeros(len(tokens), dtype=torch.bool)
        if self.algorithm.policy_coef:
            live[super().live(tokens)] = True
        for weights in (tokens.imitation, tokens.teaching):
            if weights is not None:
                live |= weights.any(dim=1).cpu()
        return live.nonzero()[:, 0]

    # -- one update

    def update(self, minibatch: TokenBatch, means: Means, count: float) -> Tensor:
        logprobs = super().update(minibatch, means, count)
        self.teacher.moved()
        return logprobs

    def weighed(self, minibatch: TokenBatch, count: float) -> TokenBatch:
        """Turn the weights of the two parts into shares of the loss of an update."""
        minibatch = super().weighed(minibatch, count)
        imitation, teaching = (
            torch.zeros_like(minibatch.weights) if weights is None else weights
            for weights in (minibatch.imitation, minibatch.teaching)
        )
        imitation = imitation * self.shares(imitation > 0, "token", minibatch, count)
        if self.algorithm.teacher.coef:
            teaching = teaching * self.shares(teaching > 0, self.algorithm.teacher.reduce, minibatch, count)
            minibatch = replace(minibatch, teaching=teaching)
        return replace(minibatch, imitation=imitation)

    def shares(self, members: Tensor, reduce, minibatch: TokenBatch, count: float) -> Tensor:
        """Return each member's share in a part of the loss, [B, C]. Gradients of ranks are averaged."""
        settings = reduce, self.algorithm.max_tokens, minibatch.sample, distributed.all_sum, count
        return token_weights(members, *settings) * distributed.world_size()

    def gradients(self, minibatch: TokenBatch, alpha: float) -> tuple[Tensor, Means]:
        """Add the gradients of all parts. Returns the log-probabilities, [B, C], and metrics."""
        self.parts = Means()
        logprobs, noted = super().gradients(minibatch, alpha)
        noted.take(self.parts)
        return logprobs, noted

    def scored(self, tokens: TokenBatch) -> TokenBatch:
        """Return the tokens with a mask of all that are learned from, in any part."""
        if not self.beyond or tokens.imitation is None:
            return tokens
        mask = tokens.mask | (tokens.imitation > 0)
        return replace(tokens, mask=mask, host=tokens.host and replace(tokens.host, mask=mask.cpu()))

    def forward_pass(self, model: nn.Module, tokens: TokenBatch, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [B, C] each. In a pass that learns, distributions are compared, too."""
        scored, teaching = self.scored(tokens), self.algorithm.teacher
        if not (torch.is_grad_enabled() and model is self.policy and teaching.coef and teaching.of_distributions):
            return super().forward_pass(model, scored, entropy_gradient)
        members = torch.zeros_like(tokens.mask) if tokens.teaching is None else tokens.teaching > 0
        read = replace(self.read.rows(tokens.row.cpu()), mask=members)
        own = any(p.requires_grad for p in self.policy.get_output_embeddings().parameters())
        with self.timed(), self.teacher.model() as teacher, torch.no_grad():
            copied = own and teacher is self.policy
            judge = one_pass(teacher, distributions, read, copied, *self.teacher_layout)
        learns = bool(self.algorithm.policy_coef or self.algorithm.imitation.active)  # else the log-probabilities are only shown
        lesson, settings = (judge, members, teaching, learns), (self.temperature, entropy_gradient, *self.layout)
        logprobs, entropy, values = one_pass(model, partial(logprobs_and_divergence, lesson), scored, *settings)
        self.divergence = torch.zeros_like(tokens.rollout_logprobs).masked_scatter(members, values)
        return logprobs, entropy

    def loss_of(
        self, logprobs: Tensor, entropy: Tensor, microbatch: TokenBatch, alpha: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a microbatch, and numbers to log, [B, C] each."""
        teaching, old = self.algorithm.teacher, self.algorithm.old_logprobs(microbatch)
        if microbatch.teaching is not None:
            D = self.divergence if teaching.of_distributions else teaching.of_sampled(logprobs, old, microbatch)
            microbatch = replace(microbatch, divergence=teaching.capped(D, logprobs, old))
            self.parts.add_tokens("teacher/divergence", D.detach(), microbatch.teaching > 0)
        if microbatch.imitation is not None:
            self.parts.add_tokens("imitation/loss", -logprobs.detach(), microbatch.imitation > 0)
        return super().loss_of(logprobs, entropy, microbatch, alpha)


def distributions(model: nn.Module, batch: TokenBatch, copied: bool, layout: Layout, kernel: str) -> Distributions:
    """Return what the teacher predicts at each token of the mask. copied: it needs its own head, see `with_own_head`."""
    states = states_before(model.get_decoder(), batch, layout, kernel)
    return Distributions(with_own_head(model) if copied else model, states)


def logprobs_and_divergence(
    lesson: tuple[Distributions, Tensor, Teaching, bool],
    model: nn.Module,
    batch: TokenBatch,
    temperature: float,
    entropy_gradient: bool,
    layout: Layout,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `completion_logprobs` does, and the divergence of n tokens, [n]. lesson: the teacher, its n tokens as a mask
    [B, C], how the two are compared, and whether the log-probabilities need a gradient."""
    teacher, members, teaching, learns = lesson
    states, ids = states_before(model.get_decoder(), batch, layout, kernel), batch.ids[:, batch.prompt_width :]
    with torch.set_grad_enabled(learns):
        heat = temperatures(batch, temperature, packed=True)
        values = token_values(model, states, ids[batch.mask], heat, entropy_gradient)
    nothing = torch.zeros_like(batch.rollout_logprobs)
    logprobs, entropy = (nothing.masked_scatter(batch.mask, of_tokens) for of_tokens in values)
    of_members = replace(batch, mask=members, host=batch.host and replace(batch.host, mask=members.cpu()))
    heat = temperatures(of_members, temperature, packed=True)
    student = Distributions(model, states[members[batch.mask]])
    return logprobs, entropy, divergences(student, teacher, ids[members], heat, teaching.of_words)
