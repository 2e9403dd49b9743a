"""Kernels that fail in the middle of an update: its gradient is that of the computation in their place, and the run goes on."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import MethodType, SimpleNamespace

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
import torch.nn.functional as F
import transformers
from helpers.learning import make_module, rollout
from helpers.models import disturb, model_of
from torch import Tensor

from grpo.extras.kernels import fallback, flex, liger
from grpo.extras.kernels.callback import KernelsCallback
from grpo.extras.kernels.fallback import WithoutKernels
from grpo.extras.kernels.flex import FLEX, FlexKernel
from grpo.extras.kernels.liger import LIGER, LigerKernels, fall_back
from grpo.extras.preflight.learning import gradient_of
from grpo.models import head, packing, token_scores
from grpo.models.compiled import Compiled
from grpo.system.errors import StopError, UserError
from grpo.training.module import GRPOModule

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 97, "max_position_embeddings": 64, "initializer_range": 0.1, "eos_token_id": 1,
}  # fmt: skip
LOST = "FlexAttention failed (RuntimeError: planted: too many graphs): attention is computed by sdpa, which is"


class Broken(torch.autograd.Function):
    """Gives back its argument, and counts its backward passes, of which some fail."""

    @staticmethod
    def forward(ctx, x: Tensor, planted: "Planted") -> Tensor:
        ctx.planted = planted
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.planted.passed_back += 1
        if ctx.planted.fails_back(ctx.planted.passed_back):
            raise ctx.planted.error
        return gradient, None


class Planted:
    """Attention by a kernel's mask, which fails at some of its calls, counted from 1, or in some of its backward passes. It keeps
    other tensors than attention by sdpa."""

    def __init__(self, fails: Callable[[int], bool], backward: bool = False, error: Exception | None = None) -> None:
        self.calls = self.passed_back = 0
        never = lambda number: False  # noqa: E731
        self.fails, self.fails_back = (never, fails) if backward else (fails, never)
        self.error = error or RuntimeError("planted: too many graphs\nmore lines")

    def counted(self) -> None:
        self.calls += 1
        if self.fails(self.calls):
            raise self.error

    def __call__(self, query, key, value, block_mask, scale, enable_gqa) -> Tensor:
        self.counted()
        places = torch.arange(query.shape[2])
        sees = block_mask.mask_mod(0, 0, places[:, None], places)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scale, enable_gqa=enable_gqa)
        return Broken.apply(out, self)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Kernels as in a process that has not used them, in short blocks. Errors of this file are those of FlexAttention."""
    monkeypatch.setattr(FLEX, "failed", "")
    monkeypatch.setattr(LIGER, "failed", "")
    monkeypatch.setattr(FlexKernel, "code", (*FlexKernel.code, __file__))
    monkeypatch.setattr(flex, "BLOCK", 16)
    monkeypatch.setattr(flex, "FEWEST", 1)


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    disturb(model, seed=1)
    return model


def updating(policy: torch.nn.Module, kernel=None, recompute: bool = False, used=(FLEX,)) -> GRPOModule:
    """Return a module that keeps the gradient of each update as `made`, and makes no step. An update has two microbatches: of 8
    tokens, then of 6."""
    module = make_module(policy, max_tokens_per_microbatch=8)
    module.optim = replace(module.optim, gradient_checkpointing=recompute)
    vars(module)["layout"] = "shared_prompt", kernel
    module.at_once, made = WithoutKernels(8, used), []

    def step(minibatch, means) -> bool:
        made.append({name: p.grad.clone() for name, p in policy.named_parameters()})
        module.optimizers().zero_grad()
        return True

    module.step, vars(module)["made"] = step, made
    return module


def gradient(module: GRPOModule) -> dict[str, Tensor]:
    module.training_step(rollout(), 0)
    return module.made[-1]


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys() and max(g.abs().max() for g in expected.values()) > 0.05
    for name, values in expected.items():
        torch.testing.assert_close(got[name], values, atol=1e-5, rtol=0, msg=name)


def warnings(caplog) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


