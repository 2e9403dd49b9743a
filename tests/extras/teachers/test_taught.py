"""Three parts of one loss: each with a denominator of its own, whatever the layout, microbatches, order and padding."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.learning import ADVANTAGES, GROUPS, fresh, rollout
from helpers.models import disturb
from helpers.taught import learned, other_model, same, taught
from peft import LoraConfig

from grpo.extras.teachers.distillation import iw_opd, topd, vopd
from grpo.extras.teachers.kinds import Start, Teacher
from grpo.extras.teachers.teaching import forward, jsd, reverse
from grpo.models import head
from grpo.models.policy import with_adapter
from grpo.models.pretrained import Pretrained
from grpo.rollout.collate import collate

DIVERGENCES = {
    "sampled": {},
    "forward": {"divergence": "forward"},
    "reverse": {"divergence": "reverse", "cap": 2.0},
    "jsd": {"divergence": "jsd", "jsd_beta": 0.3},
    "top_k": {"divergence": "jsd", "top_k": 5},
    "iw_opd": {"divergence": iw_opd},
    "vopd": {"divergence": vopd},
    "topd": {"divergence": topd},
}


@pytest.fixture(scope="module")
def teacher(toy, tmp_path_factory) -> str:
    return other_model(toy, tmp_path_factory.mktemp("teacher"))


def rows_of(model, temperature: float = 1.0):
    """Yield the log-probabilities [c, V] of each row alone, and its sampled tokens [c]."""
    for sample in (each for group in GROUPS for each in group):
        turn = sample.turns[0]
        first = len(turn.prompt_ids) - 1
        ids = torch.tensor([turn.prompt_ids + turn.completion.ids])
        yield (model(ids).logits[0, first:-1] / temperature).log_softmax(-1), ids[0, first + 1 :]


def naive(policy, teacher, name: str) -> torch.Tensor:
    """Return the divergence of each of the 10 tokens, by a formula on whole distributions."""
    found = []
    for (S, y), (T, _) in zip(rows_of(policy), rows_of(teacher), strict=True):
        at = range(len(y)), y
        own, judged = S[at], T.detach()[at]
        if name == "sampled":
            found.append(-own * (judged - own).detach())
        elif name == "iw_opd":  # every token was sampled with a log-probability of -0.5
            a, total, before = judged + 0.5, (judged + 0.5).abs().sum(), 0.0
            for t in range(len(y)):
                found.append(-own[t : t + 1] * a[t] * (1.5 - 0.5 * before / total))
                before = before + a[t].abs()
        elif name == "vopd":
            A = judged - own + (S.exp() * (S - T)).sum(-1)
            found.append(-own * A.detach())
        else:
            function = {"forward": forward, "reverse": reverse, "jsd": partial(jsd, beta=0.3)}[name]
            found.append(function(S, T.detach()))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "shared_prompt") for name in ["sampled", "forward", "reverse", "jsd", "iw_opd", "vopd"]),
        *((name, "padded") for name in ["sampled", "reverse"]),
    ],
)
def test_the_first_update_follows_the_gradient_worked_by_autograd(toy, teacher, layout, name):
    policy = fresh(toy)
    loss = naive(policy, Pretrained(teacher).model(), name).mean()
    value = float(loss.detach())
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    expected = {key: p.detach() - 0.1 * g for (key, p), g in zip(policy.named_parameters(), gradients, strict=True)}
    found, metrics = learned(taught(fresh(toy), teacher, layout=layout, **DIVERGENCES[name]), rollout())
    same(expected, found)
    if name in ("forward", "reverse", "jsd"):
        assert metrics["teacher/divergence"] == pytest.approx(value, rel=1e-4)
    assert metrics["loss/grad_norm"] > 0.1


def expected_after(toy, loss_of) -> dict[str, torch.Tensor]:
    """Return the weights after one step of 0.1 against the gradient of a loss, which is made of the policy."""
    policy = fresh(toy)
    gradients = torch.autograd.grad(loss_of(policy), list(policy.parameters()))
    return {key: p.detach() - 0.1 * g for (key, p), g in zip(policy.named_parameters(), gradients, strict=True)}


SHARES = {  # of the 10 tokens: rows of 2, 1, 4 and 3, with at most 4 tokens
    "sequence": [1 / 8] * 2 + [1 / 4] + [1 / 16] * 4 + [1 / 12] * 3,
    "sum": [1 / 4] * 10,
    "constant": [1 / 16] * 10,
}


@pytest.mark.parametrize("by", SHARES)
def test_divergences_are_reduced_as_the_teacher_says_whatever_the_policy_does(toy, teacher, by):
    def loss(policy):
        return (naive(policy, Pretrained(teacher).model(), "forward") * torch.tensor(SHARES[by])).sum()

    found, _ = learned(taught(fresh(toy), teacher, by=by, divergence="forward"), rollout())
    same(expected_after(toy, loss), found)


def test_answers_that_were_cut_off_teach_nothing_where_they_are_left_out(toy, teacher):
    """The last row, of 3 tokens, was cut off: the mean is over the other 7, in the teacher's part and in the text's."""
    made = rollout()
    cut = replace(made, scores=replace(made.scores, truncated=torch.tensor([[False, False], [False, True]])))
    kept = {"mask_truncated": True}
    found, _ = learned(taught(fresh(toy), teacher, divergence="forward", **kept), cut)
    same(expected_after(toy, lambda policy: naive(policy, Pretrained(teacher).model(), "forward")[:7].mean()), found)
    made = rollout()
    cut = replace(made, scores=replace(made.scores, truncated=torch.tensor([[False, False], [False, True]])))
    found, _ = learned(taught(fresh(toy), Teacher(), imitation={"sampled": 1.0}, coef=0.0, **kept), cut)

    def text(policy):
        return -torch.cat([S[range(len(y)), y] for S, y in rows_of(policy)])[:7].mean()

    same(expected_after(toy, text), found)


CUTS = {
    "one": {},
    "single rows": {"max_tokens_per_microbatch": 1},
    "packed, cut": {"layout": "packed", "max_tokens_per_microbatch": 11},
    "padded": {"layout": "padded"},
}


QUICK = ("sampled", "reverse", "topd")  # one of each kind


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in DIVERGENCES])
def test_rows_may_be_cut_padded_and_ordered_in_any_way(toy, teacher, name, monkeypatch):
    settings = {"imitation": {"sampled": 0.1}, "policy_coef": 0.5, **DIVERGENCES[name]}
    several = {"num_minibatches": 2, "num_epochs": 2, "lr": 0.01}
    cuts = [learned(taught(fresh(toy), teacher, **settings, **several, **cut), rollout()) for cut in CUTS.values()]
    for weights, metrics in cuts[1:]:
        same(cuts[0][0], weights)
        assert metrics["teacher/divergence"] == pytest.approx(cuts[0][1]["teacher/divergence"], rel=1e-4, abs=1e-6)
    once, metrics = learned(taught(fresh(toy), teacher, **settings), rollout())
    assert metrics["loss/grad_norm"] > 0.1
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", 1)  # one token in a chunk
    turned = rollout(groups=GROUPS[::-1], rewards=ADVANTAGES.flip(0))
    same(once, learned(taught(fresh(toy), teacher, **settings), turned)[0])
    tokens = collate(GROUPS)
    of_tokens = {key: value for key, value in vars(tokens).items() if getattr(value, "ndim", 0) == 2}
    wide = {key: F.pad(value, (3 * (key in ("ids", "attention_mask")), 2)) for key, value in of_tokens.items()}
    padded = rollout(tokens=replace(tokens, **wide))
    same(once, learned(taught(fresh(toy), teacher, **settings), padded)[0])


def second_alone(rewards: torch.Tensor) -> torch.Tensor:
    """Return advantages that the first group lacks, as one without a spread does that is divided by it."""
    return torch.stack([torch.full_like(rewards[0], torch.nan), rewards[1]])


@pytest.mark.parametrize("name", ["sampled", "reverse", "iw_opd"])
def test_a_teacher_needs_no_advantage(toy, teacher, name):
    """A group without advantages is in the teacher's part all the same, and not with a log-probability of 0."""
    whole, _ = learned(taught(fresh(toy), teacher, **DIVERGENCES[name]), rollout())
    found, _ = learned(taught(fresh(toy), teacher, advantage=second_alone, **DIVERGENCES[name]), rollout())
    same(whole, found)


