"""The log for Inspect, of a conversation with a tool and of a sample whose reward is unknown."""

import json

import pandas as pd

from grpo.extras.report.inspect_log import inspect_log, write_inspect_log
from grpo.runs.run import Run

CONFIG = """
model: {path: Qwen/Qwen2.5-0.5B}
task: {_target_: tasks.gsm8k.GSM8K, path: openai/gsm8k}
max_tokens: 32
eval: {split: test, samples: 2, sampling: {temperature: 0.5, top_p: 1.0, top_k: 0}}
"""
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}, "id": "7"}
MESSAGES = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "name": "add"},
]


def test_a_log_holds_the_conversations_the_scores_and_the_settings(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    times = {"started": "2026-01-02T03:04:05+00:00", "ended": "2026-01-02T03:04:06+00:00"}
    (tmp_path / "manifest.json").write_text(json.dumps({**times, "overrides": ["task=gsm8k"]}))
    found = {"eval/accuracy": {"value": 1.0, "low": None, "high": None, "n": 1}, "by": {}}
    (tmp_path / "metrics.json").write_text(json.dumps(found))
    shared = {
        "item": "a", "tool_calls": None, "end": "answered", "env_error": None, "tokens": 5, "turns": 2, "gold": "3",
    }  # fmt: skip
    rows = [
        {**shared, "sample": 0, "messages": json.dumps(MESSAGES), "completion": "3", "correct": True, "answer": "3",
         "outcome": "right", "truncated": False, "reward": 1.0, "reward/format": 0.5},
        {**shared, "sample": 1, "messages": json.dumps(MESSAGES[:1]), "completion": "um", "correct": None, "answer": None,
         "outcome": "timeout", "truncated": True, "reward": float("nan"), "reward/format": 0.0},
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(tmp_path / "samples.parquet")
    log = inspect_log(Run(tmp_path))
    assert list(log) == [
        "version",
        "status",
        "eval",
        "plan",
        "results",
        "stats",
        "samples",
    ]  # read up to stats for a list
    assert log["eval"]["model_generate_config"] == {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "max_tokens": 32}
    assert (log["eval"]["dataset"]["samples"], log["eval"]["config"], log["results"]["total_samples"]) == (
        1,
        {"epochs": 2},
        2,
    )
    (score,) = log["results"]["scores"]
    assert score["metrics"]["accuracy"]["value"] == 1.0 and score["metrics"]["accuracy"]["params"]["n"] == 1
    first, second = log["samples"]
    assert first["messages"][1]["tool_calls"] == [{"id": "7", "function": "add", "arguments": {"a": 1, "b": 2}}]
    assert first["messages"][2] == {"role": "tool", "content": "3", "function": "add"}
    assert first["input"] == first["messages"][:3] and first["output"]["completion"] == "3" and first["target"] == "3"
    assert first["scores"] == {
        "correct": {"value": "C", "answer": "3", "explanation": "right"},
        "reward": {"value": 1.0},
        "reward/format": {"value": 0.5},
    }
    assert (second["epoch"], second["scores"]["correct"]["value"], "reward" in second["scores"]) == (2, "N", False)
    assert second["output"]["choices"][0]["stop_reason"] == "max_tokens"

    file = write_inspect_log(tmp_path)
    assert file.name.startswith("2026-01-02T03-04-05_gsm8k_") and json.loads(file.read_text()) == log
