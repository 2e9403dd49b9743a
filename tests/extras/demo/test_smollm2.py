"""SmolLM2 without the hub: its folder, and its tokenizer."""

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from grpo.extras.demo import smollm2
from grpo.extras.demo.smollm2 import HUB, made, split_digits


def test_the_folder_that_was_made_is_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "user_cache_path", lambda name: tmp_path / name)
    assert smollm2.smollm2() == HUB
    made().mkdir(parents=True)
    assert smollm2.smollm2() == str(tmp_path / "grpo" / "smollm2-135m-instruct")


def test_each_digit_is_a_token_of_its_own():
    """Also where the tokenizer has learned a number as one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(["2024"] * 9, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    assert tokenizer.encode("2024").tokens == ["2024"]
    split_digits(tokenizer)
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
