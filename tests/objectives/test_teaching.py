"""Divergences to a teacher, on one token of two words: S = (1/2, 1/2), T = (3/4, 1/4). The numbers were worked by hand."""

import pytest
import torch

from grpo.objectives.teaching import Teaching, coarse, forward, jsd, reverse, sampled

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


def test_few_entries_and_a_tail():
    student, teacher = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.6, 0.2, 0.2]]).log()
    assert reverse(student, teacher).item() == pytest.approx(0.03048, abs=1e-5)

    def of(k, tail):
        return Teaching(1.0, "reverse", top_k=k, tail=tail).of_words(student, teacher, torch.zeros(1).long()).item()

    assert of(1, True) == pytest.approx(0.02041, abs=1e-5)
    assert of(2, False) == pytest.approx(0.03810, abs=1e-5)
    assert of(1, False) == 0
    assert coarse(student, torch.tensor([[0]]), True).exp()[0].tolist() == pytest.approx([0.5, 0.5])
