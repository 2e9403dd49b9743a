"""Lessons: a text and a teacher as a part of the update. Before the update, every token gets its weight in each term of equation
1; in the update, a teacher scores the tokens that the policy learns from.

Each term has a denominator of its own, over all ranks and microbatches of an update.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from grpo.extras.teachers.checks import CHECKS
from grpo.extras.teachers.demonstrations import Beside, Demonstrations
from grpo.extras.teachers.divergence import Distributions, Predicted, divergences
from grpo.extras.teachers.kinds import Passes, Teacher
from grpo.extras.teachers.observed import observed
from grpo.extras.teachers.teaching import Imitation, Teaching
from grpo.models.logprobs import Layout
from grpo.models.packing import with_host
from grpo.models.states import Reader, states_before
from grpo.models.temperature import temperatures
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.batch import TokenBatch
from grpo.objectives.loss import token_weights
from grpo.rollout.rollouts import Rollouts
from grpo.system import distributed
from grpo.system.errors import UserError
from grpo.system.memory import sent
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.meter import Means
from grpo.training.module import GRPOModule
from grpo.training.parts import UpdatePart

NO_TEXT, NO_TEACHING = Imitation(), Teaching()  # of an algorithm without these terms
FROZEN = ("rollout_logprobs", "old_logprobs", "reference_logprobs")  # on the policy's own tokens


class Lessons(UpdatePart):
    """Learns from a text and from a teacher, as the algorithm weighs them. Mutable: what belongs to the rollout."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.reads: TokenBatch | None = None  # what the teacher reads, row by row of the rollout
        self.prepared = False  # whether the teacher has been asked to prepare for the rollout
        self.of_policy: Tensor | None = None  # [B, 1], see `factors`
        self.seen: Tensor | None = None  # [B, C] the divergence of each token in the latest update; NaN: none
        self.seconds = 0.0  # of the teacher, in this rollout
        self.beside = Demonstrations()  # plays those of held-out rows, if `teacher` shows some beside the samples

    def attach(self, module: GRPOModule) -> None:
        self.module = module
        self.teacher.check(self.teaching, module.temperature)
        self.teacher.attach(module.policy)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the module."""
        return self.module.algorithm

    @property
    def imitation(self) -> Imitation:
        """The weights of texts; all are 0 if the algorithm has no such term."""
        return self.algorithm.imitation or NO_TEXT

    @property
    def teaching(self) -> Teaching:
        """The teacher's term; its weight is 0 if the algorithm has none."""
        return self.algorithm.teacher or NO_TEACHING

    def shared(self) -> None:
        if start := getattr(self.teacher, "start", None):
            start.begin()

    def close(self) -> None:
        """Called when the run is over."""
        getattr(self.teacher, "close", lambda: None)()

    @property
    def rollouts(self) -> Rollouts:
        """The maker of the rollout that is learned from."""
        return next(c.rollouts for c in self.module.trainer.callbacks if isinstance(c, RolloutCallback))

    @property
    def passes(self) -> Passes:
        """How the teacher reads."""
        module = self.module
        return Passes(module.temperature, module.optim.layout, module.at_once.most, self.teaching.top_k)

    def state_dict(self) -> dict[str, Any]:
        return self.teacher.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.teacher.load_state_dict(state)

    # -- before the updates

    def assign(self, tokens: TokenBatch, batch: RolloutBatch) -> TokenBatch:
        """Return the rows of a rollout, and the demonstrations, with the weight of each token in the two other terms."""
        of, teaching, self.seconds = self.imitation, self.teaching, 0.0
        self.forget()
        with self.timed():  # it may wait for answers
            tokens, given = self.teacher.extended(tokens, batch, self.rollouts)
        group = tokens.sample // batch.scores.rewards.shape[1]
        tokens = replace(tokens, row=torch.arange(len(tokens), device=tokens.ids.device), group=group)
        self.seen = torch.full_like(tokens.rollout_logprobs, torch.nan)
        given = torch.zeros_like(tokens.mask) if given is None else given
        observed = self.observed(tokens, batch) & ~given if of.observed else torch.zeros_like(given)
        self.reads, read = self.teacher.reading(tokens, batch, self.rollouts)
        sampled = tokens.mask
        if self.algorithm.mask_truncated:
            sampled = sampled & ~batch.scores.truncated.flatten().to(sampled.device)[tokens.sample, None]
        taught = sampled if read is None else sampled & read[:, None]
        if read is not None:
            kept, rows = distributed.all_sum(torch.stack([read, torch.ones_like(read)]).float().sum(1))
            batch.metrics["teacher/rows"] = float(kept / rows)
        texts = given | observed
        if texts.any():  # a text has no temperature of sampling
            own = torch.zeros_like(tokens.rollout_logprobs) if tokens.temperature is None else tokens.temperature
            tokens = replace(tokens, temperature=torch.where(texts, 1.0, own))
        if not self.algorithm.policy_coef and not teaching.coef:  # nobody asks how probable its sampler found a token
            tokens = replace(tokens, fresh=torch.zeros_like(tokens.sample, dtype=torch.bool))
        policy, imitation, teacher = (self.factors(term, tokens, batch) for term in ("policy", "imitation", "teacher"))
        weights, self.of_policy = of.sampled * sampled + of.observed * observed + of.given * given, policy
        tokens = replace(
            tokens,
            mask=tokens.mask & (policy > 0),
            imitation=imitation * weights if of.active else None,
            teaching=teacher * teaching.coef * taught if teaching.coef else None,
        )
        if tokens.teaching is not None and teaching.of_distributions:
            self.reads = with_host(replace(self.reads, mask=tokens.teaching > 0, scored=None))
        return tokens

    def forget(self) -> None:
        """Drop what the teacher keeps of a rollout."""
        self.prepared = False
        self.teacher.forget()

    def factors(self, term: str, tokens: TokenBatch, batch: RolloutBatch) -> Tensor:
        """Return the factor of each row in a term of the loss, by the column `source` of its example, [B, 1]."""
        by, size = self.algorithm.by_source, batch.scores.rewards.shape[1]
        if not by:
            return torch.ones_like(tokens.rollout_logprobs[:, :1])
        of_groups = [by.get(str(example.get("source")), {}).get(term, 1.0) for example in batch.scores.examples]
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
        """Add the teacher's log-probabilities of the sampled tokens, unless whole distributions are compared."""
        if tokens.teaching is None or self.teaching.of_distributions:
            return tokens
        with self.timed():
            logprobs = self.logprobs(tokens)
        return self.teaching.fixed(replace(tokens, teacher_logprobs=logprobs))

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the seconds of this block to those of the teacher; on a GPU those until its calls return."""
        begun = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun

    @torch.no_grad()
    def logprobs(self, tokens: TokenBatch) -> Tensor:
        """Return the teacher's log-probabilities, [B, C], 0 on tokens that it does not read."""
        return self.teacher.logprobs(replace(self.reads, mask=tokens.teaching > 0, host=None), self.passes)

    # -- one update

    def weigh(self, minibatch: TokenBatch, count: float) -> TokenBatch:
        """Turn the weights of the two terms into shares of the loss of an update."""
        if self.algorithm.by_source and minibatch.row is not None:  # else one that `assign` has not seen
            minibatch = replace(minibatch, weights=minibatch.weights * self.of_policy[minibatch.row])
        of, teaching = self.imitation, self.teaching
        for name, active, reduce in (("imitation", of.active, of.reduce), ("teaching", teaching.coef, teaching.reduce)):
            if active:  # on every rank, since they count together; a rank without a row has no weights
                weights = getattr(minibatch, name)
                weights = torch.zeros_like(minibatch.weights) if weights is None else weights
                rows = minibatch.sample, count, minibatch.group
                shares = token_weights(weights > 0, reduce, self.algorithm.max_tokens, *rows, total=distributed.all_sum)
                # gradients of ranks are averaged
                minibatch = replace(minibatch, **{name: weights * shares * distributed.world_size()})
        return minibatch

    def reader(self, tokens: TokenBatch) -> Reader | None:
        """Return what compares distributions at the tokens of the teacher's term. The teacher makes its pass here."""
        if not (self.teaching.coef and self.teaching.of_distributions):
            return None
        if self.reads is None:
            raise UserError("replay= cannot repeat an update with whole distributions: it has no rows for the teacher")
        host = tokens.host or tokens  # the host does not wait for the device in a microbatch
        members = (torch.zeros_like(host.mask) if host.teaching is None else host.teaching > 0).cpu()
        with self.timed(), torch.no_grad():
            if not self.prepared:
                self.teacher.prepare(self.reads, self.passes)
                self.prepared = True
            read = self.reads.rows(host.row.cpu())
            beside = read.host and replace(read.host, mask=members)
            read = replace(read, mask=sent(members, read.ids.device), host=beside)
            predicted = self.teacher.distributions(read, self.passes)
        return partial(divergence_at, predicted, members, self.module.temperature, self.teaching.of_words)

    def term(self, microbatch: TokenBatch, logprobs: Tensor, means: Means) -> TokenBatch:
        """Add the divergence to the teacher, with gradient."""
        teaching, old = self.teaching, self.algorithm.old_logprobs(microbatch)
        if microbatch.teaching is not None:
            taught = microbatch.teaching > 0
            if teaching.of_distributions:
                D = torch.zeros_like(microbatch.rollout_logprobs).masked_scatter(taught, self.read)
            else:
                D = teaching.of_sampled(logprobs, old, microbatch)
            microbatch = replace(microbatch, divergence=teaching.capped(D, logprobs, old))
            means.add_tokens("teacher/divergence", D.detach(), taught)
            if self.seen is not None:  # a replayed update has no rollout
                place = microbatch.row, slice(D.shape[1])
                found = D.detach().where(taught, torch.nan).where(taught.any(1, keepdim=True), self.seen[place])
                self.seen[place] = found  # not by a mask as an index, for which the host would wait
            for name, rows in self.teacher.by_name(microbatch.row).items():
                means.add_tokens(f"teacher/{name}/divergence", D.detach(), taught & rows[:, None])
        if microbatch.imitation is not None:
            means.add_tokens("imitation/loss", -logprobs.detach(), microbatch.imitation > 0)
        if microbatch.scored is not None:  # finite in the policy's term, where a text has the weight 0
            names = [name for name in FROZEN if getattr(microbatch, name) is not None]
            text = {name: torch.where(microbatch.mask, getattr(microbatch, name), logprobs.detach()) for name in names}
            microbatch = replace(microbatch, **text)
        return microbatch

    def moved(self) -> None:
        self.teacher.moved()

    def learned(self, batch: RolloutBatch) -> dict[str, float]:
        """Return the seconds of the teacher, and the loss on held-out demonstrations if an evaluation follows; the samples' table
        gets the divergences."""
        metrics = {}
        if self.shows:
            metrics = self.shows.held_out(self.module, self.rollouts, batch.rollout + 1, self.imitation.reduce)
        if self.teaching.coef:
            self.forget()
            batch.tokens = replace(batch.tokens, divergence=self.seen)
            metrics["time/teacher"] = self.seconds
        return metrics

    @property
    def shows(self) -> Demonstrations | None:
        """The player of the demonstrations that the policy sees in place of samples or beside them; None if it sees none."""
        chosen = getattr(self.rollouts, "selection", None)
        if isinstance(chosen, Demonstrations):
            return chosen
        return self.beside if isinstance(self.teacher, Beside) else None

    # -- the preflight, and the forecast of memory

    checks = CHECKS

    @property
    def model(self) -> nn.Module | None:
        """The model of the teacher, if one computes in this process; None if it is elsewhere, or if there are several."""
        if self.teaching.coef:
            with suppress(NotImplementedError), self.teacher.model() as model:
                return model
        return None

    @cached_property
    def outline(self) -> nn.Module | None:
        """That model, asked once: tensors without memory cannot be moved again."""
        return self.model

    def models(self) -> list[nn.Module]:
        return [] if self.outline is None else [self.outline]

    def own(self, phase: str = "") -> list[Tensor]:
        return self.teacher.own(phase)

    def imagined(self, batch: TokenBatch, layout: Layout) -> Reader | None:
        if self.outline is None:
            return None
        with torch.no_grad():
            predicted = Distributions(self.outline, states_before(self.outline.get_decoder(), batch, layout))
        settings = predicted, batch.mask, self.module.temperature, self.teaching.of_words
        return partial(divergence_at, *settings) if self.teaching.of_distributions else None


def divergence_at(
    teacher: Predicted,
    members: Tensor,
    temperature: float,
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    model: nn.Module,
    states: Tensor,
    batch: TokenBatch,
) -> Tensor:
    """Return the divergence of n tokens, [n]. teacher: what it predicts there; members: which tokens they are, [B, C], in the
    host's memory; function: see `divergences`; states: [m, hidden], before each token of the batch's mask, which has them and
    maybe others."""
    host, device = batch.host or batch, batch.ids.device
    of_members = replace(batch, mask=members, host=batch.host and replace(batch.host, mask=members))
    heat = temperatures(of_members, temperature, packed=True)
    # indices and not a mask: the forecast's states have no memory, so that a mask would not say how many it takes
    student = Distributions(model, states[sent(members[host.mask.cpu()].nonzero()[:, 0], device)])
    targets = sent(host.ids.cpu()[:, batch.prompt_width :][members], device)
    return divergences(student, teacher, targets, heat, function)


def Taught(*given: Any, teacher: Teacher, **named: Any) -> GRPOModule:
    """Return the update with a teacher, by the name that configurations of earlier runs have."""
    return GRPOModule(*given, **named, parts={"teacher": Lessons(teacher)})
