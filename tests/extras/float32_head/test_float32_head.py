"""A head in float32: the numbers by hand, the same in every path, and a smaller gap between engine and trainer on both sides."""

from copy import deepcopy
from dataclasses import replace

import head_gap  # benchmarks/head_gap.py
import pytest
import torch
import torch.nn.functional as F
from conftest import compose_config
from helpers.models import SIZES, batch_of, measured, model_of
from torch import nn, tensor

from grpo.config.in_memory import InMemory
from grpo.engines.builtin.engine import TransformersEngine, cache_for
from grpo.engines.builtin.llama import LlamaCache
from grpo.engines.protocol import Sampling
from grpo.engines.vllm.settings import check_head
from grpo.extras.float32_head import head as float32_head
from grpo.extras.float32_head.head import Float32Head, in_float32
from grpo.extras.forecast.imagined import in_sampling
from grpo.extras.teachers.divergence import Distributions
from grpo.models import head
from grpo.models.policy import Reference, with_adapter
from grpo.models.pretrained import Pretrained
from grpo.rollout.types import Plan
from grpo.system.errors import UserError

STATES = tensor([[16.0, 1.0], [2.0, 0.0]], dtype=torch.bfloat16)
WEIGHT = [[1.0, 1 / 16], [0.5, 0.0], [-1.0, 3 / 128]]


def a_head(dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(2, 3, bias=bias).to(dtype)
    layer.weight.data = tensor(WEIGHT, dtype=dtype)
    if bias:
        layer.bias.data = tensor([0.0, 1 / 32, 0.0], dtype=dtype)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("at_once", [2, 1 << 24])
def test_logits_are_not_rounded(monkeypatch, bias, at_once):
    """16 + 1/16 is none of bfloat16's numbers, whose distance there is 1/8. The matrix is read whole, or row by row."""
    monkeypatch.setattr(float32_head, "AT_ONCE", at_once)
    layer = a_head(bias=bias)
    assert layer(STATES)[0, 0] == 16
    layer.__class__ = Float32Head
    logits = layer(STATES[None])
    assert logits.dtype == torch.float32 and layer.weight.dtype == torch.bfloat16
    assert logits.tolist() == [[[16.0625, 8.0 + bias / 32, -16.0 + 3 / 128], [2.0, 1.0 + bias / 32, -2.0]]]


def test_autocast_does_not_reach_it():
    """A float32 matrix is used as it is: 1 + 1/1024 is 1 in bfloat16."""
    layer = a_head(torch.float32)
    layer.weight.data[1, 0] = 1 + 2**-10
    states = tensor([[1.0, 0.0]], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(states)[0, 1] == 1
        layer.__class__ = Float32Head
        logits = layer(states)
        logits[0, 1].backward()  # autocast must not round here either
    assert logits[0, 1].item() == 1 + 2**-10 and states.grad.tolist() == [[1 + 2**-10, 0]]
    assert layer.weight.grad.tolist() == [[0, 0], [1, 0], [0, 0]]


def test_autocast_does_not_reach_the_trainers_pass():
    model = in_float32(model_of("llama"))
    hidden = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    exact, _ = head.token_values(model, hidden, torch.arange(5), 1.0, False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head.token_values(model, hidden, torch.arange(5), 1.0, False)[0], exact)


def test_gradients_by_hand_are_in_the_number_type_of_the_matrix():
    layer = a_head()
    layer.__class__ = Float32Head
    states = STATES.clone().requires_grad_()
    (layer(states) * tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 4.0]])).sum().backward()
    assert states.grad.dtype == layer.weight.grad.dtype == torch.bfloat16
    assert states.grad.tolist() == [[2.0, 1 / 16], [-4.0, 3 / 32]]
    assert layer.weight.grad.tolist() == [[16, 1], [32, 2], [8, 0]]
    frozen = a_head().requires_grad_(False)
    frozen.__class__ = Float32Head
    frozen(states).sum().backward()
    assert frozen.weight.grad is None
    alone = a_head()  # the only part that learns
    alone.__class__ = Float32Head
    (alone(STATES) * tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 4.0]])).sum().backward()
    assert torch.equal(alone.weight.grad, layer.weight.grad)


