"""Caps, sinks, biases and chunks, with numbers by hand; what layers say of them reaches every kernel, cache and backward pass."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.architectures import alone, layout_of, made
from helpers.models import agree, batch_of, gap_now, measured
from torch import tensor
from transformers import AttentionInterface

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.builtin.kv_cache import KVCache
from grpo.extras.kernels.flex import FLEX
from grpo.extras.scores import weighed
from grpo.extras.scores.door import Chunk, with_caps
from grpo.extras.scores.own import biased
from grpo.extras.scores.weighed import Weighed
from grpo.models.gradient_checkpointing import recomputing
from grpo.models.logprobs import completion_logprobs
from grpo.models.packed_attention import How, Packed
from grpo.models.states import states_before
from grpo.models.trusted import MaskProbe

CPU = torch.device("cpu")
ROWS = [(9, [5, 8, 1]), (4, [2, 6])]


def test_a_sink_takes_a_share_of_the_softmax():
    """exp(scores) are 2 and 1, that of the sinks 1 and 5: the weights are a half and a quarter, then a quarter and an eighth."""
    scores = tensor([[[math.log(2) / 3, 0.0]] * 2])  # [1, H, S], before the scale of 3
    weights = Weighed(sinks=tensor([0.0, math.log(5)])).weights(scores, torch.zeros(1, 1, 2), 3.0)
    torch.testing.assert_close(weights, tensor([[[0.5, 0.25], [0.25, 0.125]]]))


def test_a_cap_comes_before_the_mask():
    """2 tanh(x / 2) of the scaled scores ln 3 and -ln 3 is 1 and -1; a key that is hidden has no weight, however high it is."""
    scores, mask = tensor([[[math.log(3), -math.log(3), 900.0]]]) / 0.5, tensor([[[0.0, 0.0, -torch.inf]]])
    weights = Weighed(cap=2.0).weights(scores, mask, 0.5)
    torch.testing.assert_close(weights, tensor([[[math.e**2, 1.0, 0.0]]]) / (math.e**2 + 1))
    far = Weighed(cap=2.0).weights(scores[..., :2] * 1e4, mask[..., :2], 0.5)  # 2 and -2
    torch.testing.assert_close(far, tensor([[[math.e**4, 1.0]]]) / (math.e**4 + 1))


@pytest.mark.parametrize("at_once", [1, 40, 1 << 22])
def test_scores_are_made_some_at_a_time_with_the_same_gradient(monkeypatch, at_once):
    """Two rows of 4 heads, 2 of them of keys, 3 queries and 5 keys: by queries, by rows, all of them. The gradients are those of
    a softmax over keys and sink, that of the sink too."""
    monkeypatch.setattr(weighed, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3), (4,)
    given = [torch.randn(*shape, generator=generator, requires_grad=True) for shape in shapes]
    query, key, value, sinks = given
    mask = torch.ones(3, 5, dtype=torch.bool).tril(2)
    scores = (query @ key.repeat_interleave(2, 1).mT) * 2**-0.5
    scores = (1.5 * torch.tanh(scores / 1.5)).masked_fill(~mask, -torch.inf)
    weights = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, 3, 1)], -1).softmax(-1)[..., :-1]
    expected, found = weights @ value.repeat_interleave(2, 1), Weighed(1.5, sinks)(query, key, value, mask, None)
    torch.testing.assert_close(found, expected)
    assert torch.equal(
        Weighed(1.5, sinks)(query, key, value, None, None), found
    )  # the last queries of a causal sequence
    error = torch.randn(found.shape, generator=generator)
    of_expected, of_found = (torch.autograd.grad(out, given, error) for out in (expected, found))
    assert min(gradient.abs().max() for gradient in of_found) > 0.1
    torch.testing.assert_close(of_found, of_expected)


def test_a_query_that_sees_nothing_gives_finite_numbers():
    """As of padding, whose values go through the next layers."""
    x = torch.randn(1, 1, 2, 4)
    assert Weighed(2.0)(x, x, x, tensor([[False, False], [True, False]]), None).isfinite().all()


def test_a_chunk_hides_the_chunks_before_it():
    assert How(window=Chunk(4)).hidden(torch.arange(10)).tolist() == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert How(window=4).hidden(torch.arange(6)).tolist() == [0, 0, 0, 0, 1, 2]
    assert not How().hidden(torch.arange(3)).any()
    of_prompts, of_rows = Packed([[1] * 5], [[[1] * 4]], CPU).dense_masks(How(window=Chunk(3)))
    first, second = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]], [[0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    assert of_prompts.int().tolist() == first + second
    rows = [[0, 0, 0, 1, 1, 1, 0, 0, 0], *([0] * 6 + own for own in ([1, 0, 0], [1, 1, 0], [1, 1, 1]))]
    assert of_rows[0, 0].int().tolist() == rows  # its tokens are the 6th to the 9th of the sequence


@pytest.mark.parametrize("count", [1, 2])
def test_a_bias_of_each_key_is_in_the_products(count):
    """4 heads, two of them of keys, which have a bias for all their queries, or one for each."""
    query, key, bias = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 5, 2), torch.randn(2 * count, 5)
    wide, other = biased(query, key, bias)
    assert wide.shape == (1, 4, 3, 10) and other.shape == (1, 2, 5, 10)
    expected = query @ key.repeat_interleave(2, 1).mT + bias.repeat_interleave(2 // count, 0)[:, None]
    torch.testing.assert_close(wide @ other.repeat_interleave(2, 1).mT, expected)


def test_a_large_bias_is_exact_in_16_bits():
    """1,414 at position 2,000 with a scale of 96 ** -0.5 is 13,855, which bfloat16 takes for 13,824: .3 % less."""
    nothing, bias = torch.zeros(1, 1, 1, 96, dtype=torch.bfloat16), torch.tensor([[1414.0]]) / 96**-0.5
    wide, other = biased(nothing, nothing, bias)
    found = (wide.float() @ other.float().mT).item() * 96**-0.5
    assert found == pytest.approx(1414, abs=0.02) and abs(bias.bfloat16().item() * 96**-0.5 - 1414) > 3


def test_an_encoder_with_caps_sees_both_ways():
    """Without a mask: equal keys, so each output is the mean of the values that are seen."""
    query, value = torch.zeros(1, 1, 2, 4), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1).expand(1, 1, 2, 4)
    attention, layer = with_caps(AttentionInterface()["sdpa"]), SimpleNamespace(is_causal=True, num_key_value_groups=1)
    for causal, seen in ((True, [1, 2]), (None, [1, 2]), (False, [2, 2])):
        out, _ = attention(layer, query, query, value, None, softcap=5.0, is_causal=causal)
        assert out[0, :, 0, 0].tolist() == seen


HOW = {"cap": How(0.3, 4, Weighed(1.5)), "sinks": How(None, Chunk(3), Weighed(None, tensor([1.0, -1.0])))}


@pytest.mark.filterwarnings("error:.*deprecated")
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_flex_attention_computes_the_same(how):
    """Uncompiled and without a gradient, since a CPU supports nothing else."""
    prompts, rows = [[1] * 9, [1] * 5], [[[1] * 7, [1] * 2], [[1] * 3]]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 640, 8, generator=generator) for heads in (2, 1, 1))
    with torch.no_grad():
        found = FLEX.attend(Packed(prompts, rows, CPU, FLEX), query, key, value, how).transpose(1, 2)
        plan = Packed([*prompts, [0] * (640 - 26)], [*rows, []], CPU)
        torch.testing.assert_close(found, plan.attend(0, query, key, value, how), atol=1e-5, rtol=0)


def test_chunks_and_temperatures_are_those_of_the_sequence_and_not_of_the_row():
    """Llama 4 with chunks of 6 tokens, whose queries get warmer at every 4th position in a layer without rotation."""
    warmer = {"no_rope_layers": [1, 0], "floor_scale": 4, "attn_scale": 0.5}
    model, batch = made("Llama 4, text", attention_chunk_size=6, **warmer), batch_of(ROWS)
    assert MaskProbe(model).wrong == ""
    exact = alone(model, batch)
    with torch.no_grad():
        for kernel in (None, FLEX):
            found, _ = completion_logprobs(model, batch, 0.8, layout="shared_prompt", kernel=kernel)
            torch.testing.assert_close(found, exact, atol=1e-5, rtol=0)
    engine = TransformersEngine()
    engine.load_weights(model, 0)
    assert gap_now(engine, model) < 1e-5 and engine.cache is KVCache


def test_the_decoder_of_a_llama_4_is_found_before_any_plan():
    """A critic asks for it; with padded rows and vLLM nothing follows a plan before. transformers gives the model itself."""
    model, batch = made("Llama 4, text"), batch_of(ROWS)
    assert "get_decoder" not in vars(type(model))  # no plan has changed this class
    assert model.get_decoder() is model.model is model.model.get_decoder()
    assert made("Qwen 3").get_decoder().__class__.__name__ == "Qwen3Model"
    states = states_before(model.get_decoder(), batch)
    logprobs = (
        (model.lm_head(states) / 0.8).log_softmax(-1).gather(1, batch.ids[:, batch.prompt_width :][batch.mask][:, None])
    )
    torch.testing.assert_close(logprobs[:, 0], alone(model, batch)[batch.mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["BLOOM", "Falcon RW", "Falcon 2", "Doge", "gpt-oss"])
def test_what_families_do_with_their_scores_is_in_each_row(name):
    assert layout_of(made(name), batch_of(ROWS)) == "shared_prompt"


def test_a_plan_reaches_layers_that_pass_nothing_on_also_when_they_are_computed_again():
    """StableLM's layers keep the arguments of the model to themselves."""
    model, batch = made("StableLM"), batch_of(ROWS)
    assert layout_of(model, batch) == "shared_prompt"
    with recomputing(model):
        agree(model, batch, "shared_prompt")


def test_a_capped_model_is_capped_by_sdpa_too():
    """Which transformers leaves out: Gemma 2 with scores of at most 0.5 is another model without."""
    model, batch = made("Gemma 2", attn_logit_softcapping=0.5), batch_of(ROWS)
    assert model.config._attn_implementation == "sdpa"
    exact, (padded, _, _) = alone(model, batch), measured(model, batch, "padded")
    torch.testing.assert_close(padded, exact, atol=1e-5, rtol=0)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (measured(model, batch, "padded")[0] - exact).abs().max() > 1e-3
