"""vLLM with a head in float32, in bfloat16 on a CPU: nearer to a trainer with one, and refused beside one without."""

import head_gap  # benchmarks/head_gap.py
import pytest
from helpers.models import CONTEXT

from grpo.engines.vllm.engine import VLLMEngine
from grpo.system.errors import UserError

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


def test_vllm_and_a_trainer_with_heads_in_float32_agree_better_than_with_one_side(tmp_path):
    models = head_gap.both(head_gap.policy(4096, 128, 2))
    models[None].save_pretrained(tmp_path)
    args = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": CONTEXT, "hf_overrides": {"head_dtype": "float32"}}
    engine = VLLMEngine(str(tmp_path), "bfloat16", args=args)
    with pytest.raises(UserError, match=r"only vLLM computes the head in float32"):
        engine.load_weights(models[None], 0)
    engine.load_weights(models["float32"], 0)
    batch = head_gap.sampled(engine, 4096, 16, 32)
    engine.close()
    both, one = (float(head_gap.gap(models[kind], batch).mean()) for kind in ("float32", None))
    assert 0 < both < 0.9 * one
