"""Layers of a Llama on a CPU with gradients by hand: what autograd gives of the plain formulas, and of transformers' layers."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.learning import make_module
from helpers.models import model_of
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.builtin.kv_cache import KVCache
from grpo.engines.builtin.llama import LlamaCache, is_plain_llama
from grpo.engines.protocol import Sampling
from grpo.extras.kernels import on_cpu
from grpo.extras.kernels.callback import KernelsCallback
from grpo.extras.kernels.on_cpu import GatedMLP, Norm, OwnLinear, Projection, Queries, use_own, use_products
from grpo.models import packing
from grpo.models.logprobs import completion_logprobs
from grpo.models.packing import few_tokens

T = 11  # rows, in pieces of 3 or fewer


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return (x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]).transpose(0, 1)[None]


def plain_queries(x, q, k, v, cos, sin):
    query, key, value = (F.linear(x, weight).view(T, -1, 4) for weight in (q, k, v))
    return turned(query, cos, sin), turned(key, cos, sin), value.transpose(0, 1)[None]


TABLES = [
    table.repeat(1, 2)
    for angle in [torch.arange(T)[:, None] * torch.tensor([1.0, 0.1])]
    for table in (angle.cos(), angle.sin())
]
CASES = {
    "product": (Projection.apply, F.linear, [(T, 6), (8, 6)], []),
    "queries": (Queries.apply, plain_queries, [(T, 6), (8, 6), (4, 6), (4, 6)], TABLES),
    "norm": (
        lambda *given: Norm.apply(*given)[0],
        lambda x, weight, eps: weight * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt(),
        [(T, 6), (6,)],
        [0.1],
    ),
    "mlp": (
        GatedMLP.apply,
        lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
        [(T, 6), (8, 6), (8, 6), (6, 8)],
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_autograd(name, monkeypatch):
    monkeypatch.setattr(on_cpu, "CACHED", 24)
    own, plain, shapes, more = CASES[name]
    torch.manual_seed(0)
    found = []
    inputs = [torch.randn(shape) for shape in shapes]
    directions = None
    for function in (own, plain):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves, *more)
        out = out if isinstance(out, tuple) else (out,)
        directions = directions or [torch.randn_like(each) for each in out]
        loss = sum((each * direction).sum() for each, direction in zip(out, directions, strict=True))
        found.append([*out, *torch.autograd.grad(loss, leaves)])
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() <= 1e-6 * max(1, b.abs().max())


def llama(**more) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "vocab_size": 97, "head_dim": 8}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=3, num_key_value_heads=1, **shape | more)).eval()
    for p in model.parameters():
        p.data += torch.randn_like(p) * 0.1
    return model


def passed(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs, _ = completion_logprobs(model, few_tokens(model), 1.0, layout="shared_prompt")
    model.zero_grad()
    logprobs.sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def test_a_model_has_the_same_gradients(monkeypatch):
    model = llama()
    logprobs, gradients = passed(model)
    assert not use_own(model, "auto")  # a small one: the demo's numbers stay as they are
    monkeypatch.setattr(on_cpu, "SMALL", 0)
    assert not use_own(model, "none") and use_own(model, "auto")
    calls, projected = [], on_cpu.projected
    monkeypatch.setattr(on_cpu, "projected", lambda x, weight: (calls.append(weight.shape), projected(x, weight))[1])
    own, of_own = passed(model)
    assert len(calls) == 3 * 7 * 3  # in each layer q, k, v, o, gate, up, down, and the gradients of both factors
    assert (own - logprobs).abs().max() < 1e-5
    for name, gradient in gradients.items():
        assert (of_own[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
    assert is_plain_llama(model)  # the built-in engine still computes it by itself
    ids = torch.arange(5)[None]
    with torch.inference_mode():  # transformers' own cache still holds what was read
        kept = model(ids[:, :4], use_cache=True).past_key_values
        stepped = model(ids[:, 4:], past_key_values=kept).logits[0, -1]
        torch.testing.assert_close(stepped, model(ids).logits[0, -1], atol=1e-5, rtol=0)


@pytest.mark.skipif(on_cpu.BFLOAT16 is None, reason="this processor has no products in bfloat16")
def test_under_autocast_products_are_in_bfloat16(monkeypatch):
    """Weights and their gradients are in float32, which are as near to those without autocast as with transformers' layers."""
    monkeypatch.setattr(on_cpu, "SMALL", 0)
    model = llama()
    _, exact = passed(model)
    dtypes, projected = [], on_cpu.projected
    monkeypatch.setattr(on_cpu, "projected", lambda x, weight: (dtypes.append(x.dtype), projected(x, weight))[1])
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        found.append(passed(model))
        assert not dtypes and use_own(model, "auto")
        dtypes.clear()
        found.append(passed(model))
    assert dtypes == 3 * 7 * 3 * [torch.bfloat16]
    (logprobs, theirs), (own, ours) = found
    assert (own - logprobs).abs().max() < 0.05
    for name, gradient in exact.items():
        errors = [float((given[name] - gradient).norm() / gradient.norm()) for given in (ours, theirs)]
        assert ours[name].dtype == torch.float32 and errors[0] <= max(1.5 * errors[1], 0.01), (name, errors)