# calls of an update: without recomputed layers 1-4 of the first microbatch, 5-8 of the second. With them 1-4, and 5-8 in its
# backward pass, which begins with the last layer; then 9-12, and 13-16
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("later", "numbers"), [(False, (1, 3, 5, 6, 7)), (True, (3, 6, 11))])
def test_attention_that_fails_in_a_forward_pass(monkeypatch, caplog, recompute, later, numbers):
    """later: its later calls fail too, as those that recompute layers before the one at which it failed first."""
    expected = gradient(updating(policy := small()))
    for k in numbers:
        FLEX.failed = ""
        planted = Planted(lambda number, k=k: number == k or (later and number > k))
        monkeypatch.setattr(flex, "flex_attention", planted)
        module = updating(policy, FLEX, recompute)
        assert_equal(gradient(module), expected)
        failed = k <= planted.calls
        assert [line[: len(LOST)] for line in warnings(caplog)] == [LOST] * failed, (k, planted.calls)
        assert bool(FLEX.failed) == failed and failed == (recompute or k < 11)
    calls = planted.calls
    assert_equal(gradient(module), expected)
    assert (planted.calls == calls) == failed  # the next update is sdpa's


@pytest.mark.parametrize("recompute", [False, True])
def test_attention_that_fails_in_a_backward_pass(monkeypatch, caplog, recompute):
    """The fifth of them is of the second microbatch, when the first has added its gradient."""
    expected = gradient(updating(policy := small()))
    for k in (1, 3, 5):
        FLEX.failed = ""
        monkeypatch.setattr(flex, "flex_attention", planted := Planted(lambda number, k=k: number == k, backward=True))
        module = updating(policy, FLEX, recompute)
        assert_equal(gradient(module), expected)
        assert planted.passed_back == k and len(warnings(caplog)) == 1
        assert_equal(gradient(module), expected)
        assert planted.passed_back == k and not warnings(caplog)


def test_the_trial_says_why_a_backward_pass_fails(monkeypatch, caplog):
    """Or a forward pass, as on a T4, whose memory for a block of threads is too small for some kernels."""
    for backward in (False, True):
        FLEX.failed = ""
        monkeypatch.setattr(flex, "flex_attention", Planted(lambda number: True, backward))
        why = FLEX.objection(small(), "shared_prompt", packing.disagreement)
        assert why == FLEX.failed == "RuntimeError: planted: too many graphs"
        assert len(warnings(caplog)) == 1


def test_an_error_that_is_not_the_kernels_ends_the_run(monkeypatch, caplog):
    """A model's own error, memory, and a wish to stop. Memory is left to the microbatches."""
    monkeypatch.undo()
    monkeypatch.setattr(FLEX, "failed", "")
    for recompute in (False, True):  # call 6 is of the second microbatch, or recomputes a layer
        policy, calls = small(), []

        def broken(module, given, calls=calls):
            calls.append(module)
            if len(calls) == 6:
                raise RuntimeError("of the model")

        for layer in policy.model.layers:
            layer.mlp.register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="of the model"):
            gradient(updating(policy, None, recompute))
        assert len(calls) == 6
    monkeypatch.setattr(FlexKernel, "code", (*FlexKernel.code, __file__))
    for error in (torch.OutOfMemoryError("of the GPU"), StopError("SIGTERM")):
        for backward in (False, True):
            planted = Planted(lambda number: True, backward, error)
            monkeypatch.setattr(flex, "flex_attention", planted)
            module = updating(small(), FLEX)
            with pytest.raises(type(error)):
                gradient(module)
            assert module.at_once.most == (7 if isinstance(error, RuntimeError) else 8)  # the longest row has 7
    assert not FLEX.failed and not [line for line in warnings(caplog) if "FlexAttention" in line]


