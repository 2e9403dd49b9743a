"""Whole runs with real vLLM: short ones of each kind, and the demo, which learns as it does with the built-in engine."""

import math
from typing import ClassVar

import pytest
from conftest import compose_config
from helpers.ranks import Ranks
from helpers.runs import VARIED, learned, rows
from torch import nn
from transformers import AutoTokenizer

from grpo.engines.vllm.engine import VLLMEngine
from grpo.env.chat_template import TemplateRenderer
from grpo.runs.run import Run
from tasks.gsm8k import GSM8K
from train import train

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

CACHE = "engine.args.kv_cache_memory_bytes=67108864"


@pytest.mark.parametrize(
    "settings",
    [
        ["engine=vllm", "algo.num_epochs=2", "algo.num_minibatches=2"],
        ["engine=vllm", "adapter=lora"],
        ["engine=vllm_shared", "algo.num_epochs=2", "algo.num_minibatches=2", "algo.kl.coef=0.1"],
        ["engine=vllm_shared", "adapter=lora", "algo.kl.coef=0.1"],
        ["engine=vllm_shared", "model.dtype=bfloat16"],
        ["engine=vllm", "rollout.ahead=1", "algo.old_policy=rollout"],
    ],
    ids=" ".join,
)
def test_the_engine_samples_what_the_trainer_has_learned(smoke, tmp_path, settings):
    """Four rollouts, with several updates each or with adapters: the trainer's log-probabilities equal the engine's each time."""
    learned(smoke(*settings, CACHE, "rollout.num_rollouts=4", "rollout.group_size=4", "max_tokens=16"))
    gaps = [row["rollout/logprob_gap_max"] for row in rows(tmp_path) if "rollout/logprob_gap_max" in row]
    if "rollout.ahead=1" in settings:  # later rollouts are sampled with weights that are one rollout old
        assert [row["rollout/staleness"] for row in rows(tmp_path) if "rollout/staleness" in row] == [0, 1, 1, 1]
        gaps[1:] = []
    assert max(gaps) < (0.1 if "model.dtype=bfloat16" in settings else 1e-5)
    assert all(row["loss/grad_norm"] > 0 for row in rows(tmp_path) if "loss/grad_norm" in row)


@pytest.mark.parametrize(
    "settings",
    [
        ["strategy=fsdp2", "engine=vllm"],
        ["strategy=ddp", "engine=vllm", "adapter=lora", "rollout.ahead=1", "algo.old_policy=rollout"],
    ],
    ids=" ".join,
)
def test_each_of_two_ranks_has_an_engine(smoke, tmp_path, settings):
    """The engines hold what the trainer has learned, also from shards."""
    ranks = Ranks(2)
    more = """rollout.num_rollouts=3 rollout.group_size=4 max_tokens=16 preflight=warn
        task._target_=helpers.slots.Varied""".split()
    try:
        ranks.train(2, smoke(*settings, CACHE, *more, "trainer=cpu", "trainer.devices=2", "trainer.timeout=60"))
    finally:
        ranks.close()
    learned = [row for row in rows(tmp_path) if "rollout/logprob_gap_max" in row]
    gaps = [row["rollout/logprob_gap_max"] for row in learned]
    assert len(gaps) == 3 and max(gaps[:1] if "rollout.ahead=1" in settings else gaps) < 1e-5
    assert all(row["loss/grad_norm"] > 0 for row in learned)
    failed = [name for name, check in Run(tmp_path).manifest["preflight"].items() if check["result"] == "FAIL"]
    assert failed == ["prompts differ, answers end"]  # this policy never ends one


class Stale(VLLMEngine):
    """Takes the first weights and ignores all others."""

    contexts: ClassVar[list[int]] = []

    def load_weights(self, model: nn.Module, version: int) -> None:
        self.contexts.append(self.context)
        if self.version is None:
            super().load_weights(model, version)
        self.version = version


def test_an_engine_that_keeps_old_weights_is_told_of_and_has_room_for_the_longest_row(smoke, toy, tmp_path, caplog):
    """The longest sequence is the longest prompt of both splits with the longer answer, that of evaluations; vLLM has one token
    more."""
    more = ("rollout.num_rollouts=3", "rollout.group_size=4", "optim.optimizer.lr=1e-2", "callbacks=[health]")
    more += ("eval.sampling.max_tokens=11",)
    config = compose_config(*smoke("engine=vllm", CACHE, "alarms=warn", *more))
    config.task, config.engine._target_ = VARIED, "test_vllm_runs.Stale"
    train(config)
    gaps = [row["rollout/logprob_gap"] for row in rows(tmp_path) if "rollout/logprob_gap" in row]
    assert gaps[0] < 1e-5 and gaps[1] > 0.03 and gaps[2] > 0.03
    assert "the engine may hold old weights" in caplog.text
    render = TemplateRenderer(AutoTokenizer.from_pretrained(toy)).prompt_ids
    task = GSM8K(VARIED["path"])
    every = [*task.examples("train"), *task.examples("test")]
    longest = max(len(render(task.build(row).start().messages)) for row in every)
    assert {*Stale.contexts} == {longest + 11 + 1}


def test_every_sample_of_a_guided_run_matches(smoke, tmp_path):
    guided = "rollout.sampling.guided={regex: '[0-9]{2}[+-][0-9]{2}=[0-9]{1,3}'}"
    learned(smoke("engine=vllm", CACHE, guided, "callbacks=[samples]", "max_tokens=16"))
    said = Run(tmp_path).samples()["completion"]
    assert len(said) == 2 * 2 * 2 and said.nunique() > 1
    assert said.str.fullmatch("[0-9]{2}[+-][0-9]{2}=[0-9]{1,3}").all()
    assert max(row.get("rollout/logprob_gap_max", 0) for row in rows(tmp_path)) < 1e-5


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Return a function that runs the demo and returns accuracy on 200 held-out problems by rollout."""

    def run(name: str, *more: str, rollouts: int = 12) -> dict[int, float]:
        folder = tmp_path_factory.mktemp(name, numbered=False)
        callbacks = ("callbacks=[checkpoint]", "callbacks.checkpoint.every=6", "logger=csv")
        train(
            compose_config(
                *callbacks, "eval.every=6", f"rollout.num_rollouts={rollouts}", f"output_dir={folder}", *more
            )
        )
        return {int(row["step"]): row["eval/accuracy"] for row in rows(folder) if "eval/accuracy" in row}

    return run


def test_the_demo_learns_on_one_copy_as_with_the_built_in_engine_also_when_resumed(demo, tmp_path_factory):
    built_in = demo("built_in", "engine=transformers")
    shared = demo("shared", "engine=vllm_shared", CACHE)
    assert shared[0] == pytest.approx(built_in[0], abs=0.01) and shared[12] > shared[0] + 0.3
    for rollouts in (6, 12):
        p = (shared[rollouts] + built_in[rollouts]) / 2
        assert abs(shared[rollouts] - built_in[rollouts]) < 3 * math.sqrt(2 * p * (1 - p) / 200)

    demo("half", "engine=vllm_shared", CACHE, rollouts=6)
    half = tmp_path_factory.getbasetemp() / "half" / "checkpoints" / "last.ckpt"
    resumed = demo("resumed", "engine=vllm_shared", CACHE, f"ckpt_path={half}")
    assert resumed[12] == shared[12]
