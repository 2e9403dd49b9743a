"""Checks of runs with a teacher or with texts to imitate: it reads the policy's tokens, its numbers are those of its model, it
knows such texts, and there are texts. They are made only if the run has a choice of conf/teacher."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from grpo.models.temperature import temperatures
from grpo.models.token_scores import divided
from grpo.objectives.batch import TokenBatch
from grpo.preflight.probe import Checked, Probe, judged
from grpo.system.distributed import computes_in
from grpo.system.output.words import plural

NO_TEACHER = Checked("SKIP", "algo.teacher.coef=0: no divergence to a teacher")
HEATS = [n / 20 for n in range(2, 61)]  # temperatures that are tried as the cause of a difference


def tokenizer(probe: Probe) -> Checked:
    """The teacher's tokenizer gives each token the same number as the policy's, and the teacher reads the tokens that were
    sampled."""
    if not (module := probe.module).algorithm.teacher.coef:
        return NO_TEACHER
    tokens = probe.assigned(probe.few)
    ours, theirs = (x.ids[:, x.prompt_width :] for x in (tokens, module.read))
    sampled = tokens.teaching > 0
    other = int((ours != theirs)[sampled].sum()) if ours.shape == theirs.shape else int(sampled.sum())
    if other:
        text = f"{other} of {int(sampled.sum())} tokens that the teacher reads are not those that were sampled"
        return Checked("FAIL", text, "it would judge another text, or one that is moved by a token: please report this")
    text, model = f"it reads the {plural(int(sampled.sum()), 'token')} that were sampled", model_of(probe)
    if model is None or probe.tokenizer is None:
        return Checked("PASS", f"{text}; it has no tokenizer of its own")
    mine, its = probe.tokenizer.get_vocab(), model.tokenizer().get_vocab()
    wrong = [word for word in mine.keys() | its.keys() if mine.get(word) != its.get(word)]
    text += f"; {len(wrong)} of {len(mine)} entries of the vocabularies differ"
    remedy = f"another tokenizer, for example at {min(wrong, default='')!r}: take a teacher of the policy's family"
    return judged(not wrong, text, remedy)


def model_of(probe: Probe):
    """Return the settings of the teacher's own model; None if it has none here."""
    return getattr(probe.module.teacher, "pretrained", None)


def numbers(probe: Probe) -> Checked:
    """The teacher's numbers in the update are those of its own forward pass over each row alone. If not, the cause is looked for:
    another temperature, or a mask that is off by one."""
    module, of = probe.module, probe.module.algorithm.teacher
    if not of.coef:
        return NO_TEACHER
    tokens = probe.assigned(probe.few)
    members = tokens.teaching > 0
    tokens, read = replace(tokens, mask=members), replace(module.read, mask=members)
    if of.of_distributions:
        with torch.enable_grad():
            module.forward_pass(module.policy, tokens, False)
        measured = module.divergence.detach()[members]
    else:
        measured = module.judged(tokens)[members]
    try:
        with module.teacher.model() as model:
            theirs, eps = predicted(model, read, module.temperature), torch.finfo(computes_in(model)).eps
    except NotImplementedError:  # a server, or several models
        return of_a_server(probe, tokens, measured)
    ours = predicted(module.policy, tokens, module.temperature) if of.of_distributions else theirs
    targets = tokens.ids[:, tokens.prompt_width :][members]

    def at(heat: float) -> Tensor:
        """Return the numbers of a teacher at `heat` times the run's temperature, [n]."""
        words = (theirs / heat).log_softmax(-1)
        return of.of_words(ours, words, targets) if of.of_distributions else words.gather(1, targets[:, None])[:, 0]

    return verdict(measured, at, max(probe.bound, 8 * eps if eps > 1e-6 else 0.0), module.temperature)


@torch.no_grad()
def predicted(model: nn.Module, rows: TokenBatch, temperature: float) -> Tensor:
    """Return the log-probabilities of the vocabulary at each sampled token, [n, V], from each row alone without padding."""
    found = []
    for i in range(len(rows)):
        one = rows.rows(slice(i, i + 1))
        given = {"input_ids": one.ids, "attention_mask": one.attention_mask, "use_cache": False}
        logits = model(**given, logits_to_keep=one.completion_width + 1).logits[0, :-1][one.mask[0]]  # [c, V]
        found.append(divided(logits.float(), temperatures(one, temperature, packed=True)).log_softmax(-1))
    return torch.cat(found)


