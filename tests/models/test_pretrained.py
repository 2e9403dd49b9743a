"""Folders of models that are damaged or hold another kind of model: one line names the cause."""

import json
import shutil

import pytest
import torch
import transformers
from helpers.models import SHAPE
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import Phi3Config

from grpo.apps.cli import check_model
from grpo.config.in_memory import InMemory
from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.env.chat_template import TemplateRenderer
from grpo.env.messages import Message
from grpo.models.pretrained import Pretrained
from grpo.system.errors import UserError

UP = "model.layers.0.mlp.up_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 99}


@pytest.fixture
def folder(toy, tmp_path):
    return shutil.copytree(toy, tmp_path / "model")


def refused(folder) -> str:
    """Return the line that a user gets."""
    pretrained = Pretrained(str(folder))
    with pytest.raises(UserError) as error:
        pretrained.context(), pretrained.tokenizer(), pretrained.model()
    assert "\n" not in str(error.value) and str(error.value).startswith(f"model.path={folder}")
    return str(error.value)


def rename(weights: dict) -> None:
    weights["model.layers.0.self_attn.qq.weight"] = weights.pop(Q)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(Q), f"lacks 1 weight: {Q}; the checkpoint does not fit its config.json"),
        (rename, f"lacks 1 weight: {Q}; it has unknown ones: model.layers.0.self_attn.qq.weight; "),
        (
            lambda w: w.pop("model.embed_tokens.weight"),
            "lacks 1 weight: model.embed_tokens.weight",
        ),  # the head is tied to it
        (
            lambda w: w.update({"model.norm.weight": torch.ones(3)}),
            "other shapes: model.norm.weight [3] instead of [192]",
        ),
        (
            lambda w: w.update({UP.replace("0", "7"): w[UP].clone()}),
            f"has 1 weight of layers beyond the model's: {UP.replace('0', '7')}; ",
        ),
        (lambda w: w[UP][0, 0].fill_(torch.nan), f"NaN or infinite: {UP}; the checkpoint is damaged"),
        (lambda w: w[UP][0, 0].fill_(-torch.inf), f"NaN or infinite: {UP}"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_model_is_refused(folder, change, message):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert message in refused(folder)


def test_a_model_in_memory_with_a_weight_that_is_nan_is_refused(toy):
    model = Pretrained(str(toy)).model()
    dict(model.named_parameters())[UP].data[0, 0] = torch.nan
    with pytest.raises(UserError, match=f"the given model has weights that are NaN or infinite: {UP}; load it again"):
        InMemory(str(toy), given=model).model()


def test_an_end_token_beyond_the_vocabulary_is_refused(folder):
    """No answer would ever end."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [1, 10**6]}))
    with pytest.raises(UserError, match="has the end token 1000000, and its vocabulary ends at"):
        check_model(Pretrained(str(folder)), OmegaConf.create())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is an adapter that peft cannot load: JSONDecodeError"),
        ('{"peft_type": "LORA"}', "names no model as base_model_name_or_path"),
        (
            '{"peft_type": "LORA", "base_model_name_or_path": "TOY"}',
            "is an adapter that peft cannot load",
        ),  # no weights
    ],
)
def test_a_damaged_adapter_is_refused(folder, toy, text, message):
    (folder / "adapter_config.json").write_text(text.replace("TOY", str(toy)))
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"", "has no model that transformers can load: SafetensorError: "),
        (
            "model.safetensors",
            b"\x08" + bytes(7) + b'{"a": 1}',
            "has no model that transformers can load: SafetensorError: ",
        ),
        ("config.json", b"{ no", "has no config.json that transformers can load: OSError: It looks like"),
        ("config.json", b"null", "has no config.json that transformers can load: TypeError"),
        ("config.json", b'{"model_type": "foo"}', "has model type `foo`"),
        ("config.json", b'{"model_type": "mamba"}', "has no max_position_embeddings"),
        ("tokenizer.json", b"{}", "has no tokenizer that transformers can load"),
    ],
)
def test_a_damaged_file_is_named(folder, file, content, message):
    (folder / file).write_bytes(content)
    assert message in refused(folder)


def test_a_missing_shard_is_named(folder):
    model = Pretrained(str(folder)).model()
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="2MB")
    (shard := sorted(folder.glob("model-*"))[1]).unlink()
    assert f"No such file or directory: {shard}" in refused(folder)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (transformers.BertForMaskedLM, transformers.BertConfig(**SMALL)),
        (transformers.T5ForConditionalGeneration, transformers.T5Config(d_model=8, num_layers=1, vocab_size=99)),
        (transformers.ViTModel, transformers.ViTConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)),
        (transformers.LlamaForSequenceClassification, transformers.LlamaConfig(**SMALL)),
    ],
)
def test_another_kind_of_model_is_refused_before_its_weights_are_read(folder, kind, config):
    config.architectures = [kind.__name__]
    config.save_pretrained(folder)
    assert f"is a {kind.__name__}: a model that predicts the next token is needed" in refused(folder)


def test_tokens_without_a_row_of_the_embedding_are_refused(folder):
    tokenizer = Pretrained(str(folder)).tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    rows = len(tokenizer) - 1
    assert f"the tokenizer has the id {rows} ('<new>'), the model's embedding {rows} rows" in refused(folder)


def test_a_special_token_without_a_row_is_refused_only_in_a_prompt(folder):
    """As in Gemma 3 1B, whose tokenizer has a token for images: the model's logits have no place for it either."""
    tokenizer = Pretrained(str(folder)).tokenizer()
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(folder)
    renderer = TemplateRenderer(Pretrained(str(folder)).tokenizer())
    assert rows not in renderer.prompt_ids([Message("user", "How many are 1 + 2?")])
    for prompt in ([Message("user", "a <image_soft_token>?")], "a <image_soft_token>?"):
        with pytest.raises(UserError, match=r"^a prompt has '<image_soft_token>', for which .* no row: leave it out$"):
            renderer.prompt_ids(prompt)


def test_the_original_context_is_the_limit_of_a_model_whose_positions_change(tmp_path):
    """Phi-3 with longrope: the same row has other log-probabilities beside a row that is longer than the original context."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "rope_theta": 1e4}
    sizes = {"max_position_embeddings": 512, "vocab_size": 97, "pad_token_id": 0}
    config = Phi3Config(
        **SHAPE | sizes,
        rope_parameters=rope | {"original_max_position_embeddings": 64},
        original_max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    row, beside = torch.arange(2, 42)[None], torch.arange(2, 82)[None] % 95
    padded = torch.cat([row, torch.zeros(1, 40, dtype=torch.int64)], 1)
    alone = model(row).logits[0]

    def together(width: int) -> torch.Tensor:
        ids = torch.cat([padded, beside])[:, :width]
        return model(ids, attention_mask=(ids > 0).long()).logits[0, :40]

    assert (together(64) - alone).abs().max() < 1e-5 and (together(65) - alone).abs().max() > 0.01
    model.save_pretrained(tmp_path)
    assert Pretrained(str(tmp_path)).context() == 64
    engine = TransformersEngine()
    engine.load_weights(model, 0)
    assert engine.context == 64
    with pytest.raises(UserError, match="context of 64"):
        engine.sample([[*range(2, 42)]], Sampling(max_tokens=30), seeds=[0])


def test_a_model_without_an_end_token_warns(folder, caplog):
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    Pretrained(str(folder)).model()
    assert "has no end token: no completion ends before max_tokens" in caplog.text
