"""The model card beside an exported policy."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import EXAMPLES, compose_config
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from grpo.evaluation.intervals import mean_interval
from grpo.extras.export.export import main as export
from grpo.extras.export.model_card import as_cell, hub_id, in_words, papers, public, write_card
from grpo.models.pretrained import Pretrained
from grpo.runs.run import Run
from grpo.system.errors import UserError
from train import train


def fact(card: ModelCard, name: str) -> str:
    (line,) = (line for line in card.text.splitlines() if line.startswith(f"| {name} |"))
    return line.split("|")[2].strip()


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_card_of_a_run(smoke, toy, tmp_path, adapter):
    said = ["task=gsm8k", "algo=dr_grpo", f"adapter={adapter}"]
    train(compose_config(*smoke(*said, "callbacks=[checkpoint]", "rollout.num_rollouts=3", "eval.every=2")), said)
    card = ModelCard.load(tmp_path / "checkpoints" / "last" / "README.md")
    front = card.data.to_dict()
    assert front["pipeline_tag"] == "text-generation" and "datasets" not in front
    assert front["tags"][:4] == ["grpo", "reinforcement-learning", "gsm8k", "dr_grpo"]
    if adapter == "lora":  # peft's metadata stays
        assert front["library_name"] == "peft" and "base_model" not in front  # a local folder is not on the hub
        assert front["tags"][4:] == ["lora", "transformers"]
        assert "Framework versions" not in card.text
    else:  # a local folder is no model of the hub
        assert front["library_name"] == "transformers" and "base_model" not in front and len(front["tags"]) == 4
    assert fact(card, "base model") == f"`{toy}`" and fact(card, "seed") == "0"
    assert fact(card, "rollouts learned from") == "3, each of 2 prompts with 2 samples"
    # 0 of 3 are right: the upper end of Wilson's interval is 1.96^2 / (3 + 1.96^2) = 0.5615
    assert fact(card, "held-out accuracy").startswith(
        "0.0%, 95 % interval 0.0% to 56.1%, on 3 examples of the split `test`"
    )
    assert "[arXiv 2402.03300]" in fact(card, "algorithm") and "[arXiv 2503.20783]" in fact(card, "algorithm")
    versions = json.loads((tmp_path / "manifest.json").read_text())["versions"]
    assert f"torch {versions['torch']}" in fact(card, "versions")
    assert "@article{shao2024deepseekmath" in card.text

    best = ModelCard.load(tmp_path / "checkpoints" / "best" / "README.md")
    assert fact(best, "rollouts learned from").startswith("2,")
    (result,) = best.data.eval_results
    there = (result.dataset_name, result.dataset_split, result.metric_type, result.metric_value)
    assert there == ("gsm8k", "test", "accuracy", 0.0)
    assert result.metric_args["high"] == pytest.approx(0.5615, abs=1e-4) and result.metric_args["n"] == 3
    if adapter == "lora":
        check_exported(tmp_path, tmp_path / "checkpoints" / "best")


def check_exported(run: Path, adapter: Path) -> None:
    """Check what grpo.export makes of a run that has trained an adapter."""
    export([str(run), "--license", "mit"])
    card = ModelCard.load(run / "export" / "README.md")
    assert (card.data.library_name, card.data.license, len(card.data.eval_results)) == ("peft", "mit", 1)
    export([str(run), "--merge", "--dtype", "bfloat16", str(run / "merged")])
    assert ModelCard.load(run / "merged" / "README.md").data.library_name == "transformers"
    assert not (run / "merged" / "adapter_config.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(run / "merged").state_dict()
    ours = Pretrained(str(adapter)).model().state_dict()
    assert all(torch.equal(merged[name], weight.bfloat16()) for name, weight in ours.items())
    loaded = AutoModelForCausalLM.from_pretrained(run / "export").state_dict()  # as the card says
    assert any("lora" in name for name in loaded)
    with pytest.raises(UserError, match="only on this machine"):
        export([str(run), "--push", "me/policy", str(run / "pushed")])
    with pytest.raises(UserError, match=r"--dtype=float16 is for a whole model.*add --merge"):
        export([str(run), "--dtype", "float16", str(run / "half")])


def test_a_policy_that_was_not_evaluated_says_so(smoke, tmp_path):
    more = ("callbacks=[checkpoint]", "callbacks.checkpoint.every=1", "rollout.num_rollouts=2", "eval.every=0")
    train(compose_config(*smoke(*more)))
    folder = tmp_path / "checkpoints" / "last"
    assert fact(ModelCard.load(folder / "README.md"), "held-out accuracy") == "not measured after this rollout"
    assert math.isfinite(AutoModelForCausalLM.from_pretrained(folder).model.norm.weight.sum().item())


def test_a_card_says_what_chose_the_policy_and_where_it_was_evaluated(tmp_path):
    """By a reward, then by the held-out accuracy; Wilson's interval of 1 of 2 is 9.5 to 90.5 %."""
    run, accuracy = tmp_path / "run", mean_interval([1.0, 0.0], bounds=(0, 1))
    shutil.copytree(EXAMPLES / "run", run)
    config = (run / "config.yaml").read_text().replace("  split: test\n", "  split: validation\n")
    (run / "config.yaml").write_text(config)
    found = "50.0%, 95 % interval 9.5% to 90.5%, on 2 examples of the split `validation`, greedy"
    bias = "; the same examples choose the best policy of the run, so this is slightly optimistic"
    policy = run / "checkpoints" / "best"
    for monitor, more in (("rollout/reward", ""), ("eval/accuracy", bias)):
        write_card(policy, 2, accuracy, monitor, "max", 0.5)
        card = ModelCard.load(policy / "README.md")
        assert fact(card, "held-out accuracy") == found + more
        assert [(result.dataset_split, result.metric_value) for result in card.data.eval_results] == [
            ("validation", 0.5)
        ]


