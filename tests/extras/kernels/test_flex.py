"""FlexAttention: the mask made from intervals is what torch makes from the rule, in less memory; few graphs; no silent fall."""

import logging
import random

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from helpers.models import SIZES, batch_of, measured, model_of
from torch._dynamo.utils import counters
from transformers import AttentionInterface

from grpo.extras.forecast.imagined import Live
from grpo.extras.kernels import flex
from grpo.extras.kernels.agreement import gradient_disagreement
from grpo.extras.kernels.flex import FLEX, FlexKernel
from grpo.extras.scores.weighed import Weighed
from grpo.models import packing
from grpo.models.logprobs import completion_logprobs
from grpo.models.packed_attention import NAME, How, Packed, by_plan

CPU = torch.device("cpu")


@pytest.fixture
def fresh(monkeypatch) -> FlexKernel:
    """The kernel as in a process that has not used it."""
    monkeypatch.setattr(FLEX, "failed", "")
    return FLEX


@pytest.fixture
def compiled(monkeypatch, fresh):
    """FlexAttention with dynamo's graphs and a gradient on a CPU, where its kernels do not exist."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    function = torch.compile(torch_flex.flex_attention, dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(flex, "flex_attention", function)


def rule(plan: Packed, window: int | None):
    """The mask in words: earlier keys of the same prompt that belong to the prompt or to the same row, within the window."""
    prompt_of, row_of, positions = plan.prompt_of, plan.row_of, plan.positions[0]

    def sees(_batch, _head, q, k):
        seen = (k <= q) & (prompt_of[k] == prompt_of[q]) & ((row_of[k] < 0) | (row_of[k] == row_of[q]))
        return seen if window is None else seen & (positions[q] - positions[k] < window)

    return sees


def test_the_mask_is_the_one_that_torch_makes_of_the_rule():
    """Random packings, whose prompts and rows begin and end within blocks and at their edges."""
    rng = random.Random(0)
    for _ in range(5):
        prompts = [[1] * rng.choice((1, 5, 128, 200)) for _ in range(rng.randint(1, 3))]
        rows = [[[1] * rng.choice((1, 40, 128, 150)) for _ in range(rng.randint(0, 3))] for _ in prompts]
        plan = Packed(prompts, rows, CPU, FLEX)
        tokens = plan.ids.shape[1]
        assert tokens % 128 == 0 and tokens >= 640
        for window in (None, 1, 130):
            expected = torch_flex.create_block_mask(rule(plan, window), None, None, tokens, tokens, device="cpu")
            got = flex.block_mask(plan, How(window=window))
            for name in BLOCKS:
                torch.testing.assert_close(getattr(got, name), getattr(expected, name), atol=0, rtol=0)
            q, k = torch.arange(tokens)[:, None], torch.arange(tokens)
            assert torch.equal(got.mask_mod(0, 0, q, k), rule(plan, window)(0, 0, q, k))


BLOCKS = [
    f"{kind}{side}_{what}" for kind in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
]


def test_the_mask_takes_a_tenth_of_a_byte_for_a_pair_of_tokens():
    """torch's own takes 3 bytes: 12.9 GB for 65,536 tokens."""
    plan = Packed([[1] * 64] * 8, [[[1] * 240] * 4] * 8, CPU, FLEX)
    with Live([plan.ids, plan.positions]) as live:
        flex.block_mask(plan, How())
    assert plan.ids.shape[1] == 8192
    assert live.most.total() < 0.1 * 8192**2


def test_one_kernel_serves_all_windows_and_lengths(compiled, fresh):
    """Gemma 3 has two windows. One graph is for the trial without a gradient, one for passes with it."""
    model = model_of("gemma3")
    assert FLEX.objection(model, "shared_prompt", packing.disagreement) == ""
    for sizes in (SIZES, [(140, [150, 40, 420])]):
        batch = batch_of(sizes)
        logprobs, _, gradients = measured(model, batch, "shared_prompt", FLEX)
        expected, _, exact = measured(model, batch, "shared_prompt")
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
        for name, gradient in exact.items():
            torch.testing.assert_close(gradients[name], gradient, atol=1e-4, rtol=1e-4, msg=name)
    assert counters["stats"]["unique_graphs"] == 2
    assert not fresh.failed


