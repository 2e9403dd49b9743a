"""Writes the model card of an exported policy: a README.md in the hub's format, made from the files of the run."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from grpo.evaluation.estimates import as_json
from grpo.evaluation.intervals import Estimate
from grpo.runs.run import Run
from grpo.system.errors import plural
from grpo.system.metrics import written
from grpo.system.root import ROOT

PRESETS = ROOT / "conf" / "algo"
TEMPLATE = str(Path(__file__).with_name("model_card.md.jinja"))


def write_card(policy: Path, rollouts: int, accuracy: Estimate | None, monitor: str, mode: str, value: float) -> None:
    """Write README.md into the folder of an exported policy. It replaces peft's card but keeps the tags and the base model of it.

    policy: the exported folder, RUN/checkpoints/NAME.
    accuracy: held-out accuracy of exactly this policy; None if it was not evaluated.
    monitor, mode: the metric that chooses the best policy of the run, and its direction. value: that of this policy, or NaN.
    """
    run = Run(policy.parents[1])
    config, options, (task, source) = run.config, run.choices or run.overrides, run.problem
    base, algo = config["model"]["path"], options.get("algo", "grpo")
    model = Path(base).name if isinstance(base, str) else options.get("model", "a model")
    adapter = (policy / "adapter_config.json").exists()
    taught_by = ((config.get("teacher") or {}).get("model") or {}).get("path")
    theirs = ModelCard.load(policy / "README.md").data if adapter else ModelCardData()
    data = ModelCardData(
        base_model=hub_id(base) or hub_id(theirs.base_model),
        datasets=hub_id(source),
        eval_results=results(run, as_json({"accuracy": accuracy} if accuracy else {})),
        model_name=f"{model}, {algo}, {task}",
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(["grpo", "reinforcement-learning", task, algo, *public(theirs.tags or [])])),
    )
    numbers = [f"[arXiv {number}](https://arxiv.org/abs/{number})" for number in papers(algo)]
    rollout = config["rollout"]
    size = f"{plural(rollout['prompts'], 'prompt')} with {plural(rollout['group_size'], 'sample')}"
    facts = {
        "base model": f"`{base if isinstance(base, str) else base['_target_']}`",
        "trained": "an adapter" if adapter else "all parameters",
        "task": ", ".join(f"`{name}`" for name in (task, source) if isinstance(name, str)),
        "algorithm": ", ".join([f"`{algo}`", *numbers]),
        "teacher": taught_by and f"`{taught_by}`",
        "rollouts learned from": f"{rollouts}, each of {size}",
        "held-out accuracy": in_words(accuracy, config["eval"], monitor),
        "best policy of the run": f"chosen by `{monitor}` ({mode}), here {written(monitor, value)}",
        "checks left out": ", ".join(waived(run)),
        "seed": config["seed"],
        "revision of the code": (run.manifest.get("git") or {}).get("revision"),
        "versions": ", ".join(f"{name} {number}" for name, number in run.manifest.get("versions", {}).items()),
    }
    card = ModelCard.from_template(
        data,
        template_path=TEMPLATE,
        title=as_cell(data.model_name),
        facts={name: as_cell(fact) for name, fact in facts.items()},
        command=shlex.join(["python", *run.manifest.get("command", ["train.py"])]).replace("```", "` ` `"),
        run=as_cell(run.name),
    )
    card.save(policy / "README.md")


def waived(run: Run) -> list[str]:
    """Return the names of the checks that the user of a run has left out."""
    verdicts = run.manifest.get("preflight") or {}
    return [name for name, verdict in verdicts.items() if verdict["result"] == "WAIVED"]


def results(run: Run, metrics: Mapping[str, Any]) -> list[EvalResult]:
    """Return accuracy, pass@k and their like in the hub's form. run: of train.py or eval.py. metrics: as in metrics.json."""
    (task, source), settings = run.problem, run.config["eval"]
    how = {"samples": settings["samples"], "temperature": settings["sampling"]["temperature"]}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=hub_id(source) or task,
            dataset_name=task,
            dataset_split=settings["split"],
            metric_type=name.removeprefix("eval/"),
            metric_value=estimate["value"],
            metric_args={**{key: estimate[key] for key in ("low", "high", "n")}, **how},
        )
        for name, estimate in metrics.items()
        if re.fullmatch(r"eval/(accuracy|accuracy_lenient|pass[@^]\d+|maj@\d+)", name) and estimate["value"] is not None
    ]


def as_cell(fact: Any) -> Any:
    """Return a fact as text of a Markdown table, in which it is neither HTML nor a cell of its own."""
    return fact if fact is None else " ".join(escape(str(fact), quote=False).replace("|", "\\|").split())


def hub_id(path: Any) -> str | None:
    """Return the path if it can be a repository of the hub; None if it exists on this machine or is no valid name."""
    named = isinstance(path, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path)
    return path if named and not Path(path).exists() else None


def public(tags: Sequence[str]) -> list[str]:
    """Return the tags without those that name a base model which only this machine has."""
    return [tag for tag in tags if not tag.startswith("base_model:") or hub_id(tag.rpartition(":")[2])]


def papers(algo: str) -> list[str]:
    """Return the arXiv numbers of an algorithm: the paper of GRPO, and the papers in the first sentence of the preset's file."""
    file = PRESETS / f"{algo}.yaml"
    text = file.read_text().removeprefix("# @package _global_\n") if file.exists() else ""
    named = re.findall(r"arXiv (\d{4}\.\d{5})", text.partition("\n")[0])
    return list(dict.fromkeys(["2402.03300", *named]))


def in_words(accuracy: Estimate | None, evaluation: dict[str, Any], monitor: str = "eval/accuracy") -> str:
    """Return the held-out accuracy as a phrase. evaluation: the run's `eval` configuration. monitor: what chooses `best`."""
    if accuracy is None or not accuracy.n:
        return "not measured after this rollout" if accuracy is None else "unknown: no answer was graded"
    how = "greedy" if evaluation["sampling"]["temperature"] == 0 else f"{plural(evaluation['samples'], 'sample')} each"
    interval = "" if math.isnan(accuracy.low) else f"95 % interval {accuracy.low:.1%} to {accuracy.high:.1%}, "
    which = f"{plural(accuracy.n, 'example')} of the split `{evaluation['split']}`, {how}"
    bias = "; the same examples choose the best policy of the run, so this is slightly optimistic"
    return f"{accuracy.value:.1%}, {interval}on {which}{bias if monitor == 'eval/accuracy' else ''}"
