"""Layouts: every family has the log-probabilities and gradients of the padded layout, with less computation."""

import logging
from dataclasses import replace

import pytest
import torch
import transformers
from helpers.architectures import made
from helpers.learning import GROUPS, fresh, make_module, rollout
from helpers.models import FAMILIES, MORE, SHAPE, SIZES, agree, batch_of, measured, model_of
from torch import tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from grpo.extras.kernels.flex import FLEX
from grpo.models import head
from grpo.models.gradient_checkpointing import recomputing
from grpo.models.logprobs import completion_logprobs
from grpo.models.packed_attention import NAME, PLAN, How, Packed, attending, by_plan
from grpo.models.packing import microbatches, trusted
from grpo.models.trusted import PROBE, by_probe
from grpo.rollout.collate import collate
from grpo.system.errors import UserError
from grpo.training.optimization import Optimization

TRUSTED = {**{name: case for name, case in FAMILIES.items() if name != "gemma2"}, **MORE}


@pytest.mark.parametrize(
    ("family", "lora"),
    [*(pytest.param(family, False, id=family) for family in TRUSTED), pytest.param("llama_tied", True, id="lora")],
)
def test_every_layout_gives_what_the_padded_one_does(family, lora):
    model, batch = model_of(family, lora), batch_of(SIZES)
    for layout in ("packed", "shared_prompt"):
        assert trusted(model, layout) == (layout, None)
        agree(model, batch, layout)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("sizes", [[(5, [1, 1]), (2, [1])], [(4, [3, 1, 1])]])
def test_answers_of_one_token_need_nothing_but_their_prompt(sizes):
    model, batch = model_of("llama_tied"), batch_of(sizes)
    for layout in ("packed", "shared_prompt"):
        agree(model, batch, layout)
    silent = batch.silenced()
    assert not measured(model, silent, "shared_prompt")[0].any()


@pytest.mark.parametrize("family", ["llama_tied", "mistral, window 6"])
def test_flex_attention_is_told_the_same(family):
    """Uncompiled and without a gradient, since a CPU supports nothing else."""
    model, batch = model_of(family), batch_of(SIZES)
    with torch.no_grad():
        exact, _ = completion_logprobs(model, batch, 1.0)
        got, _ = completion_logprobs(model, batch, 1.0, layout="shared_prompt", kernel=FLEX)
    torch.testing.assert_close(got, exact, atol=1e-5, rtol=0)


def test_entropies_with_gradient_and_a_head_in_chunks(monkeypatch):
    model, batch = model_of("qwen3"), batch_of(SIZES)
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", 5 * 97)
    assert int(batch.mask.sum()) > 5
    agree(model, batch, "shared_prompt", entropies=True)


def test_the_softmax_is_in_float32_whatever_the_model_computes_in():
    logits = torch.randn(5, 97, generator=torch.Generator().manual_seed(0)).bfloat16()
    got, entropy = head.of_logits(logits, torch.arange(5), 0.7, False)
    exact = (logits.double() / 0.7).log_softmax(-1)
    torch.testing.assert_close(got.double(), exact[range(5), range(5)], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), atol=1e-5, rtol=0)


def test_no_tensor_of_tokens_by_vocabulary_is_kept(monkeypatch):
    model, batch = model_of("llama"), batch_of([(9, [8] * 8)], turns=False)
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", 4 * 97)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.shape), t)[1], lambda t: t):
        completion_logprobs(model, batch, 1.0, layout="shared_prompt")
        assert not [shape for shape in kept if shape[-1] == 97]
        completion_logprobs(model, batch, 1.0)
    assert [shape for shape in kept if shape == (64, 97)]  # the padded layout keeps them


@pytest.mark.parametrize("what", ["position", "mask", "prompt", "place"])
def test_a_wrong_position_mask_or_prompt_would_show(what, monkeypatch):
    model, batch = model_of("llama_tied"), batch_of(SIZES)
    exact, _ = completion_logprobs(model, batch, 1.0)
    right = Packed.__init__

    def wrong(self, prompts, rows, *rest):
        right(self, prompts, rows, *rest)
        if what == "position":  # positions continue those of the previous row
            assert self.places  # computed before the change
            self.positions = torch.arange(self.positions.shape[1])[None]
        elif what == "mask":  # a row sees one token too many
            masks = self.dense_masks(How())
            self.dense[None] = masks[0], masks[1] | masks[1].roll(1, -1)
        elif what == "prompt":  # rows see the prompt of another row
            self.owner = self.owner.roll(1)
        else:
            self.starts[0] += 1

    monkeypatch.setattr(Packed, "__init__", wrong)
    got, _ = completion_logprobs(model, batch, 1.0, layout="shared_prompt")
    assert (got - exact).abs().max() > 1e-3