def test_of_several_devices_one_does_not_make_the_update_again(monkeypatch):
    """The others wait for its gradient. In a forward pass it continues by sdpa alone, which is no message."""
    monkeypatch.setattr(fallback, "distributed", SimpleNamespace(world_size=lambda: 2))
    expected = gradient(updating(small()))
    monkeypatch.setattr(flex, "flex_attention", Planted(lambda number: number == 3))
    assert_equal(gradient(updating(small(), FLEX, recompute=True)), expected)
    FLEX.failed = ""
    monkeypatch.setattr(flex, "flex_attention", Planted(lambda number: number == 3, backward=True))
    line = r"FlexAttention failed in an update, which several devices make together \(RuntimeError: planted: too many graphs\)"
    with pytest.raises(UserError, match=f"{line}: set optim.layout=padded, and resume the run"):
        gradient(updating(small(), FLEX))


def test_the_preflights_gradient_is_made_again_too(monkeypatch, caplog):
    found = []
    for kernel in (None, FLEX):
        monkeypatch.setattr(flex, "flex_attention", Planted(lambda number: number == 2, backward=True))
        module = updating(small(), kernel)
        trainer = SimpleNamespace(optimizers=[module.optimizers()])
        monkeypatch.setattr(GRPOModule, "trainer", trainer, raising=False)
        tokens = replace(module.weighed(rollout().tokens, 4.0), advantages=rollout().tokens.mask.float())
        found.append(gradient_of(SimpleNamespace(module=module, sleep=lambda: None), tokens, 2))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)
    assert len(warnings(caplog)) == 1 and found[0].abs().max() > 0.05


@pytest.mark.parametrize("family", ["llama_tied", "gemma3"])
def test_a_head_that_fails(monkeypatch, caplog, family):
    """At once, in either pass. The head of Gemma 3 caps its logits, so that chunks of 5 tokens are recomputed."""
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", 5 * 97)
    expected = gradient(updating(model_of(family)))
    for name in ("forward", "backward"):
        plain = getattr(token_scores, name).function
        for k in (1, 2, 3):
            planted, function = Planted(lambda number, k=k: number >= k), Compiled(plain, ("cpu",))

            def compiled(*given, planted=planted, plain=plain):
                planted.counted()
                return plain(*given)

            vars(function)["compiled"] = compiled
            monkeypatch.setattr(token_scores, name, function)
            assert_equal(gradient(updating(model_of(family))), expected)
            [line] = warnings(caplog)
            assert line.startswith(f"{plain.__name__} is not compiled (RuntimeError: planted: too many graphs)")
            assert planted.calls == k
        monkeypatch.setattr(token_scores, name, Compiled(plain))


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_that_fail(monkeypatch, caplog, recompute):
    """Norms with a kernel: nine in a pass. A pass without a gradient goes on at once."""
    monkeypatch.setattr(LigerKernels, "code", (__file__,))
    expected = gradient(updating(small()))
    line = "Liger failed (RuntimeError: planted: too many graphs): norms, rotary embeddings and MLPs are computed by"

    def with_kernels(planted: Planted) -> torch.nn.Module:
        def norm(self, x):
            planted.counted()
            kept = x * torch.ones_like(x)  # a tensor more than the class keeps for the backward pass, as kernels may
            return Broken.apply(type(self).forward(self, kept), planted)

        policy = small()
        for module in policy.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = MethodType(norm, module)
        fall_back(policy)
        return policy

    for backward, k in ((False, 4), (False, 12), (True, 4), (True, 12)):
        LIGER.failed = ""
        planted = Planted(lambda number, k=k: number >= k, backward)
        module = updating(with_kernels(planted), None, recompute, (LIGER,))
        assert_equal(gradient(module), expected)
        assert [text[: len(line)] for text in warnings(caplog)] == [line]
        calls = planted.calls
        assert_equal(gradient(module), expected)
        assert planted.calls == calls and not warnings(caplog)
    LIGER.failed, ids = "", torch.arange(2, 12)[None]
    with torch.no_grad():
        exact = small()(ids).logits
        torch.testing.assert_close(with_kernels(Planted(lambda number: number == 4))(ids).logits, exact)
    assert [text[: len(line)] for text in warnings(caplog)] == [line]
    monkeypatch.setattr(liger, "takes_liger", lambda *_: True)
    assert liger.use_liger(small(), "auto") == [] and not warnings(caplog)


