"""The second and the third part of equation 1: cross-entropy with a text, and the divergence to a teacher.

S is the policy (the student), T the teacher; both are distributions over the vocabulary at one token, at the temperature of the
run. A token with weight 0 in a part is in neither its sum nor its denominator, so no part dilutes another.

A divergence is a function whose parameters name its arguments, and which may have settings of its own (a node with `_partial_`):

- with `student` or `teacher`, the log-probabilities [n, V] of n tokens, it compares distributions and returns [n]: OF_WORDS.
- with `logprobs` or `ratio` it is of the sampled tokens, and returns [B, C]: OF_SAMPLED.
- with neither, it returns advantages A [B, C] of all rows of a rollout, once before the updates. The divergence is then -rho A.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from grpo.objectives.arguments import call, function_of, lacking, named, parameters
from grpo.objectives.batch import TokenBatch
from grpo.objectives.loss import LARGEST_LOG_RATIO, Reduce
from grpo.objectives.trial import random_batch, tried
from grpo.system.errors import UserError
from grpo.system.ranges import Count, FunctionName, NonNegative, Positive, Share, enforced


@enforced("Imitation")
@dataclass(frozen=True)
class Imitation:
    """Weights of the cross-entropy with a token, by who wrote it.

    sampled: whoever played the rollout: the policy, a teacher, the data. observed: the environment, after the policy's first
    token (ECHO, arXiv 2605.24517). given: the demonstration of the example, beside the samples (teacher=rows). reduce: as in
    `token_weights`: "sequence" is the mean of each demonstration, so that a long one counts as much as a short one.
    """

    sampled: NonNegative = 0.0
    observed: NonNegative = 0.0
    given: NonNegative = 0.0
    reduce: Reduce = "token"

    needs_old = False

    def __post_init__(self) -> None:
        vars(self).update(reduce=function_of("imitation.reduce", self.reduce, Reduce))

    @property
    def active(self) -> bool:
        """Whether any token has a weight."""
        return bool(self.sampled or self.observed or self.given)

    of_logprobs = active

    def tried(self) -> None:
        """Do nothing: it has no function."""

    def check_age(self, a: Any, cause: str) -> None:
        """Do nothing: whoever wrote a text, it is learned as it is."""


# -- divergences of the sampled tokens: their expected gradient over samples of S is that of KL(S || T)


def sampled(logprobs: Tensor, teacher_logprobs: Tensor, ratio: Tensor) -> Tensor:
    """-rho A with the advantage A = log T(y) - log S(y), detached (MOPD, arXiv 2601.02780). Without the detachment the teacher
    would leave the gradient."""
    return -ratio * (teacher_logprobs - logprobs).detach()


# -- divergences of distributions: n tokens, V entries; log-probabilities, with gradient in `student`


def forward(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(T || S), [n]: covers what the teacher does."""
    return kl(teacher, student)


def reverse(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(S || T), [n]: avoids what the teacher would not do."""
    return kl(student, teacher)


def jsd(student: Tensor, teacher: Tensor, beta: Share = 0.5) -> Tensor:
    """beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S, [n] (GKD, arXiv 2306.13649). Its two ends are
    forward (beta 0) and reverse (1), which it does not approach: for a small beta it is about beta times forward."""
    if beta in (0, 1):
        return reverse(student, teacher) if beta else forward(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of finite log-probabilities, [n]. p, q: [n, V]."""
    return (p.exp() * (p - q)).sum(-1)


def coarse(logprobs: Tensor, kept: Tensor, tail: bool) -> Tensor:
    """Return the log-probabilities of fewer entries: the kept ones, [n, k], and with a tail all others as one more; without,
    the kept ones alone, renormalised. logprobs: [n, V]; kept: indices, [n, k]."""
    some = logprobs.gather(-1, kept)
    if not tail:
        return some - some.logsumexp(-1, keepdim=True)
    if kept.shape[-1] == logprobs.shape[-1]:
        return some
    # not 1 less the kept mass, which rounds to nothing where few entries hold nearly all of it
    others = logprobs.scatter(-1, kept, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([some, others], dim=-1)


# a function's parameters may name these; `logprobs` and `teacher_logprobs` are of the sampled tokens
OF_WORDS = "student", "teacher", "logprobs", "teacher_logprobs", "beta"  # [n, V], [n, V], [n], [n]
OF_SAMPLED = "logprobs", "ratio", "teacher_logprobs", "rollout_logprobs", "mask", "sample", "group"  # [B, C], [B]
NAMED = {"sampled": sampled, "forward": forward, "reverse": reverse, "jsd": jsd}
Divergence = Literal["sampled", "forward", "reverse", "jsd"] | FunctionName


@enforced("Teaching")
@dataclass(frozen=True)
class Teaching:
    """The third part of equation 1, coef times a divergence from the policy to a teacher, on the tokens that the policy sampled.

    jsd_beta: of jsd. top_k: the entries that are compared, the largest of top_of; None: all. tail: see `coarse`. cap: most of the
    ratio policy / old policy, detached, by which the divergence of a token is multiplied (SDPO, arXiv 2601.20802); None: no
    ratio. reduce: as in `token_weights`.
    """

    coef: NonNegative = 0.0
    divergence: Divergence = "sampled"
    jsd_beta: Share = 0.5
    top_k: Count | None = None
    top_of: Literal["student", "teacher"] = "student"
    tail: bool = True
    cap: Positive | None = None
    reduce: Reduce = "token"

    def __post_init__(self) -> None:
        function = function_of("teacher.divergence", self.divergence, Divergence)
        reduce = function_of("teacher.reduce", self.reduce, Reduce)
        vars(self).update(divergence=NAMED.get(function, function), reduce=reduce)
        offered = OF_WORDS if self.of_distributions else OF_SAMPLED
        for name in lacking("teacher.divergence", self.divergence, offered):
            line = f"needs {name!r}; available are only: {', '.join(offered)}"
            raise UserError(f"{named('teacher.divergence', self.divergence)} {line}")
        if self.top_k and not self.of_distributions:
            line = "compares sampled tokens, not distributions: take forward, reverse or jsd, or top_k=null"
            raise UserError(f"Teaching.top_k={self.top_k}, but the divergence {line}")
        if self.cap and (self.of_rollouts or "ratio" in parameters(self.divergence)):
            raise UserError(f"Teaching.cap={self.cap}, but the divergence has the ratio already: set cap=null")

    @property
    def active(self) -> bool:
        """Whether it has a weight."""
        return bool(self.coef)

    @property
    def of_logprobs(self) -> bool:
        """Whether it has a gradient in the log-probabilities of the sampled tokens."""
        return self.active and not self.of_distributions

    @property
    def needs_old(self) -> bool:
        """Whether it needs the old policy, for a ratio."""
        return bool(self.cap or not self.of_distributions)

    @property
    def of_distributions(self) -> bool:
        """Whether the divergence compares distributions."""
        return bool({"student", "teacher"} & parameters(self.divergence).keys())

    @property
    def needs_samples(self) -> bool:
        """Whether the divergence needs tokens that the policy has sampled."""
        return bool({"logprobs", "rollout_logprobs"} & parameters(self.divergence).keys())

    @property
    def of_rollouts(self) -> bool:
        """Whether the function returns advantages, which do not change with the policy."""
        return not {"student", "teacher", "logprobs", "ratio"} & parameters(self.divergence).keys()

    def fixed(self, batch: TokenBatch) -> TokenBatch:
        """Add what stays fixed in the updates of a rollout: -A in place of the divergence, if the function is `of_rollouts`."""
        return replace(batch, divergence=-self.called(batch)) if self.of_rollouts else batch

    def of_sampled(self, logprobs: Tensor, old_logprobs: Tensor, batch: TokenBatch) -> Tensor:
        """Return the divergence of each sampled token, [B, C]. logprobs: with gradient; old_logprobs: see `Algorithm`."""
        ratio = (logprobs - old_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
        return batch.divergence * ratio if self.of_rollouts else self.called(batch, logprobs=logprobs, ratio=ratio)

    def tried(self) -> None:
        """Raise UserError for a divergence that fails on random distributions, or has the same gradient for every teacher."""
        name, gradients = named("teacher.divergence", self.divergence), []
        for seed in (1, 2):
            (z, batch), theirs = random_batch(), torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
            teacher = theirs[:, 0].sigmoid().log().view(2, 3)
            batch = replace(batch, teaching=torch.ones(2, 3), teacher_logprobs=teacher)
            words = (z.view(6, 1) * torch.arange(4)).log_softmax(-1), theirs.log_softmax(-1), torch.arange(6) % 4
            shape = (6,) if self.of_distributions else (2, 3)
            values = tried(name, partial(self.on_trial, z, batch, words), shape)
            gradients += torch.autograd.grad(values.sum(), z) if values.requires_grad else [torch.zeros(())]
        if torch.allclose(*gradients):
            line = "log policy - log teacher is an advantage, as in `sampled`, and no loss"
            raise UserError(f"{name} has the same gradient for every teacher: {line}")

    def check_age(self, a: Any, cause: str) -> None:
        """Raise UserError if samples of an older policy count as the policy's own."""
        takes = parameters(self.divergence).keys()
        if self.of_distributions and "logprobs" not in takes:
            return
        weighed = bool(self.cap or self.of_rollouts or "ratio" in takes)
        if not weighed or a.old_policy != "rollout":
            line = "the divergence takes the samples as the policy's own, and Algorithm.correction does not weigh it"
            ratio = "Algorithm.old_policy=rollout" + ("" if weighed else " Teaching.cap=2")
            raise UserError(f"{cause}: {line}: set {ratio}, or a divergence of distributions")

    def on_trial(self, logprobs: Tensor, batch: TokenBatch, words: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the divergence of a batch that nothing was added to, or of words."""
        if self.of_distributions:
            return self.of_words(*words)
        return self.of_sampled(logprobs, batch.old_logprobs, self.fixed(batch))

    def called(self, batch: TokenBatch, **more: Tensor) -> Tensor:
        """Return what the function makes of the sampled tokens, [B, C]."""
        offered = {name: getattr(batch, name) for name in OF_SAMPLED[2:]} | {"mask": batch.teaching > 0}
        return call("teacher.divergence", self.divergence, offered | more)

    def of_words(self, student: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        """Return the divergence of n tokens, [n]. student, teacher: finite log-probabilities [n, V]; targets: the tokens, [n]."""
        own, theirs = (each.gather(-1, targets[:, None])[:, 0] for each in (student, teacher))
        if self.top_k:
            best = student.detach() if self.top_of == "student" else teacher
            kept = best.topk(min(self.top_k, best.shape[-1]), dim=-1).indices
            student, teacher = coarse(student, kept, self.tail), coarse(teacher, kept, self.tail)
        offered = {"student": student, "teacher": teacher, "beta": self.jsd_beta}
        offered |= {"logprobs": own, "teacher_logprobs": theirs}
        return call("teacher.divergence", self.divergence, offered)

    def capped(self, divergence: Tensor, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        """Return the divergence, [B, C], times the capped ratio."""
        if self.cap is None:
            return divergence
        return divergence * (logprobs - old_logprobs).detach().exp().clamp(max=self.cap)
