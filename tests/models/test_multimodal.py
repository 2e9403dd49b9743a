"""Multimodal models are trained on text and saved whole: what reads images does not change by a bit."""

import pytest
import torch
from helpers.models import agree, batch_of
from helpers.multimodal import FAMILIES, made
from helpers.runs import learned
from peft import LoraConfig
from transformers import AutoModelForImageTextToText

from grpo.config.resuming import policy_folder
from grpo.engines.builtin.engine import TransformersEngine, cache_for
from grpo.engines.weights import checkpoint
from grpo.models import head
from grpo.models.packing import trusted
from grpo.models.policy import with_adapter
from grpo.models.pretrained import Pretrained


@pytest.mark.extras("state_layers")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_language_model_of_a_whole_one_learns(family, tmp_path, toy):
    model = Pretrained(made(family, tmp_path, toy)).model()
    assert trusted(model, "shared_prompt")[0] == "shared_prompt" and not cache_for(model)[1]
    assert head.factor_of(model, 128) == (None if family == "gemma4" else 1)
    agree(model, batch_of([(9, [5, 8, 1, 3]), (4, [2, 6])]), "shared_prompt")
    parameters = dict(model.named_parameters())
    learns = {name for name, p in parameters.items() if p.requires_grad}
    assert learns == {name for name, p in parameters.items() if p.grad is not None}
    assert learns == {name for name in parameters if "language_model" in name or "lm_head" in name}
    assert {name for name, _ in checkpoint(model)} & parameters.keys() == learns
    adapted = with_adapter(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"))
    assert all("language_model" in name for name, p in adapted.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "gemma4"])
def test_a_run_saves_the_whole_model(family, adapter, smoke, tmp_path, toy):
    folder = made(family, tmp_path / "model", toy)
    settings = f"""model.path={folder} adapter={adapter} eval.every=0 callbacks=[checkpoint] callbacks.checkpoint.every=1
        rollout.num_rollouts=2 optim.optimizer.lr=1e-2 forecast=true preflight=off output_dir={tmp_path / "run"}"""
    learned(smoke(*settings.split()))
    saved = policy_folder(tmp_path / "run")
    before, after = (dict(Pretrained(str(each)).model().named_parameters()) for each in (folder, saved))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("language_model" in name or "lm_head" in name for name in moved)
    if adapter == "none":
        whole, report = AutoModelForImageTextToText.from_pretrained(saved, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        engine = TransformersEngine()
        engine.load_weights(whole.eval(), 0)