def verdict(measured: Tensor, at: Callable[[float], Tensor], bound: float, temperature: float) -> Checked:
    """Compare the teacher's numbers in the update, [n], with those that it should have, and name the cause of a difference.
    at: the right numbers, at a multiple of the run's temperature. bound: in nats."""
    right = at(1.0)
    gap = float((measured - right).abs().mean())
    text = f"{plural(len(right), 'token')} in the update and each row alone: mean gap {gap:.1e}, bound {bound:.1e}"
    if gap <= bound:
        return Checked("PASS", text)
    causes = {f"they are those of temperature {heat:g}": at(heat / temperature) for heat in HEATS}
    causes |= {f"they are those of the token {where}": right.roll(k) for where, k in (("before", 1), ("after", -1))}
    apart = {cause: float((measured - other).abs().median()) for cause, other in causes.items()}
    cause = min(apart, key=apart.__getitem__)
    known = apart[cause] <= max(bound, gap / 20)
    return Checked("FAIL", text, cause if known else "look at the teacher's layout, dtype and temperature")


def of_a_server(probe: Probe, tokens: TokenBatch, measured: Tensor) -> Checked:
    """The numbers of a teacher without a model here are finite, none is above 0, and asked again they are the same."""
    again = probe.module.judged(tokens)[tokens.mask]
    apart = 0.0 if probe.module.algorithm.teacher.of_distributions else float((again - measured).abs().mean())
    good = bool(again.isfinite().all() and measured.isfinite().all() and (again <= 1e-3).all()) and apart <= 0.05
    text = f"{plural(len(measured), 'token')}: asked twice, {apart:.1e} nats apart; no model here to compare with"
    return judged(good, text, "the teacher's numbers are no log-probabilities, or change: look at its options")


def knows(probe: Probe) -> Checked:
    """The teacher finds the policy's samples likely: a model that does worse than chance knows another language, template or
    tokenizer. The median token counts, since a sure teacher may find single tokens very unlikely."""
    if not (module := probe.module).algorithm.teacher.coef:
        return NO_TEACHER
    count, tokens = len(probe.compared), probe.assigned(probe.compared)
    members = (tokens.teaching > 0)[:count]
    theirs, ours = module.judged(tokens)[:count][members], probe.passed[0][members]
    chance = -math.log(module.policy.config.get_text_config().vocab_size)
    if not len(theirs):
        return Checked(
            "WARN", "the teacher judges none of these rows", "it needs what these samples lack: see its conf file"
        )
    means = f"mean {theirs.mean():.2f}, median {theirs.median():.2f} nats"
    text = f"it gives the policy's samples {means}, the policy {ours.mean():.2f}, uniform guessing {chance:.2f}"
    foreign = bool(theirs.median() < chance / 2 < ours.median())
    if not foreign and theirs.mean() >= ours.mean() - 2:
        return Checked("PASS", text)
    remedy = "a model without training, of another template, task or vocabulary: try it with eval.py model.path=FOLDER"
    return Checked("FAIL" if foreign else "WARN", text, remedy)


def texts(probe: Probe) -> Checked:
    """There are tokens of each kind that algo.imitation weighs, and most texts that are imitated are right."""
    module, of = probe.module, probe.module.algorithm.imitation
    if not of.active:
        return Checked("SKIP", "algo.imitation is 0: no text to imitate")
    module.assigned(batch := probe.batch(probe.tokens))
    tokens, given = module.teacher.extended(probe.tokens, batch, probe.rollouts)
    given = torch.zeros_like(tokens.mask) if given is None else given
    counts = {"sampled": tokens.mask, "observed": module.observed(tokens, batch) & ~given, "given": given}
    counts = {name: int(members.sum()) for name, members in counts.items() if getattr(of, name)}
    right = sum(bool(sample.reward.correct) for sample in probe.samples) / len(probe.samples)
    text = ", ".join(f"{plural(count, 'token')} {name}" for name, count in counts.items())
    if missing := [name for name, count in counts.items() if not count]:
        why = {"observed": "the environment says nothing after the policy's first token", "given": "no demonstration"}
        return Checked("FAIL", text, f"algo.imitation.{missing[0]} is above 0, but {why.get(missing[0], 'nothing')}")
    if not of.sampled or module.algorithm.policy_coef or right >= 0.5:
        return Checked("PASS", text)
    remedy = "most of what is imitated is wrong: look at the demonstrations, or keep the right samples (selection)"
    return Checked("WARN", f"{text}; {right:.0%} of the samples are right", remedy)
