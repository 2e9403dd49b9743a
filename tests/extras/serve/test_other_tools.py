"""Other people's programs measure what eval.py measures. A program is found on PATH, or in a folder that GRPO_TOOLS names."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import ROOT, compose_config
from helpers.serving import served
from hydra.utils import instantiate
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval import evaluate
from grpo.extras.report.inspect_log import write_inspect_log

pytestmark = pytest.mark.slow
FILES = ROOT / "examples" / "evaluations"
PROBLEMS = 24


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> tuple[Path, Path, float]:
    """An evaluation of the demo's model before training: its folder, the model's folder, and the accuracy."""
    folder = tmp_path_factory.mktemp("evaluation")
    limits = (f"eval.limit={PROBLEMS}", "max_tokens=64", f"output_dir={folder}", "trainer=cpu")
    config = compose_config("task=wordmath", "model=tiny", *limits, name="eval")
    accuracy = evaluate(config)
    assert 0 < accuracy < 1
    return folder, Path(instantiate(config.model).path), accuracy


def called(name: str, folder: Path, *arguments: object, **environment: str) -> str:
    """Run a program in a folder, and return what it prints. Skips the test if it is not there."""
    places = os.pathsep.join([os.environ.get("GRPO_TOOLS", ""), os.environ["PATH"]])
    if not (program := shutil.which(name, path=places)):
        pytest.skip(f"needs {name} on PATH or in GRPO_TOOLS")
    command = [program, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_lm_evaluation_harness(ours, tmp_path):
    folder, model, accuracy = ours
    with served(model) as client:
        client.ready()
        settings = f"model=policy,base_url={client.url}/v1/completions,tokenizer_backend=huggingface,tokenizer={model}"
        tasks = ("--tasks", "ours_generate,ours_choices", "--include_path", FILES, "--apply_chat_template")
        output = ("--output_path", tmp_path, "--log_samples")
        called("lm_eval", folder, "run", "--model", "local-completions", "--model_args", settings, *tasks, *output)
    (file,) = tmp_path.rglob("results_*.json")
    found = json.loads(file.read_text())["results"]
    assert found["ours_generate"]["exact_match,boxed"] == pytest.approx(accuracy)

    (file,) = tmp_path.rglob("samples_ours_choices*.jsonl")
    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        AutoTokenizer.from_pretrained(model),
    )
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == PROBLEMS
    for row in rows:  # log p(choice | prompt), by transformers
        for i, (theirs, _) in enumerate(row["filtered_resps"]):
            prompt, choice = row["arguments"][f"gen_args_{i}"].values()
            start, ids = (
                len(tokenizer(prompt)["input_ids"]),
                tokenizer(prompt + choice, return_tensors="pt")["input_ids"],
            )
            with torch.no_grad():
                logprobs = network(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[0, start - 1 :, 0]
            assert float(theirs) == pytest.approx(logprobs.sum().item(), abs=1e-3)


def test_inspect(ours, tmp_path):
    folder, model, accuracy = ours
    with served(model) as client:
        client.ready()
        server = {"LOCAL_BASE_URL": f"{client.url}/v1", "LOCAL_API_KEY": "none"}
        shutil.copy(FILES / "inspect_task.py", folder)
        greedy = ("--temperature", 0, "--max-tokens", 64, "--log-format", "json", "--log-dir", tmp_path)
        called("inspect", folder, "eval", "inspect_task.py", "--model", "openai-api/local/policy", *greedy, **server)
    (file,) = tmp_path.glob("*.json")
    log = json.loads(file.read_text())
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == pytest.approx(accuracy)
    texts = {sample["id"]: sample["output"]["choices"][0]["message"]["content"] for sample in log["samples"]}
    table = pd.read_parquet(folder / "samples.parquet")
    assert texts == dict(zip(table["item"], table["completion"], strict=True))


def test_inspect_reads_our_log(ours):
    folder, _, accuracy = ours
    file = write_inspect_log(folder)
    assert file.name in called("inspect", folder, "log", "list", "--log-dir", folder)
    log = json.loads(called("inspect", folder, "log", "dump", file.name))
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == pytest.approx(accuracy)
    header = json.loads(called("inspect", folder, "log", "dump", "--header-only", file.name))  # what its viewer lists
    assert header["results"] == log["results"] and not header.get("samples")
    right = [sample["scores"]["correct"]["value"] == "C" for sample in log["samples"]]
    assert len(right) == PROBLEMS and sum(right) / PROBLEMS == pytest.approx(accuracy)


def test_lighteval(ours, tmp_path):
    folder, model, accuracy = ours
    arguments = (
        f"model_name={model},dtype=float32,batch_size=24",
        "ours",
        "--custom-tasks",
        FILES / "lighteval_task.py",
    )
    called("lighteval", folder, "accelerate", *arguments, "--output-dir", tmp_path)
    (file,) = tmp_path.rglob("results_*.json")
    assert json.loads(file.read_text())["results"]["all"]["boxed"] == pytest.approx(accuracy)
