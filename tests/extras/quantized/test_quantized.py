"""Bases in 4 and 8 bits under an adapter: one policy for the trainer, the engines and whoever loads the adapter again."""

import sys

import pytest
import torch
from helpers.models import PROMPTS, SIZES, agree, batch_of, disturb, gap_now, model_of
from torch import nn

from grpo.apps.cli import check_model
from grpo.config.in_memory import InMemory
from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.weights import checkpoint
from grpo.extras.quantized.quantized import Quantized, quantize
from grpo.models.policy import with_adapter
from grpo.models.pretrained import Pretrained
from grpo.system.errors import UserError

functional = pytest.importorskip("bitsandbytes.functional")  # the environment of vLLM lacks it

IDS = torch.tensor([PROMPTS[1]])


@pytest.fixture(params=["4bit", "8bit"])
def bits(request) -> str:
    return request.param


@pytest.fixture
def policy(toy, bits):
    from peft import LoraConfig

    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    return with_adapter(Pretrained(str(toy), quantization=bits, quantizer=quantize).model(), config)


def layer_of(rows: list[list[float]], bits: str) -> Quantized:
    linear = nn.Linear(len(rows[0]), len(rows))
    linear.weight.data, linear.bias.data = torch.tensor(rows), torch.tensor([0.5] * len(rows))
    return Quantized(linear, bits)


def test_8_bits_divide_the_largest_weight_of_a_row_by_127():
    layer = layer_of([[127.0, -63.6, 0.4], [0.0, 0.0, 0.0], [-1.27, 0.026, 0.0]], "8bit")
    assert layer.weight.tolist() == [[127, -64, 0], [0, 0, 0], [-127, 3, 0]]
    assert layer.dequantized().flatten().tolist() == pytest.approx([127, -64, 0, 0, 0, 0, -1.27, 0.03, 0])
    assert layer(torch.tensor([[1.0, 1.0, 0.0]])).flatten().tolist() == pytest.approx([63.5, 0.5, -0.74])
    x = torch.ones(1, 3, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.flatten().tolist() == pytest.approx([127 - 1.27, -64 + 0.03, 0])  # sums over the rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_4_bits_are_those_of_bitsandbytes(dtype):
    torch.manual_seed(0)
    linear = nn.Linear(128, 150, dtype=dtype)  # 300 scales: two scales of scales
    layer = Quantized(linear, "4bit")
    codes, state = functional.quantize_4bit(
        linear.weight.data, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    assert torch.equal(layer.weight, codes) and torch.equal(
        layer.dequantized(), functional.dequantize_4bit(codes, state)
    )
    with torch.device("meta"):  # the memory forecast has tensors without memory
        outline = Quantized(nn.Linear(128, 150, dtype=dtype), "4bit")
    for name, part in [*layer.named_parameters(), *layer.named_buffers()]:
        assert getattr(outline, name).is_meta and getattr(outline, name).shape == part.shape, name


def test_the_bytes_that_a_weight_takes():
    torch.manual_seed(0)
    linear = nn.Linear(1024, 1024, bias=False)
    for bits, size in (("4bit", 0.5 + 1 / 64 + 4 / 64 / 256), ("8bit", 1 + 4 / 1024)):
        layer = Quantized(linear, bits)
        stored = sum(x.nbytes for x in [layer.weight, *layer.buffers()])
        assert stored / 1024**2 == pytest.approx(size, abs=0.0011)  # a table of 256 numbers


class Doubling(nn.Linear):
    """A layer that computes in its own way."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_what_is_not_quantized_computes_as_before_and_is_frozen():
    model = model_of("qwen2")
    own = model.model.layers[0].mlp.down_proj
    own.__class__ = Doubling
    expected = own(x := torch.ones(1, own.in_features))
    quantize(model, "8bit")
    assert torch.equal(model.model.layers[0].mlp.down_proj(x), expected)
    assert not any(p.requires_grad for p in model.parameters())


def test_every_layout_has_the_logprobs_and_gradients_of_the_padded_one(bits):
    from peft import LoraConfig

    model = with_adapter(
        quantize(model_of("qwen2"), bits), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    )
    disturb(model, seed=2)
    agree(model, batch_of(SIZES), "shared_prompt")


@torch.no_grad()
def test_engines_and_files_have_the_policy_that_learns(toy, policy, bits, tmp_path):
    layers = [each for each in policy.modules() if isinstance(each, Quantized)]
    assert len(layers) == 7 * policy.config.num_hidden_layers  # all but the head
    engine = TransformersEngine()
    engine.load_weights(policy, 0)
    assert gap_now(engine, policy) < 1e-5

    expected = policy(IDS).logits
    sent = Pretrained(str(toy)).model()
    assert (sent(IDS).logits - expected).abs().max() > 0.01
    names = [name for name, _ in checkpoint(sent)]
    sent.load_state_dict(dict(tensors := [*checkpoint(policy)]), strict=False)
    assert [name for name, _ in tensors] == names
    assert torch.allclose(sent(IDS).logits, expected, atol=1e-5)

    policy.save_pretrained(tmp_path)
    assert torch.allclose(
        Pretrained(str(tmp_path), quantization=bits, quantizer=quantize).model()(IDS).logits, expected, atol=1e-5
    )


def test_what_cannot_be_quantized_is_refused(toy, toy_model, bits, monkeypatch):
    from conftest import compose_config

    def refused(pretrained: Pretrained, **settings) -> str:
        with pytest.raises(UserError) as error:
            pretrained.model(**settings)
        return str(error.value)

    pretrained = Pretrained(str(toy), quantization=bits, quantizer=quantize)
    for adapter, line in (("none", "frozen: set adapter=lora"), ("lora", "")):
        config = compose_config("output_dir=.", f"adapter={adapter}")
        if line:
            with pytest.raises(UserError, match=line):
                check_model(pretrained, config)
        else:
            check_model(pretrained, config)
    assert "strategy=ddp" in refused(pretrained, mapped=True)
    assert "an object has plain weights" in refused(InMemory(str(toy), quantization=bits, given=toy_model))
    with pytest.raises(UserError, match="GPT2LMHeadModel has no linear layers"):
        quantize(model_of("gpt2"), bits)
    if bits == "4bit":
        monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
        assert refused(pretrained) == "model.quantization=4bit needs bitsandbytes: pip install -e '.[8bit]'"
