"""python -m grpo.export: the best policy of a run as a folder for other programs, with a card."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import EXAMPLES
from huggingface_hub import HfApi, ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo.extras.export.export import main, push
from grpo.system.errors import UserError

RUN = EXAMPLES / "run"
FOUND = {
    "eval/accuracy": {"value": 0.25, "low": 0.1, "high": 0.5, "n": 4},
    "eval/pass@2": {"value": 0.5, "low": None, "high": None, "n": 4},
    "eval/length": {"value": 8.0, "low": 8.0, "high": 8.0, "n": 4},
}


def test_a_whole_model_with_the_results_of_evaluations(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(RUN, run)
    evaluations = [tmp_path / "sampled", tmp_path / "greedy"]
    for evaluation, temperature in zip(evaluations, (1.0, 0.0), strict=True):
        evaluation.mkdir()
        settings = f"""
model: {{path: {run}/checkpoints/best}}
task: {{_target_: tasks.gsm8k.GSM8K, path: openai/gsm8k}}
eval: {{split: test, samples: 2, sampling: {{temperature: {temperature}}}}}
"""
        (evaluation / "config.yaml").write_text(settings)
        (evaluation / "metrics.json").write_text(json.dumps(FOUND))
    main([str(run), str(out), "--eval", *map(str, [*evaluations, evaluations[0]])])
    assert (out / "model.safetensors").read_bytes() == (run / "checkpoints" / "best" / "model.safetensors").read_bytes()
    data = ModelCard.load(out / "README.md").data
    front = data.to_dict()
    ((model,), metrics) = front["model-index"], front["model-index"][0]["results"][0]["metrics"]
    assert len(model["results"]) == 1 and model["results"][0]["dataset"] == {
        "name": "tasks.gsm8k.GSM8K",
        "type": "openai/gsm8k",
        "split": "test",
    }
    shown = [(metric["type"], metric["value"], metric["args"]["temperature"]) for metric in metrics]
    assert shown == [(*one, at) for at in (1.0, 0.0) for one in (("accuracy", 0.25), ("pass@2", 0.5))]
    assert metrics[0]["args"] == {"low": 0.1, "high": 0.5, "n": 4, "samples": 2, "temperature": 1.0}

    main([str(run), str(tmp_path / "half"), "--dtype", "float16"])
    half, whole = (load_file(folder / "model.safetensors") for folder in (tmp_path / "half", out))
    assert all(torch.equal(half[name], weight.half()) for name, weight in whole.items()) and len(half) == len(whole)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([".", "--merge"], r"\. exists: remove it, or name another folder after the run"),
        (["new", "--eval", "."], r"--eval=\. has no metrics\.json"),
        (
            ["--merge", "new", "--push", "me/policy"],
            "is complete, but me/policy did not take it: .*; after `hf auth login`",
        ),
    ],
)
def test_mistakes_in_one_line(tmp_path, monkeypatch, arguments, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        main([str(RUN), *arguments])
    assert re.search(line, str(raised.value)) and "\n" not in str(raised.value)


def test_a_folder_without_a_card_and_another_policy(toy, tmp_path):
    with pytest.raises(UserError, match=r"has no README\.md"):
        main([str(toy), str(tmp_path / "out")])
    (tmp_path / "metrics.json").write_text(json.dumps(FOUND))
    for path, name in (("elsewhere", "elsewhere"), ("{_target_: made}", "{'_target_': 'made'}")):
        (tmp_path / "config.yaml").write_text(f"model: {{path: {path}}}\n")
        with pytest.raises(UserError, match=f"evaluated {name}, not .*best"):
            main([str(RUN), str(tmp_path / "out"), "--eval", str(tmp_path)])


def test_the_licence_is_that_of_the_base(tmp_path):
    run, base = tmp_path / "run", tmp_path / "base"
    shutil.copytree(RUN, run)
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: theirs\n---\n# Base\n")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"(?m)^(model:\n(?:  .*\n)*?  path: ).*$", rf"\g<1>{base}", config))
    main([str(run)])
    data = ModelCard.load(run / "export" / "README.md").data
    assert (data.license, data.license_name) == ("other", "theirs")
    main([str(run), str(tmp_path / "own"), "--license", "mit"])
    data = ModelCard.load(tmp_path / "own" / "README.md").data
    assert (data.license, data.get("license_name")) == ("mit", None)


def test_a_merged_model_has_the_number_type_of_its_base(toy, tmp_path):
    base, run = tmp_path / "base", tmp_path / "run"
    policy = run / "checkpoints" / "best"
    AutoModelForCausalLM.from_pretrained(toy, dtype=torch.bfloat16).save_pretrained(base)
    adapter = LoraConfig(target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), adapter).save_pretrained(policy)
    shutil.copy(RUN / "checkpoints" / "best" / "README.md", policy)
    main([str(run), "--merge"])
    weights = load_file(run / "export" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_a_new_repository_is_private_if_that_was_asked(tmp_path, monkeypatch):
    """Nothing is sent: the client's two calls are written down."""
    sent, out = [], tmp_path / "out"

    def create(self, repo: str, private: bool | None = None, exist_ok: bool = False) -> None:
        sent.append((repo, private))

    def upload(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
        sent.append((repo_id, folder_path))

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    main([str(RUN), str(out), "--push", "me/policy", "--private"])
    push(out, "me/other", private=False)
    assert sent == [("me/policy", True), ("me/policy", out), ("me/other", False), ("me/other", out)]