def test_states_get_the_number_type_of_the_matrix():
    """As of a decoder under autocast below a float32 head: 16 + 1/16 of states in bfloat16."""
    layer = a_head(torch.float32)
    layer.__class__ = Float32Head
    logits = layer(STATES)
    logits[0, 0].backward()
    assert logits[0, 0].item() == 16.0625 and layer.weight.grad.tolist() == [[16, 1], [0, 0], [0, 0]]


class Scaled(nn.Linear):
    def forward(self, states):
        return 2 * super().forward(states)


def in_bfloat16(family: str = "llama") -> nn.Module:
    """Return a model in bfloat16 whose logits are large."""
    model = model_of(family)
    model.get_output_embeddings().weight.data.mul_(4)
    return in_float32(model.bfloat16())


@pytest.mark.parametrize("size", [3, 100])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "granite", "gemma3"])
def test_log_probabilities_are_those_of_exact_logits(monkeypatch, family, size):
    """In one chunk and in several, for a tied matrix, a factor after the head, and a cap that the model's own code computes."""
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", size * 97)
    model = in_bfloat16(family)
    weight, targets = model.get_output_embeddings().weight, torch.arange(10)
    hidden = torch.randn(10, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = hidden.float() @ weight.float().T
    exact = {"granite": exact / 8, "gemma3": 2 * torch.tanh(exact / 2)}.get(family, exact)
    logprobs, entropy = head.token_values(model, hidden, targets, 0.7, False)
    expected = (exact / 0.7).log_softmax(-1)
    torch.testing.assert_close(logprobs, expected[range(10), targets], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=1e-5)
    if family != "gemma3":  # a cap of 2 leaves less to round
        rounded = (hidden @ weight.T).float() / (8 if family == "granite" else 1) / 0.7
        assert (rounded.log_softmax(-1)[range(10), targets] - logprobs).abs().mean() > 1e-4


@pytest.mark.parametrize("size", [3, 100])
def test_the_gradients_are_those_of_exact_logits_up_to_rounding(monkeypatch, size):
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", size * 97)
    model = in_bfloat16()
    weight, targets = model.lm_head.weight, torch.arange(10)
    hidden = torch.randn(10, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    got = torch.autograd.grad(head.token_values(model, hidden, targets, 0.7, False)[0].sum(), (hidden, weight))
    states, matrix = (x.detach().float().requires_grad_() for x in (hidden, weight))
    logprobs = ((states @ matrix.T) / 0.7).log_softmax(-1)[range(10), targets]
    exact = torch.autograd.grad(logprobs.sum(), (states, matrix))
    for ours, theirs in zip(got, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs, atol=0.02 * float(theirs.abs().max()), rtol=0)


def test_every_layout_has_the_same_head():
    """In float32 it changes no number; in bfloat16 all layouts return float32 logits of their states."""
    plain, batch = model_of("llama"), batch_of(SIZES)
    exact = in_float32(deepcopy(plain))
    for layout in ("padded", "packed", "shared_prompt"):
        expected, got = measured(plain, batch, layout), measured(exact, batch, layout)
        assert torch.equal(got[0], expected[0]) and got[2].keys() == expected[2].keys()
        for name, gradient in expected[2].items():  # autograd multiplies in another order than `ExactProduct`
            torch.testing.assert_close(got[2][name], gradient, atol=0 if layout != "padded" else 1e-6, rtol=0, msg=name)
    low = in_bfloat16()
    padded, packed = (measured(low, batch, layout) for layout in ("padded", "packed"))
    assert (padded[0] - packed[0]).abs().mean() < 0.01
    for name, gradient in padded[2].items():
        assert F.cosine_similarity(gradient.flatten().float(), packed[2][name].flatten().float(), dim=0) > 0.99


def test_the_built_in_engine_takes_its_fastest_cache_in_float32_and_the_same_bits(toy):
    plain, exact = (Pretrained(str(toy), head_dtype=kind, head=in_float32).model() for kind in (None, "float32"))
    assert cache_for(exact) == cache_for(plain) == (LlamaCache, "")
    found = []
    for model in (plain, exact):
        engine = TransformersEngine()
        engine.load_weights(model, 0)
        found.append(engine.sample([[60, 61, 62]] * 4, head_gap.Sampling(8), range(4)))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def gaps() -> dict[tuple[str | None, str | None], float]:
    """The mean gap with each kind of head in the engine, and in the trainer."""
    models, found = head_gap.both(head_gap.policy(4096, 128, 2)), {}
    for of_engine in head_gap.DTYPES:
        engine = TransformersEngine()
        engine.load_weights(models[of_engine], 0)
        batch = head_gap.sampled(engine, 4096, 16, 32)
        for of_trainer in head_gap.DTYPES:
            found[of_engine, of_trainer] = float(head_gap.gap(models[of_trainer], batch).mean())
    return found


def test_the_gap_is_smaller_with_both_sides_in_float32_and_larger_with_one(gaps):
    assert 0 < gaps["float32", "float32"] < 0.9 * gaps[None, None]
    assert min(gaps["float32", None], gaps[None, "float32"]) > gaps[None, None] > gaps["float32", "float32"]


@pytest.mark.parametrize("settings", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter_on_the_head(settings):
    """LoRA adds its part to float32 logits, a trained copy of the head is one in float32, and below it the reference is too."""
    from peft import LoraConfig

    settings = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "r": 2, "init_lora_weights": False} | settings
    policy = with_adapter(in_bfloat16(), LoraConfig(**settings))
    hidden = torch.randn(6, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert head.has_float32_head(policy) and policy.get_output_embeddings()(hidden).dtype == torch.float32
    logprobs, _ = head.token_values(policy, hidden, torch.arange(6), 1.0, False)
    logprobs.sum().backward()
    learned = [name for name, p in policy.named_parameters() if p.grad is not None and "lm_head" in name]
    assert len(learned) == (2 if "lm_head" in settings["target_modules"] else 1)
    with Reference(policy).model() as reference, torch.no_grad():
        before, _ = head.token_values(reference, hidden, torch.arange(6), 1.0, False)
    exact = (hidden.float() @ in_bfloat16().lm_head.weight.float().T).log_softmax(-1)
    torch.testing.assert_close(before, exact[range(6), range(6)], atol=1e-5, rtol=1e-5)


def test_a_copy_a_teacher_and_a_saved_model_have_it(toy, tmp_path):
    model = Pretrained(str(toy), dtype="bfloat16", head_dtype="float32", head=in_float32).model()
    with Reference(model).model() as reference:
        assert type(reference.lm_head) is Float32Head
    states = torch.randn(3, model.config.hidden_size).bfloat16()
    exact = (states.float() @ model.lm_head.weight.float().T).log_softmax(-1)
    torch.testing.assert_close(Distributions(model, states).logprobs(slice(None), 1.0, exact.shape[1]), exact)
    model.save_pretrained(tmp_path)
    assert type(Pretrained(str(tmp_path)).model().lm_head) is nn.Linear
    assert type(Pretrained(str(tmp_path), head_dtype="float32", head=in_float32).outline().lm_head) is Float32Head
    given = InMemory(str(toy), head_dtype="float32", head=in_float32, given=Pretrained(str(toy)).model())
    assert type(given.model().lm_head) is type(given.model().lm_head) is Float32Head
    assert type(replace(given, head_dtype=None).model().lm_head) is nn.Linear  # the same object, in a run without it
    assert not head.has_float32_head(given.given)


@pytest.mark.parametrize("tied", [True, False])
def test_a_teacher_with_more_rows_keeps_it(toy, tmp_path, tied):
    """Its padding of the vocabulary is cut off, by which transformers makes another head."""
    from grpo.extras.teachers.kinds import Model

    policy = Pretrained(str(toy)).model()
    wide = Pretrained(str(toy)).model()
    if not tied:
        wide.config.tie_word_embeddings = False
        wide.lm_head.weight = torch.nn.Parameter(wide.lm_head.weight.detach().clone())
    wide.resize_token_embeddings(policy.config.vocab_size + 8)
    wide.save_pretrained(tmp_path)
    teacher = Model(Pretrained(str(tmp_path), head_dtype="float32", head=in_float32))
    teacher.attach(policy)
    assert teacher.loaded.lm_head.out_features == policy.config.vocab_size
    assert type(teacher.loaded.lm_head) is Float32Head


def test_what_has_no_such_head_is_one_line(toy):
    with pytest.raises(
        UserError, match=r"^model.head_dtype=float32 needs model.head, the function .* or set it to null$"
    ):
        Pretrained(str(toy), head_dtype="float32").model()
    with pytest.raises(UserError, match=r"model.head_dtype=bfloat16 is not float32, or null"):
        Pretrained(str(toy), head_dtype="bfloat16")
    for head_of in (nn.Sequential, lambda layer: Scaled(*layer.weight.shape[::-1])):  # Scaled would lose its factor
        model = model_of("llama")
        model.lm_head = head_of(model.lm_head)
        line = rf"a linear layer as the head, and that of LlamaForCausalLM is {type(model.lm_head).__name__}"
        with pytest.raises(UserError, match=line):
            in_float32(model)


@pytest.mark.parametrize(
    ("ours", "of_policy", "theirs", "of_vllm", "line"),
    [
        ("float32", "bfloat16", "bfloat16", "bfloat16", "only the policy computes the head in float32"),
        (None, "bfloat16", "float32", "bfloat16", "only vLLM computes the head in float32"),
        ("float32", "float32", "bfloat16", "bfloat16", "only the policy"),  # as with trainer.precision=bf16-mixed
        ("float32", "bfloat16", "float32", "bfloat16", ""),
        (None, "bfloat16", "bfloat16", "bfloat16", ""),
        (None, "bfloat16", "float32", "float32", ""),  # all of vLLM is in float32
        ("float32", "float32", "float32", "float32", ""),
        (None, "float32", "bfloat16", "bfloat16", ""),
        (None, "float32", "float32", "bfloat16", ""),  # nearer to a policy in float32
    ],
)
def test_one_side_alone_is_refused(ours, of_policy, theirs, of_vllm, line):
    model = model_of("llama").to(getattr(torch, of_policy))
    model = in_float32(model) if ours else model
    if not line:
        return check_head(model, getattr(torch, theirs), getattr(torch, of_vllm))
    with pytest.raises(UserError, match=f"^{line}.*; set model.head_dtype=float32, and leave engine.args.hf_overrides"):
        check_head(model, getattr(torch, theirs), getattr(torch, of_vllm))


def test_the_forecast_of_a_rollout_counts_logits_in_float32():
    """1,024 rows are sampled at once, which takes more than to read 8 prompts. Each logit has two bytes more; at temperature 1
    there is no copy in float32, of four."""
    for temperature, more in ((0.7, 2), (1.0, 2 - 4)):
        plan, sizes = Plan(8, 128, 1, Sampling(4, temperature=temperature)), []
        for ready in (lambda model: model, in_float32):
            model = ready(model_of("llama").bfloat16())
            sizes.append(in_sampling(model, torch.bfloat16, plan, 1, [*model.parameters()]))
        assert sizes[1] - sizes[0] == more * 1024 * model.config.vocab_size


def test_no_rows_have_no_logits_and_a_gradient():
    head = in_float32(model_of("llama").bfloat16()).get_output_embeddings()
    logits = head(torch.zeros(0, head.in_features, dtype=torch.bfloat16, requires_grad=True))
    logits.sum().backward()
    assert logits.shape == (0, head.out_features) and not head.weight.grad.any()


@pytest.mark.parametrize(
    ("engine", "teacher"), [("vllm", "model"), ("vllm_shared", "several"), ("vllm_server", "none")]
)
def test_the_setting_reaches_every_engine_and_teacher(engine, teacher):
    config = compose_config(f"engine={engine}", f"teacher={teacher}")
    for kind in ("float32", None):
        config.model.head_dtype = kind
        assert config.engine.args.hf_overrides == {"head_dtype": kind}
        if teacher != "none":
            model = config.teacher.model if teacher == "model" else config.teacher.each.model
            assert model.head_dtype == kind and model.head == config.model.head
