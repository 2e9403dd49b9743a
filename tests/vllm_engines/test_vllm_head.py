"""vLLM with a head in float32, in bfloat16 on a CPU: nearer to a trainer with one, and refused beside one without."""

import head_gap  # benchmarks/head_gap.py
import pytest

from grpo.extras.vllm_server.engine import VLLMServerEngine
from grpo.system.errors import UserError

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")


@pytest.mark.parametrize("name", ["vllm", "vllm_shared", "vllm_server"])
def test_vllm_and_a_trainer_with_heads_in_float32_agree_better_than_with_one_side(tmp_path, name):
    models = head_gap.both(head_gap.policy(4096, 128, 2))
    models[None].save_pretrained(tmp_path)
    engine = head_gap.opened(name, str(tmp_path), "float32")
    line = (
        r"head_dtype is null, and the servers' is float32" if name == "vllm_server" else r"only vLLM computes the head"
    )
    with pytest.raises(UserError, match=line):
        engine.load_weights(models[None], 0)
    engine.load_weights(models["float32"], 0)
    batch = head_gap.sampled(engine, 4096, 16, 32)
    if name == "vllm_server":  # as if it were somebody else's, it says how it computes
        other = VLLMServerEngine(str(tmp_path), [server.url for server in engine._fleet.servers])
        with pytest.raises(UserError, match=r"only the vLLM server at http.* computes the head in float32"):
            other.load_weights(models[None], 0)
        other.close()
    engine.close()
    both, one = (float(head_gap.gap(models[kind], batch).mean()) for kind in ("float32", None))
    assert 0 < both < 0.9 * one
