"""Whole runs with real vLLM beside the trainer: short ones of each kind, and the demo, which learns as with our own engine."""

import json
import re

import pytest
from conftest import compose_config
from test_train import VARIED, rows
from torch import nn

from grpo.engines.vllm import VLLMEngine
from train import train

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

CACHE = "engine.args.kv_cache_memory_bytes=67108864"


@pytest.mark.parametrize(
    "settings",
    [
        ["engine=vllm", "algo.num_epochs=2", "algo.num_minibatches=2"],
        ["engine=vllm", "adapter=lora"],
    ],
    ids=" ".join,
)
def test_the_engine_samples_what_the_trainer_has_learned(smoke, tmp_path, settings):
    """Four rollouts, with several updates each or adapters: the trainer finds the engine's log-probabilities every time."""
    config = compose_config(*smoke(*settings, CACHE, "rollout.num_rollouts=4", "rollout.group_size=4", "max_tokens=16"))
    config.task = VARIED
    train(config)
    gaps = [row["rollout/logprob_gap_max"] for row in rows(tmp_path) if "rollout/logprob_gap_max" in row]
    assert len(gaps) == 4 and max(gaps) < 1e-5
    assert all(row["loss/grad_norm"] > 0 for row in rows(tmp_path) if "loss/grad_norm" in row)


class Stale(VLLMEngine):
    """Takes the first weights and never again."""

    def load_weights(self, model: nn.Module, version: int) -> None:
        if self.version is None:
            super().load_weights(model, version)
        self.version = version


def test_an_engine_that_keeps_old_weights_is_told_of(smoke, tmp_path, caplog):
    more = ("rollout.num_rollouts=3", "rollout.group_size=4", "optim.optimizer.lr=1e-2", "callbacks=[health]")
    config = compose_config(*smoke("engine=vllm", CACHE, *more))
    config.task, config.engine._target_ = VARIED, "test_vllm_runs.Stale"
    train(config)
    gaps = [row["rollout/logprob_gap"] for row in rows(tmp_path) if "rollout/logprob_gap" in row]
    assert gaps[0] < 1e-5 and gaps[1] > 0.03 and gaps[2] > 0.03
    assert "the engine may hold old weights" in caplog.text


def test_every_sample_of_a_guided_run_matches(smoke, tmp_path):
    guided = "rollout.sampling.guided={regex: '[0-9]{2}[+-][0-9]{2}=[0-9]{1,3}'}"
    config = compose_config(*smoke("engine=vllm", CACHE, guided, "callbacks=[samples]", "max_tokens=16"))
    config.task = VARIED
    train(config)
    lines = [line for file in (tmp_path / "rollouts").glob("*.jsonl") for line in file.read_text().splitlines()]
    said = [json.loads(line) for line in lines]
    assert len(said) == 2 * 2 * 2 and len({sample["completion"] for sample in said}) > 1
    assert all(re.fullmatch("[0-9]{2}[+-][0-9]{2}=[0-9]{1,3}", sample["completion"]) for sample in said)
    assert max(row.get("rollout/logprob_gap_max", 0) for row in rows(tmp_path)) < 1e-5
