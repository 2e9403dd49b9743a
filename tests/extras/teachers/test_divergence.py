"""Divergences of distributions in chunks: the numbers and gradients of whole logits, for any head, without [n, V] in memory."""

import pytest
import torch
from helpers.models import disturb, model_of

from grpo.extras.teachers import divergence
from grpo.extras.teachers.divergence import Distributions, Joined, divergences
from grpo.extras.teachers.teaching import Teaching, jsd
from grpo.models import head

N = 11
CPU = torch.device("cpu")


def states_of(model, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    return torch.randn(N, 128, generator=generator).to(dtype).requires_grad_()


def whole(student, teacher, heat) -> torch.Tensor:
    """Return the divergences by the models' own code, of all logits at once."""

    def logprobs(of: Distributions) -> torch.Tensor:
        model = divergence.without_adapter(of.model)
        return (head.after_the_decoder(model, of.states).float()[:, :97] / heat).log_softmax(-1)

    return jsd(logprobs(student), logprobs(teacher).detach(), 0.3)


def function(student, teacher, targets) -> torch.Tensor:
    return jsd(student, teacher, 0.3)


@pytest.mark.parametrize(
    ("student", "teacher", "lora"),
    [
        ("llama", "gemma3", False),
        ("granite", "llama_tied", False),
        ("cohere2", "qwen3", True),
        ("gemma3", "cohere2", False),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_chunks_of_any_head_give_what_whole_logits_do(monkeypatch, student, teacher, lora, warm):
    """Caps, scales and adapters of heads; one temperature, or one for each token."""
    pair = [model_of(student, lora), model_of(teacher)]
    disturb(pair[1], seed=7, size=0.05)
    heat = torch.linspace(0.5, 1.5, N)[:, None] if warm else 0.7
    student, teacher = (Distributions(model, states_of(model, i)) for i, model in enumerate(pair))
    weights = torch.linspace(-1, 2, N)
    found = []
    for at_once in (1 << 23, divergence.TENSORS * 97 * 4):
        monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", at_once)
        given = heat[:, 0] if warm else heat
        found.append(divergences(student, teacher, torch.arange(N), given, function))
    found.append(whole(student, teacher, heat))
    trained = [p for p in pair[0].parameters() if p.requires_grad and p.shape[-1] == 128]
    gradients = [
        torch.autograd.grad((weights * D).sum(), [student.states, *trained], allow_unused=True, retain_graph=True)
        for D in found
    ]
    assert found[2].min() > 1e-3 and gradients[2][0].abs().max() > 1e-4
    for D, of_chunks in zip(found[:2], gradients[:2], strict=True):
        torch.testing.assert_close(D, found[2], atol=1e-6, rtol=1e-5)
        for one, two in zip(of_chunks, gradients[2], strict=True):
            assert (one is None) == (two is None)
            if one is not None:
                torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-3)


def test_padding_of_a_vocabulary_has_no_probability():
    """The teacher has 31 more rows in its head, with large logits: cut off after the softmax they would take nearly all."""
    small, large = model_of("llama"), model_of("llama")
    disturb(large, seed=7, size=0.05)
    student, teacher = Distributions(small, states_of(small, 0)), Distributions(large, states_of(large, 1))
    expected = divergences(student, teacher, torch.arange(N), 1.0, function)
    large.resize_token_embeddings(128, mean_resizing=False)
    large.get_output_embeddings().weight.data[97:] = 10 * large.get_output_embeddings().weight.data[:31]
    torch.testing.assert_close(divergences(student, teacher, torch.arange(N), 1.0, function), expected)
    back = jsd(*(of.logprobs(slice(None), 1.0, 97) for of in (teacher, student)), 0.3)  # the other way round
    torch.testing.assert_close(divergences(teacher, student, torch.arange(N), 1.0, function), back)
    parts = [Distributions(small, student.states[::2]), Distributions(large, teacher.states[1::2])]
    both = divergences(teacher, Joined(parts, torch.arange(N) % 2, CPU), torch.arange(N), 1.0, function)
    torch.testing.assert_close(both, torch.where(torch.arange(N) % 2 == 0, back, 0.0))


def test_no_tensor_of_tokens_by_vocabulary_is_kept(monkeypatch):
    model = model_of("llama")
    student, teacher = Distributions(model, states_of(model, 0)), Distributions(model, states_of(model, 1).detach())
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", divergence.TENSORS * 97 * 4)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.shape), t)[1], lambda t: t):
        values = divergences(student, teacher, torch.arange(N), 1.0, function)
    assert not [shape for shape in kept if shape[-1] == 97]
    made: list[int] = []
    for of in (student, teacher):  # no chunk has more than 4 tokens
        of.model.get_output_embeddings().register_forward_hook(lambda _, args, out: made.append(len(out)))
    values.sum().backward()
    assert made and max(made) <= 4


def test_sixteen_bits_and_excluded_words():
    """The softmax is in float32 where autocast computes in bfloat16. A logit of -inf gives finite numbers."""
    model = model_of("llama")
    student, teacher = Distributions(model, states_of(model, 0)), Distributions(model, states_of(model, 1))
    exact = divergences(student, teacher, torch.arange(N), 1.0, function)
    with torch.autocast("cpu", torch.bfloat16):
        values = divergences(student, teacher, torch.arange(N), 1.0, function)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, exact, atol=0.02, rtol=0.05)
    values.sum().backward()
    assert student.states.grad.isfinite().all()
    bias = torch.zeros(97)
    bias[3] = -torch.inf
    model.get_output_embeddings().register_forward_hook(lambda _, args, out: out + bias)
    for name in ("forward", "reverse", "jsd"):
        teaching, own = Teaching(1.0, name), states_of(model, 0)
        values = divergences(Distributions(model, own), teacher, torch.arange(N), 1.0, teaching.of_words)
        (gradient,) = torch.autograd.grad(values.sum(), own)
        assert values.isfinite().all() and values.max() < 100 and gradient.isfinite().all() and gradient.any()


def test_without_a_token_the_head_still_has_a_gradient():
    """Ranks add up gradients of the same parameters."""
    model = model_of("llama")
    nothing = torch.zeros(0, 128, requires_grad=True)
    values = divergences(Distributions(model, nothing), Distributions(model, nothing), torch.arange(0), 1.0, function)
    values.sum().backward()
    assert values.shape == (0,) and model.get_output_embeddings().weight.grad is not None
