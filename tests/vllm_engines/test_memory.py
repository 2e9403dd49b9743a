"""Errors of memory that vLLM's own code raises, in one line and with advice that helps."""

from types import SimpleNamespace

import pytest

from grpo.engines.vllm.engine import import_vllm
from grpo.engines.vllm.errors import short_errors
from grpo.system.errors import UserError

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")
GIB = 1 << 30


def told(raises) -> str:
    """Return the line for the error that vLLM's code raises."""
    with pytest.raises(UserError) as error, short_errors(building=True):
        raises()
    assert "\n" not in str(error.value) and str(error.value).startswith("vLLM found too little memory")
    return str(error.value)


def kv_cache(available: float, length: int = 131072) -> None:
    """vLLM's check of what is left for a cache, in GiB. A token of Llama 3.1 8B has 32 layers of 8 keys and 8 values of 128
    numbers in 16 bits: 128 KiB."""
    import_vllm()

    try:
        from vllm.v1.core import kv_cache_planning as checks  # 0.33
    except ImportError:
        from vllm.v1.core import kv_cache_utils as checks

    token = 32 * 2 * 8 * 128 * 2
    checks._check_enough_kv_cache_memory(
        int(available * GIB), lambda: length * token, length, lambda memory: memory // token
    )


def request(free: float, total: float, share: float) -> None:
    """vLLM's check, when it starts, of what is free on a GPU, in GiB."""
    import_vllm()
    from vllm.v1.worker.utils import request_memory

    snapshot = SimpleNamespace(total_memory=int(total * GIB), free_memory=int(free * GIB), device_="cuda:0")
    request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=share))


def test_a_cache_that_is_too_small_for_one_sequence_needs_a_larger_share_or_a_shorter_one():
    """The cache of one sequence has 16.0 GiB; 15.2 GiB are left of 0.4 of an H100. A context of 1,413 tokens needs 0.2 GiB."""
    line = told(lambda: kv_cache(15.2))
    assert "16.0 GiB KV cache is needed" in line and "15.2 GiB" in line
    assert "raise engine.args.gpu_memory_utilization" in line and "lower engine.args.max_model_len" in line
    assert "lower engine.args.gpu_memory_utilization" not in line
    kv_cache(15.2, length=1413)  # fits


def test_no_memory_left_for_the_cache_needs_a_larger_share():
    line = told(lambda: kv_cache(0))
    assert "No available memory for the cache blocks" in line and "raise engine.args.gpu_memory_utilization" in line


def test_a_share_that_is_not_free_must_be_smaller():
    line = told(lambda: request(free=20, total=80, share=0.4))
    assert "lower engine.args.gpu_memory_utilization" in line and "engine.sleeps=true" in line
    assert "raise engine.args" not in line
    request(free=33, total=80, share=0.4)


def test_a_cpu_cache_larger_than_the_memory_must_be_smaller(monkeypatch):
    """vLLM's worker asks the machine; kv_cache_memory_bytes is a million GiB."""
    import_vllm()
    from vllm.v1.worker.cpu_worker import CPUWorker

    worker = SimpleNamespace(
        _should_warm_up_model=lambda: False, cache_config=SimpleNamespace(kv_cache_memory_bytes=10**6 * GIB)
    )
    line = told(lambda: CPUWorker.determine_available_memory(worker))
    assert "Decrease --kv-cache-memory-bytes" in line and line.endswith("lower engine.args.kv_cache_memory_bytes")


def test_other_mistakes_keep_their_own_text():
    wrong = ValueError("no such thing")
    with pytest.raises(UserError, match=r"cannot be built with these engine\.args, .*: no such thing"):
        fail(wrong, building=True)
    for error in (wrong, UserError("a reward has no memory")):
        with pytest.raises(ValueError) as told:
            fail(error)
        assert told.value is error


def fail(error: Exception, building: bool = False) -> None:
    with short_errors(building):
        raise error