def test_what_a_plan_cannot_do_is_seen_and_said(caplog, monkeypatch):
    """Gemma 2 caps its attention, without extras/scores; one model's layers do not report their windows; one ignores the plan."""
    caplog.set_level(logging.WARNING)
    for name, function in ((NAME, by_plan), (PROBE, by_probe)):
        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, name, function)
    assert trusted(model_of("gemma2"), "shared_prompt") == ("padded", None)
    assert "Gemma2ForCausalLM (its attention takes softcap, which attention by plan does not know): la" in caplog.text
    silent = model_of("gemma3")
    for layer in silent.model.layers:
        layer.self_attn.sliding_window = None
    assert trusted(silent, "packed") == ("padded", None)
    assert "(layer 0 has a mask other than its window)" in caplog.text
    assert trusted(made("MiniMax"), "packed") == ("padded", None)
    said = [record for record in caplog.records if record.name == "grpo.models.packing"]
    assert len(said) == 3 and "(its layers carry a state from token to token: " in said[2].getMessage()
    caplog.clear()
    assert trusted(silent, "padded") == ("padded", None) and not caplog.records


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"block_indices": tensor([0])}, "picks the blocks of tokens"),
        ({"s_aux": tensor([0.0])}, "takes s_aux"),
        ({"is_causal": False}, "takes is_causal"),
        ({"dropout": 0.1}, "takes dropout"),
        ({"anything": 0}, "takes anything"),
    ],
)
def test_an_argument_that_a_plan_does_not_follow_is_refused(given, why):
    """Whatever it is called; those without a value, and those that change nothing, are not."""
    plan, x, layer = Packed([[1, 2]], [[]], torch.device("cpu")), torch.randn(1, 2, 2, 8), torch.nn.Module()
    layer.layer_idx = 0
    usual = {"scaling": 0.3, "sliding_window": None, "dropout": 0.0, "is_causal": True, "indices": None}
    with attending(model_of("llama_tied"), plan):
        assert by_plan(layer, x, x, x, None, **usual)[0].shape == (1, 2, 2, 8)
        with pytest.raises(ValueError, match=f"its attention {why}"):
            by_plan(layer, x, x, x, None, **(usual | given))


def test_what_a_run_computes_in_is_no_reason_to_distrust():
    """bf16-mixed and gradient checkpointing are accepted."""
    model = model_of("llama_tied")
    with torch.autocast("cpu", torch.bfloat16), recomputing(model):
        assert trusted(model, "shared_prompt") == ("shared_prompt", None)
    assert trusted(model.bfloat16(), "packed") == ("packed", None)


def test_afterwards_a_model_is_what_it_was():
    model = model_of("llama_tied")
    with pytest.raises(RuntimeError), attending(model, Packed([[1, 2]], [[]], torch.device("cpu"))):
        raise RuntimeError
    assert model.config._attn_implementation == "sdpa" and PLAN.get(None) is None


# -- microbatches. Rows of batch_of(SIZES): 0-3 prompt 9, own 5 8 1 3; 4-5 prompt 4, own 2 6; 6: 12 + 7; 7-9: 1 + 4 each


@pytest.mark.parametrize(
    ("layout", "max_tokens", "expected"),
    [
        # groups of 26, 19, 13 and 12 tokens; the second does not fit beside the first
        ("shared_prompt", 30, [[1, 0, 3, 2], [6], [7, 8, 9, 5, 4]]),
        # the first is cut: 9 + 8 + 5, then 9 + 3 + 1, and 19 does not fit beside it
        ("shared_prompt", 22, [[1, 0], [3, 2], [6], [7, 8, 9], [5, 4]]),
        ("shared_prompt", 1, [[1], [0], [3], [2], [6], [7], [8], [9], [5], [4]]),
        # rows of 19, 17, 14, 12, 10, 10, 6, 5, 5, 5 tokens
        ("packed", 36, [[6, 1], [0, 3, 5], [2, 4, 7, 8, 9]]),
        # 2 x (12 + 8) = 40, 2 x (9 + 5), 2 x (9 + 6), 4 x (4 + 4), while 3 x (9 + 6) = 45
        ("padded", 42, [[6, 1], [0, 3], [5, 2], [4, 7, 8, 9]]),
        ("shared_prompt", 1000, [[1, 0, 3, 2, 6, 7, 8, 9, 5, 4]]),
    ],
)
def test_microbatches_are_filled_longest_first(layout, max_tokens, expected):
    pieces = [piece.tolist() for piece in microbatches(batch_of(SIZES), layout, max_tokens)]
    assert pieces == expected


def test_the_model_sees_each_prompt_once_and_no_padding(toy):
    policy, seen = fresh(toy), []
    policy.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    for layout, expected in {"shared_prompt": 10, "packed": 14, "padded": 28}.items():
        module = make_module(policy, layout=layout)
        assert module.layout == (layout, None)
        seen.clear()
        module.training_step(rollout(), 0)
        # prompts of 3 and 1; rows of 2, 1, 4 and 3, whose last tokens predict nothing
        assert [shape.numel() for shape in seen] == [expected]


def test_two_passes_over_a_rollout_need_no_third_for_the_old_logprobs(toy):
    """The first pass uses the policy that sampled, so its log-probabilities are the old ones."""
    policy, passes = fresh(toy), []
    module = make_module(policy, num_epochs=2)
    module.layout  # noqa: B018 - determined before the count begins
    policy.get_decoder().register_forward_pre_hook(lambda *_: passes.append(1))
    metrics = module.training_step(rollout(), 0)
    assert len(passes) == 2
    given = fresh(toy)
    tokens = collate(GROUPS)
    old, entropy = completion_logprobs(given, tokens, 1.0)
    other = make_module(given, num_epochs=2)
    expected = other.training_step(
        rollout(tokens=replace(tokens, old_logprobs=old.detach(), old_entropy=entropy.detach())), 0
    )
    for (name, p), q in zip(policy.named_parameters(), given.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0, msg=name)
    assert metrics["loss/approx_kl"] == pytest.approx(expected["loss/approx_kl"], rel=1e-3)
    assert metrics["loss/approx_kl"] > 0


def test_a_wrong_layout_or_size_is_one_line():
    with pytest.raises(UserError, match=r"optim.layout=ragged is not one of padded, packed, shared_prompt"):
        Optimization(torch.optim.SGD, print, layout="ragged")
    with pytest.raises(UserError, match=r"optim.max_tokens_per_microbatch=0 must be an integer of at least 1"):
        Optimization(torch.optim.SGD, print, max_tokens_per_microbatch=0)


@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize(("size", "large"), [(3, False), (100, False), (3, True)])
def test_the_gradients_of_the_head_are_those_of_autograd(monkeypatch, size, large, entropies):
    """Ten tokens in one chunk, whose logits are kept, or in chunks of three, which are computed again. A large head is
    multiplied by oneDNN: four chunks, forward, again and for the gradient of the states; a small one as ever, to the bit."""
    calls, onednn = [], torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *given: (calls.append(1), onednn(*given))[1])
    if large:
        monkeypatch.setattr(head, "LARGE", 0)
    torch.manual_seed(0)
    model = model_of("llama")
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", size * 97)
    weight, targets = model.lm_head.weight, torch.randint(97, (10,))
    hidden = torch.randn(10, weight.shape[1], requires_grad=True)
    factors = torch.randn(2, 10)

    def gradients(values):
        loss = sum((factor * x).sum() for factor, x in zip(factors, values, strict=True) if x.requires_grad)
        return torch.autograd.grad(loss, (hidden, weight))

    exact = head.of_logits(hidden @ weight.T, targets, 0.7, entropies)
    got = head.token_values(model, hidden, targets, 0.7, entropies)
    assert got[1].requires_grad == entropies
    torch.testing.assert_close(got, exact, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients(got), gradients(exact), atol=1e-5, rtol=1e-4)
    assert len(calls) == 12 * large * head.ONEDNN


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("family", "factor"),
    [("llama", 1), ("granite", 1 / 8), ("granite_moe", 1 / 4), ("cohere2", 1 / 16), ("gpt2", 1), ("gemma3", None)],
)
def test_the_factor_after_the_head_is_found_by_trying(family, factor, lora):
    """Gemma caps its logits at 2, which is no factor: its own code computes them."""
    model = model_of(family, lora)
    base = model.get_base_model() if lora else model
    states = torch.randn(6, base.get_output_embeddings().weight.shape[1])
    assert head.factor_of(base, states.shape[1]) == factor
    scores = base.get_output_embeddings()(states)
    expected = 2 * torch.tanh(scores / 2) if factor is None else factor * scores
    torch.testing.assert_close(head.after_the_decoder(base, states), expected)
    got, _ = head.token_values(model, states, torch.arange(6), 0.5, False)
    torch.testing.assert_close(got, (expected / 0.5).log_softmax(-1)[range(6), range(6)])


def test_states_that_are_scaled_before_the_head_have_no_factor():
    """As in MiniCPM, whose code then computes the logits; code that cannot be tried is left to the comparison of layouts."""

    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, **kwargs):
            states = self.model(input_ids, **kwargs).last_hidden_state
            return CausalLMOutputWithPast(logits=self.lm_head(states / 4))

    config = transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 1}, vocab_size=97)
    model, states = Scaled(config).eval(), torch.randn(5, 128)
    assert head.factor_of(model, 128) is None
    got, _ = head.token_values(model, states, torch.arange(5), 1.0, False)
    torch.testing.assert_close(got, model.lm_head(states / 4).log_softmax(-1)[range(5), range(5)])

    class Broken(Scaled):
        def forward(self, input_ids=None, **kwargs):
            raise ValueError(kwargs)

    assert head.factor_of(Broken(config).eval(), 128) == 1


def test_a_head_that_is_more_than_a_matrix_is_computed_by_its_module():
    model = model_of("llama")
    assert head.is_one_matrix(model.lm_head)
    model.lm_head.register_forward_hook(lambda module, given, logits: 2 * logits)
    assert not head.is_one_matrix(model.lm_head)
    hidden, targets = torch.randn(4, model.lm_head.weight.shape[1]), torch.arange(4)
    got, _ = head.token_values(model, hidden, targets, 1.0, False)
    exact, _ = head.of_logits(2 * (hidden @ model.lm_head.weight.T), targets, 1.0, False)
    torch.testing.assert_close(got, exact)
