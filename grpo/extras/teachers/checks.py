"""Checks of runs with a teacher or with texts to imitate: it has the policy's tokenizer, its numbers are those of its model, it
finds the policy's samples likely, and there are texts. Each is a function of the preflight's probe, see `UpdatePart.checks`."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from grpo.extras.teachers.server import Served
from grpo.models.pretrained import differing_tokens
from grpo.models.temperature import temperatures
from grpo.models.token_scores import divided
from grpo.objectives.batch import TokenBatch
from grpo.system.distributed import computes_in
from grpo.system.errors import UserError, plural

Verdict = tuple[str, ...]  # the result, the numbers that were compared, and what to do about them
HEATS = [n / 20 for n in range(2, 61)]  # temperatures that are tried as the cause of a difference
NO_DIVERGENCE = "SKIP", "algo.teacher.coef=0: no divergence to a teacher"
NONE_TAUGHT = "SKIP", "no row of the probe has what the teacher reads: see teacher/rows"


def tokenizer(probe: Any) -> Verdict:
    """The teacher's tokenizer gives each token the same number as the policy's."""
    if probe.tokenizer is None or (model := getattr(teacher_of(probe), "pretrained", None)) is None:
        return ("SKIP", "the teacher has no tokenizer of its own here")
    ours, theirs = probe.tokenizer.get_vocab(), model.tokenizer().get_vocab()
    wrong = differing_tokens(ours, theirs)
    remedy = f"another tokenizer, for example at {min(wrong, default='')!r}: take a teacher of the policy's family"
    return _verdict(not wrong, f"{len(wrong)} of {len(ours)} entries of the vocabularies differ", remedy)


def own_numbers(probe: Any) -> Verdict:
    """The teacher's log-probabilities in the update, or the divergence to its distributions, are those of its own pass over each
    row alone. If not, the cause is looked for: another temperature, or a mask that is off by one."""
    module, lessons = probe.module, probe.module.parts["teacher"]
    if lessons.model is None:
        return ("SKIP", "no model of a teacher in this process")
    of, tokens = lessons.teaching, probe.assigned(probe.few)
    members = tokens.teaching > 0
    if not members.any():
        return NONE_TAUGHT
    tokens, read = (replace(rows, mask=members) for rows in (tokens, lessons.reads))
    if of.of_distributions:
        module.forward_pass(module.policy, tokens, False)
    measured = lessons.read.detach() if of.of_distributions else lessons.logprobs(tokens)[members]
    with lessons.teacher.model() as model:
        theirs, eps = predicted(model, read, module.temperature), torch.finfo(computes_in(model)).eps
    ours, targets = predicted(module.policy, tokens, module.temperature), tokens.ids[:, tokens.prompt_width :][members]

    def at(heat: float) -> Tensor:
        """Return the numbers of a teacher at this temperature, [n]."""
        words = (theirs * module.temperature / heat).log_softmax(-1)
        return of.of_words(ours, words, targets) if of.of_distributions else words.gather(1, targets[:, None])[:, 0]

    right, bound = at(module.temperature), max(probe.bound, 8 * eps if eps > 1e-6 else 0.0)
    gap = float((measured - right).abs().mean())
    causes = {f"they are those of temperature {heat:g}": at(heat) for heat in HEATS}
    causes |= {f"they are those of the token {where}": right.roll(k) for where, k in (("before", 1), ("after", -1))}
    apart = {cause: float((measured - other).abs().median()) for cause, other in causes.items()}
    cause = min(apart, key=apart.__getitem__)
    remedy = (
        cause if apart[cause] <= max(bound, gap / 20) else "look at what it reads, its temperature, layout and dtype"
    )
    text = f"{plural(len(right), 'token')} in the update and each row alone: mean gap {gap:.1e}, bound {bound:.1e}"
    return _verdict(gap <= bound, text, remedy)


def _verdict(good: bool, compared: str, remedy: str) -> Verdict:
    """Return PASS or FAIL."""
    return ("PASS", compared) if good else ("FAIL", compared, remedy)


@torch.no_grad()
def predicted(model: nn.Module, rows: TokenBatch, temperature: float) -> Tensor:
    """Return the log-probabilities of the vocabulary at each sampled token, [n, V], from each row alone without padding."""
    found, place = [], rows.ids.device
    rows = rows.to(next(model.parameters()).device)
    for i in range(len(rows)):
        one = rows.rows(slice(i, i + 1))
        given = {"input_ids": one.ids, "attention_mask": one.attention_mask, "use_cache": False}
        logits = model(**given, logits_to_keep=one.completion_width + 1).logits[0, :-1][one.mask[0]]  # [c, V]
        found.append(divided(logits.float(), temperatures(one, temperature, packed=True)).log_softmax(-1))
    return torch.cat(found).to(place)


def knows(probe: Any) -> Verdict:
    """The teacher finds the policy's samples likely: a model that does worse than chance knows another language, template or
    tokenizer. The median token counts, since a sure teacher may find single tokens very unlikely."""
    module, lessons = probe.module, probe.module.parts["teacher"]
    if not lessons.teaching.coef:
        return NO_DIVERGENCE
    count, tokens = len(probe.compared), probe.assigned(probe.compared)
    members = (tokens.teaching > 0)[:count]
    if not members.any():
        return NONE_TAUGHT
    theirs, ours = lessons.logprobs(tokens)[:count][members], probe.passed[0][members]
    chance = -math.log(module.policy.config.get_text_config().vocab_size)
    means = f"mean {theirs.mean():.2f}, median {theirs.median():.2f} nats"
    text = f"it gives the policy's samples {means}, the policy {ours.mean():.2f}, uniform guessing {chance:.2f}"
    foreign = bool(theirs.median() < chance / 2 < ours.median())
    if not foreign and theirs.mean() >= ours.mean() - 2:
        return ("PASS", text)
    remedy = "a model without training, of another template, task or vocabulary: try it with eval.py model.path=FOLDER"
    return ("FAIL" if foreign else "WARN", text, remedy)


def longest(probe: Any) -> Verdict:
    """The teacher reads the longest row that an answer can make of the probe's prompts; each server is asked for one, as the run
    will ask."""
    if not (lessons := probe.module.parts["teacher"]).teaching.coef:
        return NO_DIVERGENCE
    tokens = probe.assigned(probe.tokens)
    if not (tokens.teaching > 0).any():
        return NONE_TAUGHT
    rows, answer = lessons.reads.sequences(), probe.rollouts.plan.sampling.max_tokens
    prompt, said = max(rows, key=lambda row: len(row[0]))
    most = max(len(prompt) + answer, max(len(p) + len(c) for p, c in rows))
    ids = [*prompt, *islice(cycle(said or prompt), most - len(prompt))]
    for teacher in getattr(lessons.teacher, "teachers", {"": lessons.teacher}).values():
        text = f"the longest row has {most} tokens, and the teacher reads {teacher.limit or 'any number of'}"
        if most > (teacher.limit or most):
            return ("FAIL", text, "lower max_tokens or prompt_limit.max_tokens, or take a teacher with more context")
        if isinstance(teacher, Served):
            try:
                teacher.try_row(ids)
            except UserError as error:
                return ("FAIL", text, str(error))
            text += f"; each server scores one, with the {teacher.pool.top} likeliest entries of each token"
    return ("PASS", text)


def imitated(probe: Any) -> Verdict:
    """There are texts that algo.imitation weighs, and most samples that are imitated are right."""
    of, tokens = probe.module.parts["teacher"].imitation, probe.assigned(probe.tokens)
    if not of.active:
        return ("SKIP", "algo.imitation is 0: no text to imitate")
    others = int(((tokens.imitation > 0) & (tokens.turn < 0)).sum())
    samples, rollouts = probe.samples, probe.rollouts
    if play := getattr(rollouts.selection, "play", None):  # of demonstrations, in place of samples
        shown = replace(rollouts, play=play).one_round(
            rollouts.plan.num_rollouts, probe.rows, range(len(probe.rows)), 1
        )
        samples = [sample for group in shown for sample in group]
    right = sum(bool(sample.reward.correct) for sample in samples) / len(samples)
    text = f"{plural(others, 'token')} of other texts; {right:.0%} of {plural(len(samples), 'answer')} to imitate are right"
    if (of.observed or of.given) and not others:
        causes = "the environment says nothing after the policy's first token, and there is no demonstration"
        return ("FAIL", text, f"algo.imitation.{'observed' if of.observed else 'given'} weighs nothing: {causes}")
    if not of.sampled or probe.module.algorithm.policy_coef or right >= 0.5:
        return ("PASS", text)
    remedy = "most of what is imitated is wrong: look at the demonstrations, or keep the right samples (selection)"
    return ("WARN", text, remedy)


def teacher_of(probe: Any) -> Any:
    """Return the teacher of the run."""
    return probe.module.parts["teacher"].teacher


CHECKS: dict[str, Callable[[Any], Verdict]] = {
    "the teacher reads the same tokens": tokenizer,
    "the teacher's numbers are its own": own_numbers,
    "the teacher knows these texts": knows,
    "the teacher reads the longest row": longest,
    "the texts to learn from are there": imitated,
}
