"""Liger's kernels go into the modules of one model, and nothing else changes."""

import sys
from types import MethodType

import pytest
import torch
import transformers
from helpers.models import SHAPE, model_of

from grpo.extras.kernels import liger
from grpo.extras.kernels.liger import is_installed, patched, takes_liger
from grpo.system.errors import UserError


@pytest.mark.parametrize(
    ("wanted", "gpu", "installed", "expected"),
    [
        ("auto", True, True, True),
        ("auto", True, False, False),
        ("auto", False, True, False),
        ("none", True, True, False),
        ("liger", True, True, True),
        ("liger", True, False, r"model.kernels=liger needs the package liger-kernel: pip install '.\[liger\]', or set"),
        ("liger", False, True, "model.kernels=liger needs a CUDA GPU, and this run has none: set model.kernels=auto"),
    ],
)
def test_the_choice_depends_on_the_setting_the_device_and_the_package(wanted, gpu, installed, expected):
    if isinstance(expected, bool):
        assert takes_liger(wanted, gpu, installed) == expected
    else:
        with pytest.raises(UserError, match=expected):
            takes_liger(wanted, gpu, installed)


def test_a_cpu_keeps_the_kernels_of_transformers():
    model = model_of("llama_tied")
    assert liger.use_liger(model, "auto") == [] and "forward" not in vars(model.model.norm)


def as_liger_does(model: torch.nn.Module) -> None:
    """Change what Liger changes for a Llama: names of the family's file, and `forward` of modules. Here norms double."""
    file = sys.modules[type(model).__module__]
    rotary = file.apply_rotary_pos_emb
    file.LlamaRMSNorm, file.LlamaMLP = torch.nn.Identity, torch.nn.Identity
    file.apply_rotary_pos_emb = lambda q, k, cos, sin, unsqueeze_dim=1: rotary(2 * q, k, cos, sin)
    for norm in [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"]:
        norm.offset = 0.0
        norm.forward = MethodType(lambda self, x: 2 * type(self).forward(self, x), norm)


def without_gradient(model: torch.nn.Module) -> None:
    """Norms give the right numbers, and nothing flows back through them."""
    for norm in [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"]:
        norm.forward = MethodType(lambda self, x: type(self).forward(self, x.detach()) + 0 * x, norm)


def test_another_model_of_the_family_and_its_classes_stay_as_they_are(monkeypatch):
    """The stand-in changes numbers, so that one sees which model computes with it."""
    monkeypatch.setattr(liger, "apply_liger", as_liger_does)
    model, other = model_of("llama_tied"), model_of("llama_tied")
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        exact = model(ids).logits
        names, undo = patched(model)
        assert names == ["LlamaAttention", "LlamaRMSNorm"]
        assert (model(ids).logits - exact).abs().max() > 0.1
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                del module.forward  # what is left is the rotary embedding
        assert (model(ids).logits - exact).abs().max() > 1e-3
        assert torch.equal(other(ids).logits, exact)
        assert torch.equal(model_of("llama_tied")(ids).logits, exact)
        undo()
        assert torch.equal(model(ids).logits, exact)
    assert not any("forward" in vars(module) or hasattr(module, "offset") for module in model.modules())


def test_kernels_that_disagree_are_taken_away(monkeypatch, caplog):
    monkeypatch.setattr(liger, "apply_liger", as_liger_does)
    monkeypatch.setattr(liger, "takes_liger", lambda *_: True)
    model = model_of("llama_tied")
    assert liger.use_liger(model, "auto") == []
    assert "Liger's kernels are not used for LlamaForCausalLM: log-probabilities differ by" in caplog.text
    monkeypatch.setattr(liger, "apply_liger", without_gradient)
    assert liger.use_liger(model, "auto") == []
    assert "Liger's kernels are not used for LlamaForCausalLM: gradients have a cosine of" in caplog.text
    assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.setattr(liger, "apply_liger", lambda model: None)
    assert liger.use_liger(model, "auto") == []
    assert "it has none for the type llama" in caplog.text


@pytest.mark.skipif(not is_installed(), reason="liger-kernel is not installed")
@pytest.mark.parametrize(
    ("family", "config", "parts"),
    [
        ("Llama", transformers.LlamaConfig, {"Attention", "MLP", "RMSNorm"}),
        ("Qwen2", transformers.Qwen2Config, {"Attention", "MLP", "RMSNorm"}),
        ("Qwen3", transformers.Qwen3Config, {"Attention", "MLP", "RMSNorm"}),
        ("Gemma", transformers.GemmaConfig, {"Attention", "MLP", "RMSNorm"}),
        ("Mistral", transformers.MistralConfig, {"Attention", "MLP", "RMSNorm"}),
    ],
)
def test_liger_has_kernels_for_the_parts_of_these_families(family, config, parts):
    model = transformers.AutoModelForCausalLM.from_config(config(**SHAPE, vocab_size=97)).eval()
    names, _ = patched(model)
    assert set(names) == {f"{family}{part}" for part in parts}
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)  # logits are made as before
    assert "transformers.models" in vars(sys.modules[type(model).__module__])["apply_rotary_pos_emb"].__module__
