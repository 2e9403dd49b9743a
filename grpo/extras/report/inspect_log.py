"""An evaluation by eval.py as a log of Inspect (inspect.aisi.org.uk), version 2 of its format: `inspect view` opens it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from grpo.data.rows import fingerprint
from grpo.rollout.samples_table import conversation_of
from grpo.runs.run import Run
from grpo.system.files import write_json

VERDICT = {True: "C", False: "I"}  # None, an unknown reward: "N"


def write_inspect_log(folder: Path) -> Path:
    """Write the log of a finished evaluation into its folder, and return the file."""
    log = inspect_log(Run(folder))
    begun, about = log["eval"]["created"][:19].replace(":", "-"), log["eval"]
    file = folder / f"{begun}_{about['task'].replace('_', '-')}_{about['task_id']}.json"
    write_json(file, log)
    return file


def inspect_log(run: Run) -> dict[str, Any]:
    """Return the log. The metrics of metrics.json are those of the score `correct`, and their intervals are params."""
    settings, model, (task, _) = run.config["eval"], run.config["model"]["path"], run.problem
    table, begun = run.evaluations(), run.manifest["started"]
    metrics = {
        name.removeprefix("eval/"): {"name": name.removeprefix("eval/"), "value": value, "params": interval}
        for name, estimate in run.saved("metrics.json", json.loads).items()
        if name != "by" and (value := estimate["value"]) is not None
        for interval in [{key: estimate[key] for key in ("low", "high", "n")}]
    }
    model = model if isinstance(model, str) else model["_target_"]
    identity = fingerprint({"model": model, "begun": begun})
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "created": begun,
            "task": task,
            "task_id": identity,
            "run_id": identity,
            "eval_id": identity,
            "dataset": {"name": settings["split"], "samples": table["item"].nunique()},
            "model": model,
            "model_generate_config": {**sampling_of(settings), "max_tokens": run.config["max_tokens"]},
            "config": {"epochs": settings["samples"]},
        },
        "plan": {"steps": []},
        "results": {
            "total_samples": len(table),
            "completed_samples": len(table),
            "scores": [{"name": "correct", "scorer": "correct", "metrics": metrics}],
        },
        "stats": {"started_at": begun, "completed_at": run.manifest["ended"]},
        "samples": [sample_of(row, model) for row in table.to_dict("records")],
    }


def sampling_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of sampling that both have by one name."""
    return {name: settings["sampling"][name] for name in ("temperature", "top_p", "top_k")}


def sample_of(row: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return a sample in Inspect's form: the conversation, the score, and the parts of the reward. row: of samples.parquet."""
    *before, last = map(message_of_inspect, conversation_of(row))
    missing = {name for name, value in row.items() if value is None or (isinstance(value, float) and pd.isna(value))}
    values = {name: value for name, value in row.items() if name not in missing}
    score = {
        "value": VERDICT.get(values.get("correct"), "N"),
        "answer": values.get("answer"),
        "explanation": row["outcome"],
    }
    parts = {name: {"value": value} for name, value in values.items() if name.startswith("reward")}
    stop = "max_tokens" if row["truncated"] else "stop"
    return {
        "id": row["item"],
        "epoch": row["sample"] + 1,
        "input": before,
        "target": values.get("gold") or "",
        "messages": [*before, last],
        "output": {
            "model": model,
            "choices": [{"message": last, "stop_reason": stop}],
            "completion": last["content"],
        },
        "scores": {"correct": score, **parts},
        "metadata": {name: values[name] for name in ("tokens", "turns", "end", "env_error") if name in values},
    }


def message_of_inspect(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in Inspect's form, in which a call of a tool is flat."""
    form = {"role": message["role"], "content": message["content"]}
    if message["role"] == "tool" and "name" in message:
        form["function"] = message["name"]
    if calls := message.get("tool_calls", []):
        form["tool_calls"] = [
            {"id": call.get("id", ""), "function": call["function"]["name"], "arguments": call["function"]["arguments"]}
            for call in calls
        ]
    return form