def test_memory_is_counted_again_when_a_kernel_is_lost(monkeypatch, caplog):
    """After the update, once; and at the start of a run, if the trial has failed. Not if nobody wants a forecast."""
    precision, line = (
        SimpleNamespace(forward_context=nullcontext),
        "memory: without %s an update takes by the forecast 2 GB",
    )
    trainer = SimpleNamespace(precision_plugin=precision)
    monkeypatch.setattr(packing, "ON_GPU", [])
    monkeypatch.setattr(token_scores, "forward", Compiled(token_scores.forward.function))
    for parts in (["some"], []):
        FLEX.failed, token_scores.forward.failed = "", False
        callback, module = KernelsCallback("none"), updating(small(), FLEX)
        callback.parts, callback.sizes = parts, SimpleNamespace(again=lambda *given: lambda: f"{len(given)} GB")
        callback.on_train_start(trainer, module)
        assert not warnings(caplog)
        monkeypatch.setattr(flex, "flex_attention", Planted(lambda number: number == 2))
        gradient(module)
        assert warnings(caplog)[1:] == [line % "FlexAttention"] * len(parts)
        gradient(module)
        assert not warnings(caplog)
        token_scores.forward.failed = True
        gradient(module)
        assert warnings(caplog) == [line % "FlexAttention and the compiled head"] * len(parts)
    callback = KernelsCallback("none")
    callback.parts, callback.sizes, callback.lost = ["some"], SimpleNamespace(again=lambda *given: lambda: "2 GB"), []
    callback.on_train_start(trainer, updating(small()))
    assert warnings(caplog) == [line % "FlexAttention and the compiled head"]


def test_a_run_knows_the_kernels_that_it_has_lost(monkeypatch, caplog):
    """The callback says what it does before it does it, gives the module its limit, whose tokens stay, and the manifest the
    reason. The head believes that it is on a GPU."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(packing, "ON_GPU", [])  # the callback puts its kernel there
    monkeypatch.setattr(token_scores.forward, "devices", ("cpu",))
    module, callback = updating(small(), FLEX), KernelsCallback("none")
    module.at_once.most, precision = 7, SimpleNamespace(forward_context=nullcontext)
    callback.on_train_start(SimpleNamespace(precision_plugin=precision), module)
    what = "kernels: compiling and comparing attention, head and layers: "
    found = "kernels: layout shared_prompt, attention flex, head compiled, layers transformers"
    assert caplog.messages == [what + "this may take minutes", what + "done in 0 s", found]
    assert module.at_once == WithoutKernels(7, (FLEX,)) and "failed" not in callback.facts()["kernels"]
    FLEX.fail(RuntimeError("gone"))
    kernels = callback.facts()["kernels"]
    assert kernels["attention"] == "flex" and kernels["failed"] == {"FlexAttention": "RuntimeError: gone"}


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True])
def test_a_backward_pass_that_torch_cannot_compile_or_run(monkeypatch, caplog, compiles):
    """dynamo's own graphs of FlexAttention. The trial before the first rollout finds it, and so does an update."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    monkeypatch.undo()  # errors of this file are not the kernel's
    monkeypatch.setattr(FLEX, "failed", "")
    torch._dynamo.reset()
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)

    def broken(*given):
        raise RuntimeError("no kernel for the backward pass")

    def backward(graph, inputs):
        if not compiles:
            broken()
        broken._boxed_call = True
        return broken

    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=backward)
    function = torch.compile(torch_flex.flex_attention, dynamic=True, fullgraph=True, backend=backend)
    monkeypatch.setattr(flex, "flex_attention", function)
    expected = gradient(updating(small()))
    for recompute in (False, True):
        FLEX.failed = ""
        assert_equal(gradient(updating(small(), FLEX, recompute)), expected)
        assert "no kernel for the backward pass" in FLEX.failed
    assert len([line for line in warnings(caplog) if line.startswith("FlexAttention failed")]) == 2
    FLEX.failed = ""
    why = FLEX.objection(small(), "shared_prompt", packing.disagreement)
    assert "no kernel for the backward pass" in why and FLEX.failed == why
