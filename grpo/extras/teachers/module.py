"""Taught: the update with all three parts of equation 1. Before the update, every token gets its weight in each part; in the
update, a teacher scores the tokens that the policy learns from.

Each part has a denominator of its own, over all ranks and microbatches of an update.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from grpo.extras.critic.model import states_before
from grpo.extras.teachers.divergence import Distributions, Predicted, divergences
from grpo.extras.teachers.kinds import Passes, Teacher
from grpo.extras.teachers.observed import observed
from grpo.extras.teachers.teaching import Teaching
from grpo.models.head import token_values
from grpo.models.logprobs import Layout
from grpo.models.packed_attention import Kernel
from grpo.models.temperature import temperatures
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import TokenBatch
from grpo.objectives.loss import token_weights
from grpo.rollout.rollouts import Rollouts
from grpo.system import distributed
from grpo.system.distributed import one_pass
from grpo.system.errors import UserError
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.meter import Means
from grpo.training.module import GRPOModule
from grpo.training.optimization import Optimization

FROZEN = ("rollout_logprobs", "old_logprobs", "reference_logprobs")  # on the policy's own tokens


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
        teacher.check(algorithm.teacher, temperature)
        teacher.attach(policy)
        self.teacher = teacher
        self.read: TokenBatch | None = None  # what the teacher reads, row by row of the rollout
        self.of_policy: Tensor | None = None  # [B, 1], see `factors`
        self.beyond = False  # whether a token outside of the mask is learned from
        self.divergence: Tensor | None = None  # [B, C] of the latest pass that learns, with gradient
        self.parts = Means()  # of the two parts, in the latest update
        self.seen: Tensor | None = None  # [B, C] the divergence of each token in the latest update; NaN: none
        self.seconds = 0.0  # of the teacher, in this rollout

    @property
    def rollouts(self) -> Rollouts:
        """The maker of the rollout that is learned from."""
        return next(c.rollouts for c in self.trainer.callbacks if isinstance(c, RolloutCallback))

    @property
    def passes(self) -> Passes:
        """How the teacher reads."""
        return Passes(self.temperature, self.optim.layout, self.at_once.most, self.algorithm.teacher.top_k)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["teacher"] = self.teacher.state_dict()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        super().on_load_checkpoint(checkpoint)
        self.teacher.load_state_dict(checkpoint.get("teacher", {}))

    # -- before the updates

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> dict[str, float]:
        """Give every token its weight in each part, then learn from the rollout."""
        batch.tokens, self.seconds = self.assigned(batch), 0.0
        metrics = super().training_step(batch, batch_idx)
        if not self.algorithm.teacher.coef:
            return metrics
        batch.tokens = replace(batch.tokens, divergence=self.seen)
        return metrics | {"time/teacher": self.seconds}

    def assigned(self, batch: RolloutBatch) -> TokenBatch:
        """Return the rows of a rollout, and the demonstrations, with the weight of each token in the two other parts."""
        of, teaching = self.algorithm.imitation, self.algorithm.teacher
        tokens, given = self.teacher.extended(batch.tokens, batch, self.rollouts)
        group = tokens.sample // batch.scores.rewards.shape[1]
        tokens = replace(tokens, row=torch.arange(len(tokens), device=tokens.ids.device), group=group)
        self.seen = torch.full_like(tokens.rollout_logprobs, torch.nan)
        given = torch.zeros_like(tokens.mask) if given is None else given
        observed = self.observed(tokens, batch) & ~given if of.observed else torch.zeros_like(given)
        self.read, judged = self.teacher.reading(tokens, batch, self.rollouts)
        sampled = tokens.mask
        if self.algorithm.mask_truncated:
            sampled = sampled & ~batch.scores.truncated.flatten().to(sampled.device)[tokens.sample, None]
        taught = sampled if judged is None else sampled & judged[:, None]
        if judged is not None:
            kept, rows = distributed.all_sum(torch.stack([judged, torch.ones_like(judged)]).float().sum(1))
            batch.metrics["teacher/rows"] = float(kept / rows)
        texts = given | observed
        if texts.any():  # a text has no temperature of sampling
            own = torch.zeros_like(tokens.rollout_logprobs) if tokens.temperature is None else tokens.temperature
            tokens = replace(tokens, temperature=torch.where(texts, 1.0, own))
        if not self.algorithm.policy_coef and not teaching.coef:  # nobody asks how probable its sampler found a token
            tokens = replace(tokens, fresh=torch.zeros_like(tokens.sample, dtype=torch.bool))
        policy, imitation, teacher = (self.factors(part, tokens, batch) for part in ("policy", "imitation", "teacher"))
        weights, self.of_policy = of.sampled * sampled + of.observed * observed + of.given * given, policy
        return replace(
            tokens,
            mask=tokens.mask & (policy > 0),
            imitation=imitation * weights if of.active else None,
            teaching=teacher * teaching.coef * taught if teaching.coef else None,
        )

    def factors(self, part: str, tokens: TokenBatch, batch: RolloutBatch) -> Tensor:
        """Return the factor of each row in a part of the loss, by the column `source` of its example, [B, 1]."""
        by, size = self.algorithm.by_source, batch.scores.rewards.shape[1]
        if not by:
            return torch.ones_like(tokens.rollout_logprobs[:, :1])
        of_groups = [by.get(str(example.get("source")), {}).get(part, 1.0) for example in batch.scores.examples]
        return torch.tensor(of_groups, device=tokens.ids.device)[tokens.sample // size, None]

    def observed(self, tokens: TokenBatch, batch: RolloutBatch) -> Tensor:
        """Return which tokens the environment wrote after the policy's first one, [B, C]."""
        size = batch.scores.rewards.shape[1]
        mask, found, every = observed(tokens, batch.groups, size, self.rollouts.renderer)
        found, every = distributed.all_sum(torch.tensor([found, every], dtype=torch.float32, device=mask.device))
        if every:
            batch.metrics["imitation/found"] = float(found / every)
        return mask

    def freeze(self, tokens: TokenBatch) -> TokenBatch:
        """Add what stays fixed while the policy changes, the teacher's log-probabilities among it."""
        teaching, self.beyond = self.algorithm.teacher, any_beyond(tokens)
        tokens = replace(super().freeze(self.scored(tokens)), mask=tokens.mask, host=tokens.host)
        if tokens.teaching is None or teaching.of_distributions:
            return tokens
        with self.timed():
            judged = self.judged(tokens)
        return teaching.fixed(replace(tokens, teacher_logprobs=judged))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds of this block to those of the teacher; on a GPU those until its calls return."""
        begun = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun

    @torch.no_grad()
    def judged(self, tokens: TokenBatch) -> Tensor:
        """Return the teacher's log-probabilities, [B, C], 0 on tokens that it does not judge."""
        return self.teacher.logprobs(replace(self.read, mask=tokens.teaching > 0), self.passes)

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
        minibatch, self.beyond = super().weighed(minibatch, count), any_beyond(minibatch)
        if self.algorithm.by_source and minibatch.row is not None:  # else one that `assigned` has not seen
            minibatch = replace(minibatch, weights=minibatch.weights * self.of_policy[minibatch.row])
        of, teaching = self.algorithm.imitation, self.algorithm.teacher
        for name, active, reduce in (("imitation", of.active, "token"), ("teaching", teaching.coef, teaching.reduce)):
            if active:  # on every rank, since they count together; a rank without a row has no weights
                weights = getattr(minibatch, name)
                weights = torch.zeros_like(minibatch.weights) if weights is None else weights
                settings = reduce, self.algorithm.max_tokens, minibatch.sample, distributed.all_sum, count
                shares = token_weights(weights > 0, *settings)
                # gradients of ranks are averaged
                minibatch = replace(minibatch, **{name: weights * shares * distributed.world_size()})
        return minibatch

    def gradients(self, minibatch: TokenBatch, alpha: float) -> tuple[Tensor, Means]:
        """Add the gradients of all parts. Returns the log-probabilities, [B, C], and metrics."""
        self.parts = Means()
        logprobs, noted = super().gradients(minibatch, alpha)
        noted.take(self.parts)
        return logprobs, noted

    def scored(self, tokens: TokenBatch) -> TokenBatch:
        """Return the tokens with a mask of all that are learned from, in any part."""
        parts = [weights > 0 for weights in (tokens.imitation, tokens.teaching) if weights is not None]
        if not self.beyond or not parts:
            return tokens
        mask = torch.stack([tokens.mask, *parts]).any(0)
        return replace(tokens, mask=mask, host=tokens.host and replace(tokens.host, mask=mask.cpu()))

    def forward_pass(self, model: nn.Module, tokens: TokenBatch, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, [B, C] each. In a pass that learns, distributions are compared, too."""
        scored, teaching = self.scored(tokens), self.algorithm.teacher
        if not (torch.is_grad_enabled() and model is self.policy and teaching.coef and teaching.of_distributions):
            return super().forward_pass(model, scored, entropy_gradient)
        members = torch.zeros_like(tokens.mask) if tokens.teaching is None else tokens.teaching > 0
        if self.read is None:
            raise UserError("replay= cannot repeat an update with whole distributions: it has no rows for the teacher")
        read = replace(self.read.rows(tokens.row.cpu()), mask=members)
        with self.timed(), torch.no_grad():
            judge = self.teacher.distributions(read, self.passes)
        # in other parts of the loss, or in none, which has a gradient of 0; else the log-probabilities are only shown
        learns = bool(self.algorithm.policy_coef or self.algorithm.imitation.active or tokens.teaching is None)
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
            taught = microbatch.teaching > 0
            self.parts.add_tokens("teacher/divergence", D.detach(), taught)
            if self.seen is not None:  # a replayed update has no rollout
                kept = taught.any(1)
                self.seen[microbatch.row[kept], : D.shape[1]] = D.detach().where(taught, torch.nan)[kept]
            for name, rows in self.teacher.by_name(microbatch.row).items():
                self.parts.add_tokens(f"teacher/{name}/divergence", D.detach(), taught & rows[:, None])
        if microbatch.imitation is not None:
            self.parts.add_tokens("imitation/loss", -logprobs.detach(), microbatch.imitation > 0)
        if self.beyond:  # finite in the policy's part, where a text has the weight 0
            names = [name for name in FROZEN if getattr(microbatch, name) is not None]
            text = {name: torch.where(microbatch.mask, getattr(microbatch, name), logprobs.detach()) for name in names}
            microbatch = replace(microbatch, **text)
        loss, logged = super().loss_of(logprobs, entropy, microbatch, alpha)
        if not self.algorithm.policy_coef and not teaching.coef:  # of texts, no policy that sampled can be left
            logged = {name: values for name, values in logged.items() if name != "ratio"}
            logged["approx_kl"] = torch.zeros_like(logged["approx_kl"])
        return loss, logged


def any_beyond(tokens: TokenBatch) -> bool:
    """Return whether a token outside of the mask is learned from: a text, or a sample without a reward or an advantage."""
    parts = [weights for weights in (tokens.imitation, tokens.teaching) if weights is not None]
    return any(bool(((weights > 0) & ~tokens.mask).any()) for weights in parts)


def logprobs_and_divergence(
    lesson: tuple[Predicted, Tensor, Teaching, bool],
    model: nn.Module,
    batch: TokenBatch,
    temperature: float,
    entropy_gradient: bool,
    layout: Layout,
    kernel: Kernel | None,
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
