"""Divergences to a teacher, on one token of two words: S = (1/2, 1/2), T = (3/4, 1/4). The numbers were worked by hand."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import preset

from grpo.extras.teachers.distillation import discounted, iw_opd, topd, vopd
from grpo.extras.teachers.server import Likeliest
from grpo.extras.teachers.teaching import Imitation, Teaching, coarse, forward, jsd, reverse, sampled
from grpo.objectives.trial import random_batch
from grpo.system.errors import UserError

TEACHER = torch.tensor([0.75, 0.25]).log()


def gradient(loss_of) -> tuple[float, ...]:
    z = torch.zeros(2, requires_grad=True)
    loss_of(z.log_softmax(-1)).backward()
    return tuple(z.grad.tolist())


@pytest.mark.parametrize(
    ("divergence", "value"), [(forward, 0.13081), (reverse, 0.14384), (lambda s, t: jsd(s, t, 0.5), 0.03382)]
)
def test_divergences_of_the_toy(divergence, value):
    assert divergence(torch.tensor([0.5, 0.5]).log(), TEACHER).item() == pytest.approx(value, abs=1e-5)


def test_the_sampled_divergence_has_the_gradient_of_the_reverse_one():
    exact = gradient(lambda s: reverse(s, TEACHER))
    assert exact == pytest.approx((-0.27465, 0.27465), abs=1e-5)

    def expected(s):  # over both words, each with probability 1/2
        return sum(0.5 * sampled(s[y], TEACHER[y], (s[y] - s[y].detach()).exp()) for y in (0, 1))

    assert gradient(expected) == pytest.approx(exact, abs=1e-5)


def test_an_advantage_has_no_gradient_of_its_own():
    """At one token d(-rho A) / d log S = -A = -ln 1.5. With a gradient of A it would be 1 - ln 1.5, whose mean is no other."""
    logprob = torch.tensor(0.5).log().requires_grad_()
    sampled(logprob, TEACHER[0], (logprob - logprob.detach()).exp()).backward()
    assert logprob.grad.item() == pytest.approx(-math.log(1.5), abs=1e-6)


def test_the_ratio_of_a_divergence_is_capped_and_has_no_gradient():
    """Ratios 5 and 1/2, at most 2: a divergence of 3 becomes 6 and 1.5."""
    logprobs = torch.tensor([[5.0, 0.5]]).log().requires_grad_()
    divergence = torch.full((1, 2), 3.0, requires_grad=True)
    found = Teaching(divergence="reverse", cap=2.0).capped(divergence, logprobs, torch.zeros(1, 2))
    assert found.tolist() == [pytest.approx([6.0, 1.5])]
    of_ratio, of_divergence = torch.autograd.grad(found.sum(), (logprobs, divergence), allow_unused=True)
    assert of_ratio is None and of_divergence.tolist() == [pytest.approx([2.0, 0.5])]


def test_few_entries_and_a_tail():
    student, teacher = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.6, 0.2, 0.2]]).log()
    assert reverse(student, teacher).item() == pytest.approx(0.03048, abs=1e-5)

    def of(k, tail):
        return Teaching(1.0, "reverse", top_k=k, tail=tail).of_words(student, teacher, torch.zeros(1).long()).item()

    assert of(1, True) == pytest.approx(0.02041, abs=1e-5)
    assert of(2, False) == pytest.approx(0.03810, abs=1e-5)
    assert of(1, False) == 0
    assert coarse(student, torch.tensor([[0]]), True).exp()[0].tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("k", "value", "slope"), [(1, 13.7576, (0.5, -1 / 6, -1 / 6, -1 / 6)), (2, 13.8317, (0.5, -0.3, -0.1, -0.1))]
)
def test_a_certain_student_learns_from_the_tail(k, value, slope):
    """Logits (30, 0, 0, 0): of k = 1 the tail has 3 e^-30, and D = ln(1/2) + (30 - ln 3) / 2; of k = 2, D =
    0.5 ln 0.5 + 0.3 (30 + ln 0.3) + 0.2 (30 + ln 0.1). The gradient is S - T, that of the
    tail shared among its words. 1 less the kept mass would be 0 in float32."""
    z, teacher = torch.tensor([[30.0, 0, 0, 0]], requires_grad=True), torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    D = Teaching(1.0, "forward", top_k=k, top_of="teacher").of_words(z.log_softmax(-1), teacher, torch.zeros(1).long())
    assert D.item() == pytest.approx(value, abs=1e-4)
    assert torch.autograd.grad(D, z)[0][0].tolist() == pytest.approx(slope, abs=1e-6)


def test_all_entries_leave_no_tail():
    student, teacher = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.6, 0.2, 0.2]]).log()
    for k in (3, 5):
        found = Teaching(1.0, "reverse", top_k=k).of_words(student, teacher, torch.zeros(1).long())
        assert found.item() == pytest.approx(0.03048, abs=1e-5)


def test_what_a_server_leaves_out_shares_the_rest():
    """Two of five words are listed, 0.5 and 0.3: the others have 0.2 / 3 each. Where all are certain they have 1e-7 / 3."""
    listed = torch.tensor([[0.5, 0.3], [0.9, 0.1]]).log()
    whole = Likeliest(torch.tensor([[1, 3], [4, 0]]), listed, 5).logprobs(slice(None), 1.0, 5).exp()
    third = 0.2 / 3
    assert whole[0].tolist() == pytest.approx([third, 0.5, third, 0.3, third])
    assert whole[1].tolist() == pytest.approx([0.1, 0, 0, 0, 0.9], abs=1e-6) and 2e-8 < whole[1, 1] < 5e-8
    padded = Likeliest(
        torch.tensor([[2, 5]]), torch.tensor([[math.log(0.6), -1e4]]), 5
    )  # one entry where others have two
    assert padded.logprobs(slice(None), 1.0, 5).exp()[0].tolist() == pytest.approx([0.1, 0.1, 0.6, 0.1, 0.1])


@pytest.mark.parametrize("gap", [21.0, 89.0, 500.0])
def test_a_ratio_of_a_divergence_is_bounded(gap):
    logprobs, batch = random_batch()
    batch = replace(batch, teaching=torch.ones(2, 3), teacher_logprobs=batch.rollout_logprobs)
    logprobs = (batch.old_logprobs + gap).detach().requires_grad_()
    D = Teaching(1.0, lambda ratio, teacher_logprobs: ratio * teacher_logprobs).of_sampled(
        logprobs, batch.old_logprobs, batch
    )
    torch.testing.assert_close(D, math.exp(20) * batch.teacher_logprobs)
    assert not torch.autograd.grad(D.sum(), logprobs)[0].any()


def test_traps_of_the_sampled_divergence():
    """Without its detachment it has no gradient. k3 descends forward as a loss, and reverse minus forward as a reward."""

    def expected(of_token):
        return gradient(lambda s: sum(0.5 * of_token(s[y], TEACHER[y]) for y in (0, 1)))

    def k3(s, t):
        return (t - s).exp() - (t - s) - 1

    assert expected(lambda s, t: s - t) == pytest.approx((0, 0), abs=1e-6)
    assert expected(k3) == pytest.approx((-0.25, 0.25), abs=1e-5)
    assert gradient(lambda s: forward(s, TEACHER)) == pytest.approx((-0.25, 0.25), abs=1e-5)
    as_reward = expected(lambda s, t: sampled(s, s.detach() - k3(s, t).detach(), (s - s.detach()).exp()))
    assert as_reward == pytest.approx((-0.02465, 0.02465), abs=1e-5)


def test_the_ends_of_jsd_are_no_limits():
    student, ends = torch.tensor([0.5, 0.5]).log(), {0.0: forward, 1.0: reverse}
    for beta, end in ends.items():
        assert jsd(student, TEACHER, beta) == end(student, TEACHER)
    assert jsd(student, TEACHER, 0.001).item() == pytest.approx(0.001 * 0.13081, rel=0.01)


def test_iw_opd_weighs_early_tokens_more():
    """a = (1, -1, 2) of 4 in all: the sums before are 0, 1 and 2, the factors 1.5, 1.375 and 1.25. A fourth token is padding."""
    a, mask = torch.tensor([[1.0, -1.0, 2.0, 9.0]]), torch.tensor([[True, True, True, False]])
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, 0.0]], requires_grad=True)
    loss = iw_opd(logprobs, a - 1, torch.full((1, 4), -1.0), mask)
    assert loss.tolist() == [[-1.5, 1.375, -2.5, 0.0]]
    (found,) = torch.autograd.grad(loss.sum(), logprobs)
    assert found.tolist() == [[-1.5, 1.375, -2.5, 0.0]]  # of -A log S
    assert iw_opd(logprobs, a - 1, torch.full((1, 4), -1.0), mask, gamma=0.0)[0, :3].tolist() == [-1, 1, -2]


def test_vopd_has_no_variance_where_there_are_two_words():
    """A = log T - log S + KL is (.5493, -.5493); each word alone gives the exact gradient of the reverse divergence."""
    for word, A in ((0, 0.5493), (1, -0.5493)):

        def of_word(s, word=word):
            return vopd(s[None], TEACHER[None], s[None, word], TEACHER[None, word])[0]

        own = torch.tensor([0.5, 0.5]).log().requires_grad_()
        value = of_word(own)
        assert value.item() == pytest.approx(0.14384, abs=1e-5)
        assert torch.autograd.grad(value, own)[0][word].item() == pytest.approx(-A, abs=1e-4)
        assert gradient(of_word) == pytest.approx((-0.27465, 0.27465), abs=1e-5)


def test_vopd_knows_its_token_among_a_few_entries():
    """With top_k=1 the sampled word is in the tail of the baseline, and its log-probabilities stay its own."""
    student, teacher = torch.tensor([[0.5, 0.3, 0.2]]).log().requires_grad_(), torch.tensor([[0.6, 0.1, 0.3]]).log()
    teaching = Teaching(1.0, vopd, top_k=1)
    values = teaching.of_words(student, teacher, torch.tensor([2]))
    baseline = Teaching(1.0, "reverse", top_k=1).of_words(student, teacher, torch.tensor([2])).item()
    A = torch.tensor(0.3 / 0.2).log().item() + baseline
    assert values.item() == pytest.approx(baseline)
    assert torch.autograd.grad(values.sum(), student)[0][0].tolist() == pytest.approx([0, 0, -A], abs=1e-6)


def test_a_discounted_advantage_has_the_later_tokens():
    """Gaps 1, -1, (4 of the environment), 2 with gamma 1/2: 2, then -1 + 2/4, then 1 - 1/2 + 2/8."""
    gap = torch.tensor([[1.0, -1.0, 4.0, 2.0, 9.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]).bool()
    found = discounted(gap - 3, torch.full((2, 5), -3.0), mask, gamma=0.5)
    assert found.tolist() == [[0.75, -0.5, 0, 2, 0], [1.9375, 1.875, 1.75, 1.5, 1]]
    torch.testing.assert_close(discounted(gap - 3, torch.full((2, 5), -3.0), mask, gamma=0.0), gap * mask)
    rest = discounted(gap - 3, torch.full((2, 5), -3.0), mask, gamma=1.0)
    torch.testing.assert_close(rest, (gap * mask).flip(1).cumsum(1).flip(1) * mask)
    long = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)).double()
    by_hand = [sum(0.9 ** (s - t) * long[:, s] for s in range(t, 100)) for t in range(100)]
    every = torch.ones(2, 100).bool()
    torch.testing.assert_close(discounted(long, torch.zeros_like(long), every), torch.stack(by_hand, 1))


def test_topd_by_hand():
    """T / S is 3/2 and 1/2: rewards ln 1.25 and ln .75. Returns: own and the mean of later ones; z-scores in each group."""
    gain = torch.tensor([[1.5, 0.5, 0.5], [0.5, 1.0, 7.0], [1.5, 1.5, 1.5]]).log()
    mask = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    group, up, down = torch.tensor([4, 4, 9]), 0.22314, -0.28768
    found = topd(gain - 1, torch.full((3, 3), -1.0), mask, group)
    returns = torch.tensor([up + down, 2 * down, down, down, 0.0])
    expected = (returns - returns.mean()) / returns.std(correction=0)
    assert torch.cat([found[0], found[1, :2]]).tolist() == pytest.approx(expected.tolist(), abs=2e-3)
    assert found[1, 2] == 0
    alone = torch.tensor([2.0, 2.0, 1.0]) * up
    assert found[2].tolist() == pytest.approx(((alone - alone.mean()) / alone.std(correction=0)).tolist(), abs=2e-3)
    far = topd(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-101.0, -1.0]]), torch.ones(1, 2), torch.zeros(1).long())
    assert far.tolist()[0] == pytest.approx([1, -1], abs=1e-3)  # log(e^100 / 2), where e^100 is no number of float32
    floor = topd(torch.tensor([[-90.0, -1.0]]), torch.full((1, 2), -1.0), torch.ones(1, 2), torch.zeros(1).long())
    # the reward of a word that the teacher excludes is log(1 - alpha)
    assert floor.tolist()[0] == pytest.approx([-1, 1], abs=1e-3)


def test_advantages_are_made_once_for_a_rollout():
    """The loss is -rho A, with A from before the update."""
    teaching, (logprobs, batch) = Teaching(1.0, topd), random_batch()
    batch = replace(batch, teaching=torch.ones(2, 3), teacher_logprobs=batch.rollout_logprobs - torch.arange(3.0))
    fixed = teaching.fixed(batch)
    loss = teaching.of_sampled(logprobs, batch.old_logprobs, fixed)
    torch.testing.assert_close(loss, (logprobs - batch.old_logprobs).exp() * fixed.divergence)
    assert not fixed.divergence.requires_grad and Teaching(1.0).fixed(batch) is batch


def test_a_choice_of_a_teacher_makes_the_terms_of_the_loss():
    """Their keys are those of the algorithm, with the defaults of the code; without a teacher they are no terms."""
    algorithm, plain = preset("teacher=tokens"), preset()
    assert (algorithm.imitation, algorithm.teacher) == (Imitation(), Teaching()) and not algorithm.others
    assert (plain.imitation, plain.teacher) == (None, None) and not plain.others


def test_presets_have_their_constants():
    for name, function, settings in (
        ("iw_opd", iw_opd, {"gamma": 0.5}), ("vopd", vopd, {}), ("topd", topd, {"alpha": 0.5}),
        ("opd_discounted", discounted, {"gamma": 0.9}),
    ):  # fmt: skip
        algorithm = preset(f"algo={name}")
        assert (algorithm.teacher.divergence.func, algorithm.teacher.divergence.keywords) == (function, settings)
        assert (algorithm.policy_coef, algorithm.teacher.coef) == (0, 1)
    assert preset("algo=topd", "algo.teacher.divergence.alpha=0.9").teacher.divergence.keywords["alpha"] == 0.9


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("algo=topd algo.teacher.divergence.alpha=1", "divergence.alpha=1 must be a number above 0 and below 1"),
        ("algo=opd algo.teacher.top_k=4", "algo.teacher.top_k=4, but the divergence compares sampled tokens"),
        ("algo=gkd algo.teacher.top_k=1 algo.teacher.tail=false", "same gradient for every teacher"),
        (
            "algo=opd algo.teacher.divergence={file}:k1",
            r"teacher.divergence \(k1\) has the same gradient for every teacher",
        ),
        (
            "algo=opd algo.teacher.divergence={file}:lost",
            r"\(lost\) needs 'rewards'; available are only: logprobs, ratio",
        ),
        ("algo=opd algo.teacher.divergence={file}:flat", r"\(flat\) must return a tensor of shape \[6\]"),
        ("algo=opd algo.teacher.cap=2", "algo.teacher.cap=2, but the divergence has the ratio already"),
        ("algo=grpo algo.policy_coef=0", "nothing would be learned"),
    ],
)
def test_what_teaches_nothing_is_refused(tmp_path, overrides, line):
    file = tmp_path / "mine.py"
    file.write_text(
        "def k1(logprobs, teacher_logprobs):\n    return logprobs - teacher_logprobs\n"
        "def lost(logprobs, rewards):\n    return logprobs\n"
        "def flat(student, teacher):\n    return (student - teacher).mean()\n"
    )
    with pytest.raises(UserError, match=line):
        preset(*overrides.format(file=file).split())
