"""Log-probabilities and entropies of logits are exact, and few graphs compute them where they are compiled."""

import logging

import pytest
import torch
from torch import tensor
from torch._dynamo.utils import counters

from grpo.models import head, token_scores
from grpo.models.compiled import Compiled


def random_logits(rows: int, words: int, size: float = 3.0) -> torch.Tensor:
    return size * torch.randn(rows, words, generator=torch.Generator().manual_seed(rows))


def test_three_equal_logits_and_one_that_is_impossible():
    """p = 1/3 each, so log p = -log 3 and H = log 3; a logit of -inf adds nothing, and temperature 2 halves a difference."""
    logits = tensor([[1.0, 1.0, 1.0, -torch.inf], [2 * torch.tensor(3.0).log(), 0.0, -torch.inf, -torch.inf]])
    logprobs, entropy, log_sums = token_scores.scores_of_logits(logits[:1], tensor([2]), 1.0)
    torch.testing.assert_close((logprobs, entropy), (-tensor([3.0]).log(), tensor([3.0]).log()))
    torch.testing.assert_close(log_sums, 1 + tensor([3.0]).log())
    logprobs, entropy, _ = token_scores.scores_of_logits(logits[1:], tensor([0]), 2.0)  # p = 3/4 and 1/4
    torch.testing.assert_close(logprobs, tensor([0.75]).log())
    torch.testing.assert_close(entropy, -0.75 * tensor([0.75]).log() - 0.25 * tensor([0.25]).log())


@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_numbers_and_gradients_are_those_of_double_precision(monkeypatch, temperature, entropies):
    """Nine rows, of which a CPU takes four at a time."""
    monkeypatch.setattr(token_scores, "CACHED", 4 * 500)
    logits, targets, factors = random_logits(9, 500), torch.arange(9) * 7, random_logits(2, 9)
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    log_p = (exact / temperature).log_softmax(-1)
    expected = log_p[range(9), targets], -(log_p.exp() * log_p).sum(-1)
    got = head.of_logits(ours, targets, temperature, entropies)
    for values, right in zip(got, expected, strict=True):
        torch.testing.assert_close(values.double(), right, atol=2e-6, rtol=0)
    for values in (got, expected):
        ((factors[0] * values[0]).sum() + entropies * (factors[1] * values[1]).sum()).backward()
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=2e-6, rtol=1e-6)


def test_a_large_vocabulary_costs_no_digits():
    """A softmax that sums 150,000 terms in a row is wrong by 1e-5 and more."""
    logits = random_logits(8, 151_936)
    exact = logits.double().log_softmax(-1)
    logprobs, entropy, _ = token_scores.scores_of_logits(logits, torch.arange(8), 1.0)
    torch.testing.assert_close(logprobs.double(), exact[range(8), range(8)], atol=4e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), atol=4e-6, rtol=0)


def test_a_target_that_is_nearly_certain_keeps_its_gradient_in_bfloat16():
    """p = 1 - 1.5e-3. Its gradient 1 - p is smaller than the rounding of p in bfloat16, 4e-3."""
    logits = tensor([[6.5, 0.0]]).bfloat16().requires_grad_()
    logprobs, _ = head.of_logits(logits, tensor([0]), 1.0, False)
    logprobs.sum().backward()
    exact = 1 - torch.sigmoid(tensor(6.5))
    torch.testing.assert_close(logits.grad.float(), tensor([[exact, -exact]]), atol=0, rtol=4e-3)


def test_under_autocast_a_head_gives_what_its_module_does():
    """Products are in bfloat16, gradients of the float32 matrix in float32."""
    torch.manual_seed(0)
    matrix, hidden, targets = torch.nn.Linear(32, 97, bias=False), torch.randn(10, 32), torch.arange(10)
    found = []
    for of_tokens in (False, True):
        states = hidden.clone().requires_grad_()
        matrix.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if of_tokens:
                settings = 0.7, False, 3, torch.bfloat16, torch.nn.functional.linear
                got = head.OfTokens.apply(states, matrix.weight, targets, *settings)
            else:
                got = head.of_logits(matrix(states), targets, 0.7, False)
            got[0].sum().backward()
        assert states.grad.dtype == matrix.weight.grad.dtype == torch.float32
        found.append((*(values.detach() for values in got), states.grad, matrix.weight.grad.clone()))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2 * float(theirs.abs().max()), rtol=0)
    torch.testing.assert_close(found[0][:2], found[1][:2], atol=1e-6, rtol=0)


def test_few_graphs_serve_all_numbers_of_rows_and_temperatures():
    """Each of the two functions has one for temperature 1 and one for all others. A single row is not compiled."""
    torch._dynamo.reset()
    counters.clear()
    forward = Compiled(token_scores.scores_of_rows, ("cpu",), "aot_eager")
    backward = Compiled(token_scores.gradient_of_rows, ("cpu",), "aot_eager")
    for rows, temperature in [(5, 1.0), (9, 1.0), (9, 0.7), (1, 0.7), (33, 0.35), (2, 1.0)]:
        logits, targets, factors = random_logits(rows, 97), torch.arange(rows), random_logits(2, rows)
        got = forward(logits, targets, temperature)
        torch.testing.assert_close(got, token_scores.scores_of_rows(logits, targets, temperature))
        given = logits, got[2], factors[0], temperature
        torch.testing.assert_close(backward(*given), token_scores.gradient_of_rows(*given))
    assert counters["stats"]["unique_graphs"] == 4
    assert not forward.failed and not backward.failed


def test_what_cannot_be_compiled_is_computed_and_warned_of_once(caplog):
    def compiler(graph, inputs):
        raise RuntimeError("no compiler: cc is not there\nmore lines")

    torch._dynamo.reset()
    forward = Compiled(token_scores.scores_of_rows, ("cpu",), compiler)
    logits = random_logits(5, 97)
    for _ in range(2):
        got = forward(logits, torch.arange(5), 1.0)
        torch.testing.assert_close(got, token_scores.scores_of_rows(logits, torch.arange(5), 1.0))
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "scores_of_rows is not compiled" in record.getMessage() and "cc is not there" in record.getMessage()


def test_the_first_compilation_is_announced(monkeypatch, caplog):
    """Before it begins, and once."""
    caplog.set_level(logging.INFO)

    def compiled(*given):
        assert caplog.messages[0] == "compiling scores_of_rows for this device: this may take minutes"
        return token_scores.scores_of_rows(*given)

    monkeypatch.setattr(torch, "compile", lambda function, **settings: compiled)
    forward, logits = Compiled(token_scores.scores_of_rows, ("cpu",)), random_logits(5, 97)
    for _ in range(2):
        forward(logits, torch.arange(5), 1.0)
        assert caplog.messages[1:] == ["compiling scores_of_rows for this device: done in 0 s"]