@pytest.mark.slow
def test_caps_and_sinks_are_in_its_kernel(compiled, fresh):
    """Forward and backward, in no more graphs for more windows."""
    lengths, generator = ([300, 9], [[150, 40], [5]]), torch.Generator().manual_seed(0)
    prompts, rows = [[1] * n for n in lengths[0]], [[[1] * n for n in some] for some in lengths[1]]
    plan, plain = Packed(prompts, rows, CPU, FLEX), Packed([*prompts, [0] * 136], [*rows, []], CPU)
    shapes = (1, 4, 640, 8), (1, 2, 640, 8), (1, 2, 640, 8), (4,)
    *given, sinks = [torch.randn(*shape, generator=generator, requires_grad=True) for shape in shapes]
    for window in (None, 5, 7):
        how = How(0.3, window, Weighed(1.5, sinks))
        found, expected = FLEX.attend(plan, *given, how).transpose(1, 2), plain.attend(0, *given, how)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        error = torch.randn(found.shape, generator=generator)
        of_found, of_expected = (torch.autograd.grad(out, [*given, sinks], error) for out in (found, expected))
        torch.testing.assert_close(of_found, of_expected, atol=1e-4, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] <= 2 and not fresh.failed


def test_a_kernel_that_fails_is_warned_of_and_replaced(monkeypatch, caplog, fresh):
    """As where dynamo has made too many graphs in the middle of a run."""

    def broken(*args, **kwargs):
        raise RuntimeError("recompile_limit reached\nmore lines")

    monkeypatch.setattr(flex, "flex_attention", broken)
    model, batch = model_of("mistral, window 6"), batch_of(SIZES)
    exact, _ = completion_logprobs(model, batch, 1.0)
    for _ in range(2):
        got, _ = completion_logprobs(model, batch, 1.0, layout="shared_prompt", kernel=FLEX)
        torch.testing.assert_close(got, exact, atol=1e-5, rtol=0)
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage().startswith("FlexAttention failed (RuntimeError: recompile_limit reached): attention is")


def test_memory_that_runs_out_is_not_the_kernels_fault(monkeypatch, fresh):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("of the GPU")

    monkeypatch.setattr(flex, "flex_attention", full)
    one = torch.zeros(1, 1, 640, 8)
    with pytest.raises(torch.OutOfMemoryError):
        FLEX.attend(Packed([[1] * 5], [[]], CPU, FLEX), one, one, one, How())
    assert not FLEX.failed


def test_layers_of_one_model_have_windows_of_their_own(fresh):
    """The first layer sees all, the second two tokens: as if the second were alone."""
    plan, alone = (Packed([[1] * 5], [[[1] * 7]], CPU, FLEX) for _ in range(2))
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, plan.ids.shape[1], 8).unbind()
    whole, narrow = (FLEX.attend(plan, query, key, value, How(window=window)) for window in (None, 2))
    assert torch.equal(narrow, FLEX.attend(alone, query, key, value, How(window=2))) and not torch.equal(narrow, whole)


@pytest.mark.parametrize("what", ["values", "gradient"])
def test_a_kernel_that_is_wrong_is_found_before_the_first_update(monkeypatch, fresh, what):
    """The gradient alone is wrong if a part of it does not flow back."""
    right = torch_flex.flex_attention

    def wrong(query, key, value, **kwargs):
        if what == "values":
            return 1.1 * right(query, key, value, **kwargs)
        out = right(query.detach(), key.detach(), value.detach(), **kwargs)
        return out + 0 * (query + value.repeat_interleave(query.shape[1] // value.shape[1], dim=1))

    monkeypatch.setattr(flex, "flex_attention", wrong)
    why = FLEX.objection(model_of("llama_tied"), "shared_prompt", packing.disagreement)
    assert why.startswith("log-probabilities differ by" if what == "values" else "gradients have a cosine of")
    assert not fresh.failed  # another model may fit


def test_a_run_on_a_gpu_is_told_why_it_has_plain_attention(monkeypatch, caplog, fresh):
    """The parameters claim to be on a GPU, and compute on the CPU. Without
    extras/scores Gemma 2 fits neither kernel: one warning, of the layout."""

    class OnGpu(torch.nn.Parameter):
        is_cuda = True

    right = torch_flex.flex_attention
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, by_plan)
    monkeypatch.setattr(packing, "ON_GPU", [FLEX])
    monkeypatch.setattr(flex, "flex_attention", lambda *given, **named: 1.1 * right(*given, **named))
    for family, said in {
        "llama_tied": "FlexAttention does not fit LlamaForCausalLM (log-p",
        "gemma2": "layout=pad",
    }.items():
        caplog.clear()
        model = model_of(family)
        first = OnGpu(next(model.parameters()).detach())
        monkeypatch.setattr(model, "parameters", lambda first=first: iter([first]))
        packing.trusted(model, "shared_prompt")
        [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert said in record.getMessage()


def test_the_trial_leaves_no_gradient(fresh):
    model = model_of("llama_tied")
    assert gradient_disagreement(model, "shared_prompt", None) == ""
    assert not any(p.grad is not None for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks
