"""Collects the data for the page of a run: key numbers, curves with intervals, warnings, and a bounded number of samples."""

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from pyarrow.parquet import read_metadata

from grpo.evaluation.estimates import solved
from grpo.evaluation.intervals import mean_interval
from grpo.extras.health.waiting import about_waits
from grpo.extras.health.watch import warnings_of
from grpo.extras.report.changes import changed_problems
from grpo.extras.report.pictures import names_in_prompt, picture_names, urls
from grpo.extras.report.predictions import on_page
from grpo.extras.report.token_texts import token_texts
from grpo.runs.run import Run, numbered, samples_in
from grpo.system.errors import plural
from grpo.system.metrics import percent

LONGEST = 20_000  # characters of a text; the middle of a longer text is left out


def run_data(run: Run, samples: int) -> dict[str, Any]:
    """Return the data for the page of a run. samples: the largest number of samples."""
    ended_early = run.status in ("failed", "interrupted", "stopped")
    metrics = pd.DataFrame() if ended_early and not run.measured else run.metrics.dropna(axis="columns", how="all")
    logged = {at: row.dropna().to_dict() for at, row in metrics.iterrows()}
    intervals = accuracy_intervals(run)
    held_out = intervals.get("eval/accuracy", {})
    settings = run.config.get("rollout") or {}
    ahead, order = settings.get("ahead", 0), settings.get("order", "exact")
    changed, shown = changed_problems(run), embedded(run, samples)
    named = picture_names(message for messages in shown["conversations"] for message in messages)
    named += [name for problem in (changed or {"problems": ()})["problems"] for name in problem["pictures"]]
    own = ((run.config.get("callbacks") or {}).get("health") or {}).get("bounds")
    findings = warnings_of(logged, held_out, run.manifest.get("rounding"), run.manifest.get("bound", 1), own)
    return {
        "kind": "run",
        "name": run_title(run),
        "status": run.status,
        "error": run.manifest.get("error"),
        "facts": facts(run),
        "numbers": numbers(run, held_out),
        "metrics": {"x": list(metrics.index), "y": {name: metrics[name].to_numpy() for name in metrics}},
        "intervals": {name: [ends.get(at) for at in metrics.index] for name, ends in intervals.items()},
        "changed": changed,
        "prediction": on_page({"run": [run]}, drawn=True) if run.learned else None,
        "warnings": [vars(finding) for finding in findings],
        "waits": about_waits([*logged.values()], ahead, order=order) if ahead else [],
        "not_written": run.manifest.get("not_written", {}),
        "overrides": run.manifest.get("overrides") or [f"{key}={value}" for key, value in run.overrides.items()],
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
        "pictures": urls(run.folder, dict.fromkeys(named)),
        **shown,
    }


def run_title(run: Run) -> str:
    """Return the title of a run: task, model, adapter, algorithm and seed. A task or a model whose path the command line gave is
    followed by the name of that file or folder."""
    chosen = run.choices or {"task": (run.config["task"] or {}).get("_target_", "none").rpartition(".")[2].lower()}
    given = {group: Path(run.overrides.get(f"{group}.path", "").strip("'\"")).name for group in ("task", "model")}
    groups = [group for group in ("task", "model", "adapter", "algo") if chosen.get(group, "none") != "none"]
    parts = [" ".join(filter(None, (chosen[group], given.get(group)))) for group in groups]
    return ", ".join([*parts, f"seed {run.seed}"])


def facts(run: Run) -> list[tuple[str, str]]:
    """Return (name, value) of what the manifest knows about the run, without empty values."""
    noted = run.manifest
    git, hardware, checks = noted.get("git"), noted.get("hardware", {}), noted.get("preflight", {})
    values = {
        "folder": str(run.folder.resolve()),
        "started": minute(noted.get("started")),
        "ended": minute(noted.get("ended")),
        "ended by": run.ended_by,
        "revision": git and git["revision"][:10] + (" with local changes" if git["dirty"] else ""),
        "hardware": ", ".join(filter(None, [*hardware.get("gpus", []), hardware.get("processor")])),
        "torch": noted.get("versions", {}).get("torch"),
        "command": shlex.join((commands := noted.get("commands") or [noted.get("command", [])])[0]),
        "resumed by": "; ".join(map(shlex.join, commands[1:])),
        **{f"preflight: {name}": f"{check['result']}: {check['compared']}" for name, check in checks.items()},
    }
    return [(name, value) for name, value in values.items() if value]


def minute(time: str | None) -> str | None:
    """Return a time to the minute: 2026-11-22T14:45:59+00:00 becomes 2026-11-22 14:45."""
    return time and time[:16].replace("T", " ")


def numbers(run: Run, intervals: Mapping[int, tuple[float, float]]) -> list[dict[str, str]]:
    """Return the key numbers of a run as cards with label, value and note."""
    cards = []
    accuracy, speed = run.accuracy, run.curve("tokens/s")
    if len(accuracy):
        ends = intervals.get(accuracy.index[-1])
        sure = f"95 % interval {100 * ends[0]:.1f} to {100 * ends[1]:.1f}; " if ends else ""
        best = f"best {percent(accuracy.max())} after {accuracy.idxmax()}"
        cards.append(("held-out accuracy", f"{accuracy.iloc[0]:.1%} → {accuracy.iloc[-1]:.1%}", sure + best))
    for name, label, form in (("solve_rate", "solve rate", ".1%"), ("length", "tokens per completion", ".1f")):
        if count := len(values := run.curve(f"rollout/{name}")):
            few = max(1, min(5, count // 2))
            value = f"{values.iloc[:few].mean():{form}} → {values.iloc[-few:].mean():{form}}"
            cards.append((label, value, f"in training, first and last {few} of {plural(count, 'rollout')}"))
    if len(speed):
        cards.append(("tokens/s", f"{speed.median():,.0f}", f"median; {speed.min():,.0f} to {speed.max():,.0f}"))
    if run.minutes:
        cards.append(("minutes", f"{run.minutes:.1f}", "for rollouts, updates and evaluations"))
    return [{"label": label, "value": value.replace("%", "\N{NO-BREAK SPACE}%"), "note": note}
            for label, value, note in cards]  # fmt: skip


def accuracy_intervals(run: Run) -> dict[str, dict[int, tuple[float, float]]]:
    """Return the 95 % intervals of accuracy over problems, by metric (one for each of eval.sets) and rollouts; none for a single
    problem."""
    if not run.evaluated:
        return {}
    samples = run.evaluations(columns=["rollout", "set", "prompt_index", "correct", "reward"])
    sets = samples["set"].fillna("") + "/" if "set" in samples else "/"
    intervals: dict[str, dict[int, tuple[float, float]]] = {}
    for (name, at), part in samples.assign(set=sets).groupby(["set", "rollout"]):
        _, low, high, problems = mean_interval(solved(part), bounds=(0, 1))
        if problems > 1:
            intervals.setdefault(f"eval/{name.lstrip('/')}accuracy", {})[at] = (low, high)
    return intervals


# -- samples


def evenly(rollouts: Sequence[int], count: int) -> list[int]:
    """Return `count` (at least 2) of the rollouts, evenly spaced, with the first and the last; all if there are fewer."""
    places = np.linspace(0, len(rollouts) - 1, min(count, len(rollouts)))
    return [rollouts[place] for place in places.round().astype(int)]


def counted(folder: Path) -> pd.Series:
    """Return the number of samples by rollout of the tables in a folder, which are not read."""
    return pd.Series({at: read_metadata(file).num_rows for at, file in numbered(folder).items()}, dtype=int)


def embedded(run: Run, budget: int) -> dict[str, Any]:
    """Return at most `budget` samples of a run, up to half of them from evaluations and an eighth from discarded groups.

    steps: [{kind, rollout, samples}], evenly spread over the run.
    conversations: the messages before the answers, once for each prompt. examples: the columns of each example.
    left: a sentence that says how many samples are missing.
    """
    steps: list[dict[str, Any]] = []
    conversations: dict[str, int] = {}
    examples: dict[str, int] = {}
    folders = {"discarded": "discarded", "evaluation": "evaluations", "rollout": "rollouts"}
    counts = {kind: counted(run.folder / name) for kind, name in folders.items()}
    total, shown = sum(int(sizes.sum()) for sizes in counts.values()), 0
    shares = {"discarded": budget // 8, "evaluation": max(budget // 2, budget - int(counts["rollout"].sum()))}
    for kind, sizes in counts.items():
        room = min(shares.get(kind, budget), budget - shown)
        largest = int(sizes.max()) if len(sizes) else 1
        chosen = evenly(sizes.index, max(2, room // largest))
        for rollout in chosen:
            table = samples_in(run.folder / folders[kind], [rollout], None)
            table = table.head(min(largest, room // len(chosen)))
            rows = sample_rows(table, conversations, examples)
            steps.append({"kind": kind, "rollout": rollout, "samples": rows})
            shown += len(table)
    add_pieces(run, steps)
    everything = f"All {total:,} samples are here." if total > 1 else "The only sample is here."
    left = everything if total else "The run left no samples."
    if shown < total:
        where = (
            "rollouts/, evaluations/ and discarded/ of the run's folder; grpo.runs.run.Run(FOLDER).samples() reads them"
        )
        left = (
            f"{shown:,} of {plural(total, 'sample')} are here, evenly spread over the run. All of them are in {where}."
        )
    steps.sort(key=lambda step: (step["kind"] != "rollout", step["rollout"]))
    return shorter(
        {
            "steps": steps,
            "left": left,
            "conversations": list(map(json.loads, conversations)),
            "examples": list(map(json.loads, examples)),
        }
    )


def sample_rows(table: pd.DataFrame, conversations: dict[str, int], examples: dict[str, int]) -> list[dict[str, Any]]:
    """Return the samples of a table as dictionaries. Adds their messages and examples to the two, which number them."""
    parts = [name for name in table.columns if name.startswith("reward/") or name == "overlong"]
    samples = []
    for row in table.astype(object).where(table.notna(), None).to_dict("records"):
        row["pictures"] = names_in_prompt(row) or None
        row["conversation"] = conversations.setdefault(row.pop("messages"), len(conversations))
        if row.get("example"):
            row["example"] = examples.setdefault(row["example"], len(examples))
        row["parts"] = {name: row.pop(name) for name in parts}
        samples.append({name: value for name, value in row.items() if value is not None})
    return samples


def shorter(value: Any) -> Any:
    """Return the value with the middle left out of every text longer than LONGEST."""
    match value:
        case str() if len(value) > LONGEST:
            half = LONGEST // 2
            return f"{value[:half]}\n[... {len(value) - 2 * half:,} characters left out ...]\n{value[-half:]}"
        case list():
            return [shorter(part) for part in value]
        case dict():
            return {name: shorter(part) for name, part in value.items()}
    return value


def add_pieces(run: Run, steps: Sequence[dict[str, Any]]) -> None:
    """Add `pieces` (the text of each sampled token, see `token_texts`) and `logprobs` to samples whose tokens were saved, and
    round their divergences to a teacher."""
    kept = [sample for step in steps for sample in step["samples"] if "token_ids" in sample]
    texts = iter(token_texts((token for sample in kept for token in sample["token_ids"]), run.policy))
    for sample in kept:
        sample["pieces"] = list(islice(texts, len(sample.pop("token_ids"))))
        sample["logprobs"] = np.round(sample.pop("rollout_logprobs"), 3)
        if "divergence" in sample:
            sample["divergence"] = np.round(sample["divergence"], 3)
        sample.pop("rows", None)  # for source=file