def test_a_fact_is_one_cell_of_the_table():
    assert as_cell("a | b\n<i>") == r"a \| b &lt;i&gt;" and as_cell(None) is None


def test_an_accuracy_without_an_interval():
    evaluation = {"sampling": {"temperature": 0}, "split": "test"}
    one = in_words(mean_interval([1.0], bounds=(0, 1)), evaluation)
    assert one.startswith("100.0%, on 1 example of the split `test`, greedy;")
    assert in_words(mean_interval([math.nan], bounds=(0, 1)), evaluation) == "unknown: no answer was graded"
    two = in_words(mean_interval([1.0, 1.0], bounds=(0, 1)), evaluation)
    assert two.startswith("100.0%, 95 % interval 34.2% to 100.0%, on 2 examples")


def test_names_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert [hub_id(path) for path in ("Qwen/Qwen2.5-0.5B", "gpt2")] == ["Qwen/Qwen2.5-0.5B", "gpt2"]
    assert [hub_id(path) for path in ("models/mine", "/a/b", "a/b/c", None, {"_target_": "x"})] == [None] * 5


def test_tags_name_no_folder_of_this_machine(toy):
    tags = ["lora", f"base_model:adapter:{toy}", "base_model:adapter:Qwen/Qwen2.5-0.5B"]
    assert public(tags) == ["lora", "base_model:adapter:Qwen/Qwen2.5-0.5B"]


def test_papers_are_those_of_the_preset():
    assert papers("grpo") == papers("no_such_preset") == ["2402.03300"]
    assert papers("dapo") == ["2402.03300", "2503.14476"]
    assert papers("cispo") == ["2402.03300", "2506.13585", "2510.13786"]


def test_options_are_what_hydra_noted_else_what_was_said(tmp_path):
    (tmp_path / "manifest.json").write_text('{"overrides": ["algo=dapo"]}')
    assert Run(tmp_path).choices == {} and Run(tmp_path).overrides == {"algo": "dapo"}
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "hydra.yaml").write_text("hydra: {runtime: {choices: {algo: grpo, task: math}}}")
    assert Run(tmp_path).choices == {"algo": "grpo", "task": "math"}
