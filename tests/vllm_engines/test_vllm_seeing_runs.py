"""A whole run over pictures with real vLLM: preflight, rollouts, updates of the tower, evaluations, a checkpoint, and the rest of
it after a stop."""

import pytest
import torch
from conftest import compose_config
from helpers.looking import LOOKING
from helpers.runs import rows, state
from helpers.seeing import made

from grpo.runs.run import Run
from train import train

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
pytest.importorskip("vllm")


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_run_over_pictures(tmp_path, toy, vision):
    folder = made("qwen2_5_vl", tmp_path / "model", toy, head_dim=32)
    words = f"""task=gsm8k model=path model.path={folder} model.vision={vision} model.pictures={{backend:pil}} engine=vllm
        engine.args.kv_cache_memory_bytes=67108864 debug=smoke logger=csv callbacks=[samples,checkpoint] forecast=false
        callbacks.checkpoint.every=1 rollout.num_rollouts=4 rollout.group_size=4 max_tokens=8 optim.optimizer.lr=1e-2
        eval.every=2""".split()

    def run(name: str, *more: str) -> list[dict[str, float]]:
        config = compose_config(*words, f"output_dir={tmp_path / name}", *more)
        config.task = LOOKING
        train(config)
        return rows(tmp_path / name)

    noted = run("run", "preflight=warn")
    checks = {name: check["result"] for name, check in Run(tmp_path / "run").manifest["preflight"].items()}
    assert {checks["pictures have their features"], checks["the policy looks at pictures"]} == {"PASS"}
    assert checks["new weights of the tower reach the engine"] == ("PASS" if vision == "trained" else "SKIP")
    gaps = [row["rollout/logprob_gap_max"] for row in noted if "rollout/logprob_gap_max" in row]
    assert len(gaps) == 4 and max(gaps) < 1e-5
    assert sum("eval/accuracy" in row for row in noted) == 3
    half = tmp_path / "half"
    run("half", "preflight=off", "rollout.num_rollouts=2")
    resumed = run("resumed", "preflight=off", f"ckpt_path={half}/checkpoints/last.ckpt")
    gaps = [row["rollout/logprob_gap_max"] for row in resumed if "rollout/logprob_gap_max" in row]
    assert len(gaps) == 2 and max(gaps) < 1e-5
    weights = [state(tmp_path / name)["state_dict"] for name in ("run", "half", "resumed")]
    assert all(torch.equal(tensor, weights[2][name]) for name, tensor in weights[0].items())
    tower = [name for name in weights[0] if "visual" in name]
    assert tower or vision == "frozen"
    moved = [name for name in tower if not torch.equal(weights[0][name], weights[1][name])]
    assert bool(moved) == (vision == "trained")