def test_the_seconds_of_a_teacher_are_those_of_one_rollout(toy, teacher):
    module = taught(fresh(toy), teacher)
    module.parts["teacher"].seconds = 1e6  # in the rollout before
    _, metrics = learned(module, rollout())
    assert 0 < metrics["time/teacher"] < 1e6


def test_a_teacher_inside_of_the_policy_keeps_its_own_head(toy):
    """An adapter learns on the head, too; the teacher is the policy without it. Its distributions are those of the start."""
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"])
    torch.manual_seed(0)
    untied = fresh(toy)  # an adapter on a head that is the embedding, too, is refused
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    policy = with_adapter(untied, adapter)
    disturb(policy, seed=1, size=0.1)
    expected = naive(policy, fresh(toy), "forward").mean()
    assert expected > 0.01
    _, metrics = learned(taught(policy, Start(), divergence="forward"), rollout())
    assert metrics["teacher/divergence"] == pytest.approx(float(expected.detach()), rel=1e-4)


def test_the_parts_do_not_dilute_each_other(toy, teacher):
    """The gradient of all parts is the sum of their gradients, each with its coefficient."""

    def change(**settings) -> dict[str, torch.Tensor]:
        found, start = (
            learned(taught(fresh(toy), teacher if settings.get("coef", 1) else Teacher(), **settings), rollout())[0],
            dict(fresh(toy).named_parameters()),
        )
        return {name: p - start[name].detach() for name, p in found.items()}

    nothing, whole = {"coef": 0.0}, {"divergence": "reverse"}
    parts = [
        change(policy_coef=1.0, **nothing),
        change(imitation={"sampled": 1.0}, **nothing),
        change(**whole),
    ]
    every = change(policy_coef=2.0, imitation={"sampled": 0.5}, coef=3.0, **whole)
    for name, moved in every.items():
        policy, text, divergence = (part[name] for part in parts)
        torch.testing.assert_close(moved, 2 * policy + 0.5 * text + 3 * divergence, atol=1e-6, rtol=0)