def test_a_norms_output_is_not_kept_unless_something_changes_it(monkeypatch):
    """Three tensors of 16 tokens, 24 wide, in a layer: the states before both norms, and what is attended. A hook that halves
    a norm's output in place is seen by the gradients."""
    monkeypatch.setattr(on_cpu, "SMALL", 0)
    model, kept = llama(), []
    assert use_own(model, "auto")
    ids = torch.arange(16)[None]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        model.model(ids, use_cache=False)
    places = {tensor.data_ptr() for tensor in kept if tensor.shape == (16, 24)}
    assert len(places) == 3 * 3 + 1  # and those before the last norm
    layer = model.model.layers[1]
    layer.input_layernorm.register_forward_hook(lambda module, given, made: made.mul_(0.5))
    exact = llama()
    exact.load_state_dict(model.state_dict())
    exact.model.layers[1].input_layernorm.register_forward_hook(lambda module, given, made: made * 0.5)
    for each in (model, exact):
        each.zero_grad()
        each(ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= 1e-5 * q.grad.abs().max(), name


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
def test_an_adapter_of_any_matrix_keeps_the_layers_and_learns(name, monkeypatch):
    """It begins as nothing, so that numbers would agree without it."""
    monkeypatch.setattr(on_cpu, "SMALL", 0)
    policy = get_peft_model(llama(), LoraConfig(r=2, target_modules=[name], task_type="CAUSAL_LM"))
    assert not use_own(policy, "auto")
    logprobs, _ = completion_logprobs(policy, few_tokens(policy), 1.0, layout="shared_prompt")
    logprobs.sum().backward()
    learned = {name: p.grad.abs().max() for name, p in policy.named_parameters() if "lora_B" in name}
    assert len(learned) == 3 and min(learned.values()) > 0


@pytest.mark.parametrize(("family", "products"), [("qwen2", 14 * 3), ("gemma3", 14 * 3), ("llama", 14 + 14 - 3)])
def test_products_of_another_family_are_onednns(family, products, monkeypatch):
    """Two layers have 14 matrices, with a bias or without. Below an adapter they are frozen: no product is for their own
    gradient, nor for that of the embedded tokens, which three of them read. The adapter's matrices are small."""
    model, exact = (model_of(family, lora=family == "llama") for _ in range(2))
    monkeypatch.setattr(on_cpu, "CACHED", 4096)
    assert not use_products(model, "auto")  # a small one
    monkeypatch.setattr(on_cpu, "SMALL", 0)
    assert not use_products(model, "none") and use_products(model, "auto")
    assert type(model.get_output_embeddings()) is nn.Linear
    assert sum(type(module) is OwnLinear for module in model.modules()) == 14
    calls, projected = [], on_cpu.projected
    monkeypatch.setattr(on_cpu, "projected", lambda x, weight: (calls.append(1), projected(x, weight))[1])
    (logprobs, gradients), (wanted, of_exact) = passed(model), passed(exact)
    assert (logprobs - wanted).abs().max() < 1e-5 and gradients.keys() == of_exact.keys() and len(calls) == products
    for name, gradient in of_exact.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-5 * max(gradient.abs().max(), 1e-3), name
    # a plain Llama, as of layout=padded, keeps the layers that its engine packs, and nothing is done twice
    for other in (model_of("llama"), model_of(family).to(torch.bfloat16), model):
        assert not use_products(other, "auto")
    monkeypatch.setattr(on_cpu, "projected", lambda x, weight: 1.001 * projected(x, weight))
    assert not use_products(model_of(family), "auto")


@pytest.mark.parametrize(
    ("family", "layout", "layers", "cache"),
    [
        ("qwen2", "padded", "transformers with oneDNN's products", KVCache),
        ("llama", "shared_prompt", "own", LlamaCache),
        ("llama", "padded", "transformers", LlamaCache),
    ],
)
def test_a_run_samples_with_what_its_update_has(family, layout, layers, cache, monkeypatch):
    monkeypatch.setattr(packing, "ON_GPU", [])  # the callback puts its kernel there
    monkeypatch.setattr(on_cpu, "SMALL", 0)
    monkeypatch.setattr(on_cpu, "CACHED", 4096)
    module, callback = make_module(model_of(family), layout=layout), KernelsCallback("auto")
    precision = SimpleNamespace(forward_context=nullcontext)
    callback.on_train_start(SimpleNamespace(precision_plugin=precision), module)
    assert callback.facts()["kernels"]["layers"] == layers
    calls, projected = [], on_cpu.projected
    monkeypatch.setattr(on_cpu, "projected", lambda x, weight: (calls.append(1), projected(x, weight))[1])
    engine = TransformersEngine()
    engine.load_weights(module.policy, 0)
    engine.choose()
    calls.clear()
    engine.sample([(5, 6, 7)], Sampling(3), [0])
    assert engine.cache is cache and bool(calls) == (family == "qwen2")


def test_what_differs_keeps_its_layers(monkeypatch, caplog):
    monkeypatch.setattr(on_cpu, "SMALL", 0)
    assert not use_own(llama(mlp_bias=True), "auto") and not use_own(llama(hidden_act="gelu"), "auto")
    assert not use_own(llama().to(torch.bfloat16), "auto")
    with torch.autocast("cpu", torch.float16):
        assert not use_own(llama(), "auto")
    monkeypatch.setattr(on_cpu, "BFLOAT16", None)  # a processor without such products
    with torch.autocast("cpu", torch.bfloat16):
        assert not use_own(llama(), "auto")
    model = llama()
    monkeypatch.setattr(on_cpu, "projected", lambda x, weight: 1.1 * F.linear(x, weight))
    assert not use_own(model, "auto") and "keeps transformers' layers: log-probabilities differ" in caplog.text
    assert not any(
        isinstance(module, tuple(on_cpu.OWN.values())) for module in model.modules() if isinstance(module, nn.Module)
    )
