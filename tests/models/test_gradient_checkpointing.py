"""Gradient checkpointing: the same gradients from fewer bytes, and no effect on anything else."""

import pytest
import torch
import transformers
from helpers.models import batch_of, model_of
from helpers.runs import learned, rows, state
from torch import Tensor, nn

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.models.gradient_checkpointing import layers_of, recomputing
from grpo.models.logprobs import completion_logprobs
from grpo.system.errors import UserError

BATCH = batch_of([(9, [12, 7, 5]), (5, [8, 3])])


def gradients(model: nn.Module, layout: str, active: bool) -> tuple[list[Tensor], int]:
    """Return the gradients, and the bytes that the forward pass kept for the backward pass."""
    kept = {p.untyped_storage().data_ptr(): 0 for p in [*model.parameters(), *model.buffers()]}
    alive = []  # otherwise another tensor could get the same address

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        alive.append(tensor)
        return tensor

    with recomputing(model, active), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, entropy = completion_logprobs(model, BATCH, 0.7, True, layout)
    trained = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad((logprobs + 0.1 * entropy).sum(), trained)), sum(kept.values())


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prompt"])
@pytest.mark.parametrize(("family", "lora"), [("llama", False), ("llama_tied", True), ("qwen3", True), ("gpt2", False)])
def test_gradients_are_the_same_from_fewer_bytes(family, lora, layout):
    model = model_of(family, lora)
    plain, much = gradients(model, layout, active=False)
    again, little = gradients(model, layout, active=True)
    assert len(plain) > 4 and all(torch.equal(a, b) and a.any() for a, b in zip(plain, again, strict=True))
    assert little < 0.4 * much
    assert not any("forward" in vars(module) for module in model.modules())


def test_dropout_stays_off():
    """A layer of OPT has its own dropout, which training mode would switch on."""
    config = transformers.OPTConfig(
        hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=97, dropout=0.5
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.OPTForCausalLM(config).eval()
    for active in (True, False):
        got, _ = gradients(model, "padded", active)
        expected, _ = gradients(model, "padded", active=False)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_who_samples_meanwhile_has_the_cache():
    model, engine = model_of("qwen2"), TransformersEngine()
    engine.load_weights(model, 0)
    engine.choose()
    arguments = [[5, 6, 7], [8, 9]], Sampling(8), [1, 2]
    passes = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].shape[1]))
    expected = engine.sample(*arguments)
    with recomputing(model):
        assert engine.sample(*arguments) == expected
    assert passes == [5, *[2] * 7] * 2  # the prompts once, then one token of each at a time


@pytest.mark.slow
def test_a_run_is_the_same_bit_for_bit(smoke, tmp_path):
    for active in (True, False):
        folder = tmp_path / str(active)
        folder.mkdir()
        settings = ["callbacks=[checkpoint]", f"optim.gradient_checkpointing={active}", f"output_dir={folder}"]
        learned(smoke("algo.num_epochs=2", *settings))
    plain, again = state(tmp_path / "False")["state_dict"], state(tmp_path / "True")["state_dict"]
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert rows(tmp_path / "False") == rows(tmp_path / "True") and rows(tmp_path / "True")[1]["loss/grad_norm"] > 0


def test_a_model_without_such_layers():
    with pytest.raises(UserError, match="gradient_checkpointing=true: Linear has no layers"):
        layers_of(nn.Linear(1, 1))
