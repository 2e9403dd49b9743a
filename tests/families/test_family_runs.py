"""Runs of tiny models of several families, with preflight and forecast: they learn, and transformers reads what they saved."""

import pytest
import torch
from helpers.architectures import made
from helpers.runs import learned
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.resuming import policy_folder
from grpo.engines.weights import checkpoint
from grpo.models.pretrained import Pretrained

LEFT_OUT = {"Nemotron-H": "[conv1d,out_proj]", "Llama 4, text": "[router]"}
NAMES = ("Qwen 3", "Qwen 3 MoE", "Qwen 3.5, text", "gpt-oss", "DeepSeek V3", "Granite 4", "LFM 2", *LEFT_OUT)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_learns_and_its_policy_is_read_back(name, adapter, smoke, tmp_path, toy):
    tokenizer = AutoTokenizer.from_pretrained(toy)
    model = made(name, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=512)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    before = dict(checkpoint(model))
    settings = f"""model.path={tmp_path / "model"} adapter={adapter} eval.every=0 callbacks=[checkpoint]
        callbacks.checkpoint.every=1 rollout.num_rollouts=2 optim.optimizer.lr=1e-2 forecast=true
        output_dir={tmp_path / "run"}""".split()
    if adapter == "lora" and name in LEFT_OUT:
        settings.append(f"+adapter.exclude_modules={LEFT_OUT[name]}")
    (tmp_path / "run").mkdir()
    learned(smoke(*settings))
    saved = Pretrained(str(policy_folder(tmp_path / "run"))).model()
    after = dict(checkpoint(saved))
    assert after.keys() == before.keys() and any(not torch.equal(after[key], before[key]) for key in before)
    if adapter == "none":
        whole, report = AutoModelForCausalLM.from_pretrained(policy_folder(tmp_path / "run"), output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert all(torch.equal(tensor, after[key]) for key, tensor in checkpoint(whole))
