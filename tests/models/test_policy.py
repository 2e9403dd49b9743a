"""The reference beside the policy."""

from copy import deepcopy

import peft
import pytest
import torch
import transformers

from grpo.models.policy import Reference, with_adapter
from grpo.system.errors import UserError


def test_a_moving_reference_leaves_no_casts_behind(toy_model):
    """Autocast caches a 16-bit copy of each parameter, and does not notice that a parameter has other data meanwhile."""
    reference, halved = Reference(toy_model, moves=True), deepcopy(toy_model)
    with torch.no_grad():
        for weight in [*reference.weights.values(), *halved.parameters()]:
            weight.mul_(0.5)
    ids = torch.tensor([[60, 61, 62]])
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        before, expected = toy_model(ids).logits, halved(ids).logits
        with reference.model() as model:
            assert torch.equal(model(ids).logits, expected)
        assert torch.equal(toy_model(ids).logits, before)


def test_an_adapter_on_a_weight_that_other_layers_use_is_refused():
    """Merged, as an engine and an export get it, one weight has the adapters of all its layers: Zamba 2 was 0.15 nats off."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))

    def adapted(*names: str):
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=[*names])
        return with_adapter(deepcopy(model), config)

    assert sum(hasattr(m, "lora_A") for m in adapted("q_proj", "v_proj").modules()) == 4
    for name in ("lm_head", "embed_tokens"):
        with pytest.raises(UserError, match=rf"share weights with others.*exclude_modules=\[{name}\]"):
            adapted("q_proj", name)
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    with pytest.raises(UserError, match=r"2 layers share weights with others, as .*layers.0.self_attn.q_proj does"):
        adapted("q_proj", "v_proj")
    assert sum(hasattr(m, "lora_A") for m in adapted("v_proj").modules()) == 2
