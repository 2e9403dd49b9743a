"""Advice about vLLM's errors of memory goes in the right direction. tests/vllm_engines/test_memory.py raises real ones."""

import pytest

from grpo.engines.vllm import package
from grpo.engines.vllm.engine import VLLMEngine
from grpo.engines.vllm.errors import memory_advice
from grpo.engines.vllm.settings import check_args
from grpo.system.errors import UserError

RAISE, LOWER = "raise engine.args.gpu_memory_utilization", "lower engine.args.gpu_memory_utilization"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed", RAISE),
        ("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", RAISE),
        ("Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token", RAISE),
        (
            "max_num_seqs (1024) exceeds available Mamba cache blocks (12). Each",
            "lower engine.args.max_num_seqs, or raise",
        ),
        ("Free memory on device cuda:0 (20/79 GiB) on startup is less than desired GPU memory utilization (0.4", LOWER),
        ("Externally held weights on device cuda:0 (40/79 GiB) exceed the desired GPU memory utilization", RAISE),
        (
            "CUDA out of memory occurred when warming up sampler with 1024 dummy requests.",
            "lower engine.args.max_num_seqs",
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB", LOWER),
        ("Error in memory profiling. Initial free memory 20 GiB, current free memory 30 GiB.", "another process freed"),
        ("some memory of another kind", "lower engine.args.max_num_seqs or max_model_len, or change"),
    ],
)
def test_each_kind_of_error_has_its_advice(text, fix):
    assert memory_advice(f"(EngineCore pid=7) ValueError: {text}").startswith(fix)


def test_other_errors_have_none():
    assert memory_advice("User-specified max_model_len (2048) is greater than the derived max_model_len") is None


def test_the_second_model_runner_is_refused(monkeypatch):
    """Before vLLM is imported, which need not be there."""
    monkeypatch.setattr(package.os, "environ", {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    line = r"VLLM_USE_V2_MODEL_RUNNER=1, and log-probabilities .* at temperature 1: unset the variable"
    with pytest.raises(UserError, match=line):
        package.import_vllm()


def test_a_watermark_is_refused():
    """vLLM would take the second model runner for it, whatever the environment says, and change the draws."""
    with pytest.raises(UserError, match=r"engine.args.watermark_config changes the draws.*: remove it"):
        check_args({"watermark_config": {"seed": 1}})
    check_args({"watermark_config": None, "speculative_config": {"method": "ngram"}})


def test_a_start_is_announced(caplog):
    """It may take minutes, also one that fails."""
    caplog.set_level("INFO")

    def refuses(**launched):
        assert caplog.messages == ["starting vLLM with a/model: this may take minutes"]
        raise ValueError("Value error, no such argument")

    engine = object.__new__(VLLMEngine)
    engine._new, engine._path = refuses, "a/model"
    with pytest.raises(UserError, match="no such argument"):
        engine._open()
    assert len(caplog.messages) == 1
