"""Ways to compute are compared on rows that are longer than the sizes of a model."""

import logging
import re
from functools import partial
from types import SimpleNamespace

import pytest
import transformers
from helpers.architectures import SHAPE, made

from grpo.engines.builtin.engine import cache_for
from grpo.models import packed_attention
from grpo.models.packing import disagreement, trusted
from grpo.models.probe_lengths import probe_sizes
from grpo.models.trusted import objection
from grpo.system.errors import UserError


@pytest.fixture(scope="module")
def picking():
    """Attention of MiniMax M3 sees 3 blocks of 16 tokens, those that it picks."""
    return made("MiniMax M3, text").requires_grad_(False)


@pytest.mark.parametrize(
    ("name", "own", "expected"),
    [
        ("Llama", {}, []),
        ("Mistral", {"sliding_window": 64}, []),  # read from its mask
        ("Qwen3Moe", {"num_experts_per_tok": 16, "max_window_layers": 20}, []),
        ("MiniMaxM3VLText", {"index_block_size": 16, "index_topk_blocks": 3}, [16, 48]),
        ("MiniMaxM3VLText", {"index_topk_blocks": 4, "max_position_embeddings": 60}, []),  # its blocks are longer
        ("DeepseekV32", {"index_topk": 2048, "max_position_embeddings": 9999}, [2048]),
        ("Llama4Text", {"attention_chunk_size": 8192, "max_position_embeddings": 99999}, [8192]),
    ],
)
def test_sizes_are_numbers_of_tokens_below_the_context(name, own, expected):
    config = getattr(transformers, f"{name}Config")(**(SHAPE | own))
    assert probe_sizes(SimpleNamespace(config=config)) == expected


def test_what_a_layer_does_on_long_rows_only_is_seen(picking, monkeypatch):
    """Even if attention by plan drops the argument that has the blocks. All agree on a few tokens."""
    beyond = r"log-probabilities .* in rows of more than 48 tokens"
    monkeypatch.setattr(packed_attention, "FOLLOWED", packed_attention.FOLLOWED | {"block_indices"})
    why = objection(picking, partial(disagreement, picking, "shared_prompt", None))
    assert re.fullmatch(beyond, why)
    with pytest.raises(UserError, match=f"computes a padded row otherwise than the row alone .{beyond}"):
        trusted(picking, "padded")  # left padding moves the blocks of the shorter row


def test_an_engine_is_compared_on_long_rows(picking):
    with pytest.raises(UserError, match=r"in rows of more than 48 tokens.*set engine=vllm"):
        cache_for(picking)


def test_a_size_that_is_too_long_to_try_is_named(caplog):
    caplog.set_level(logging.INFO)
    model = made("Llama", attention_chunk_size=8192, max_position_embeddings=99999)
    assert trusted(model, "padded") == ("padded", None)
    assert "LlamaForCausalLM: layers may change after 8,192 tokens; layouts are compared on shorter rows" in caplog.text
