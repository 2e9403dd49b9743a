"""Export the best policy of a run as a Hugging Face folder: `python -m grpo.export --help`, and docs/evaluation.md."""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.apps.cli import one_line_errors, quiet
from grpo.config.appendix import of_appendix
from grpo.system.errors import UserError, one_line
from grpo.system.output.console import busy

if TYPE_CHECKING:  # imported in the functions, since --help and a mistyped argument need neither torch nor transformers
    from huggingface_hub import EvalResult, ModelCard
    from torch import nn

LICENCE = ("license", "license_name", "license_link")  # fields of a model card


def main(arguments: Sequence[str]) -> None:
    """Write the folder, and push it if a repository is given."""
    parser = argparse.ArgumentParser(prog="python -m grpo.export", description="Export the best policy of a run.")
    parser.add_argument("run", help="a run (its best policy), one of its checkpoints, or the folder of a policy")
    parser.add_argument("out", type=Path, nargs="?", help="the new folder; by default RUN/export")
    parser.add_argument("--merge", action="store_true", help="merge an adapter into its base")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="number type of all weights")
    parser.add_argument("--license", help="as apache-2.0; by default that of the base model's card")
    parser.add_argument("--eval", type=Path, nargs="+", default=[], help="folders of eval.py run=RUN, for the card")
    parser.add_argument("--trust", action="store_true", help="run code of the model, if the run did (docs/run.md)")
    parser.add_argument("--push", metavar="REPO", help="then upload the folder to this repository of the hub")
    parser.add_argument("--private", action="store_true", help="a new repository is private")
    options = parser.parse_intermixed_args(arguments)
    from grpo.config.resuming import policy_folder
    from grpo.extras.export.model_card import hub_id
    from grpo.models.pretrained import base_path
    from grpo.training.checkpoints import new_folder

    policy = policy_folder(options.run).resolve()
    run = policy.parents[1]
    out = options.out or run / "export"
    if out.exists():
        raise UserError(f"{out} exists: remove it, or name another folder after the run")
    base = base_path(str(policy))
    adapter = base != str(policy) and not options.merge
    if adapter and options.dtype:
        raise UserError(f"--dtype={options.dtype} is for a whole model, and {policy} is an adapter: add --merge")
    if adapter and options.push and not hub_id(base):
        raise UserError(f"the adapter's base {base} is only on this machine, others could not load it: add --merge")
    card = card_of(policy, run, options.eval)
    card.data.library_name = "peft" if adapter else "transformers"
    for name, value in ({"license": options.license} if options.license else licence_of(run, base)).items():
        setattr(card.data, name, value)
    with of_appendix("terminal.screen.screen", nullcontext)(), busy("exporting the policy"), new_folder(out) as folder:
        whole = options.dtype or (options.merge and base != str(policy))
        left = shutil.ignore_patterns("*.safetensors*", "adapter_*") if whole else None
        shutil.copytree(policy, folder, dirs_exist_ok=True, ignore=left)
        if whole:
            whole_model(policy, run, options.dtype, options.trust).save_pretrained(folder)
        card.save(folder / "README.md")
    print(f"{policy} is exported to {out}")
    if not card.data.license:
        print("its card has no licence: --license=ID sets one")
    if options.push:
        push(out, options.push, options.private)


def card_of(policy: Path, run: Path, evaluations: Sequence[Path]) -> "ModelCard":
    """Return the policy's card with the results of evaluations. Raises UserError for a folder without a card, or an evaluation of
    another policy."""
    from huggingface_hub import ModelCard

    from grpo.extras.export.model_card import results
    from grpo.runs.run import Run

    if not (policy / "README.md").is_file():
        raise UserError(f"{policy} has no README.md: only policies that a run has saved can be exported")
    card = ModelCard.load(policy / "README.md")
    card.data.model_name = card.data.model_name or run.name
    for folder in evaluations:
        evaluation = Run(folder)
        if not (metrics := evaluation.saved("metrics.json", json.loads)):
            raise UserError(f"--eval={folder} has no metrics.json: give the folder of a finished `eval.py run={run}`")
        other = evaluation.config["model"]["path"]
        if not isinstance(other, str) or Path(other).resolve() != policy:  # a demo model is made: it has no path
            raise UserError(f"--eval={folder} evaluated {other}, not {policy}")
        both = [*(card.data.eval_results or []), *results(evaluation, metrics)]
        card.data.eval_results = list({measured(result): result for result in both}.values())  # the later one counts
    return card


def measured(result: "EvalResult") -> tuple:
    """Return what tells a result from others: the task, the split, the metric, the number of samples, the temperature."""
    return (
        result.unique_identifier,
        result.metric_type,
        *((result.metric_args or {}).get(name) for name in ("samples", "temperature")),
    )


def licence_of(run: Path, base: str) -> dict[str, str]:
    """Return the licence in the card of the model that was trained, by field; {} if it has none, or the card cannot be read."""
    from huggingface_hub import ModelCard

    from grpo.config.resuming import saved_config

    trained = saved_config(run).model.path if base.startswith(str(run)) and (run / "config.yaml").exists() else base
    try:
        data = ModelCard.load(Path(trained) / "README.md" if Path(trained).is_dir() else trained).data
    except Exception:  # no network, no card, a card that is no YAML
        return {}
    return {name: value for name in LICENCE if (value := data.get(name))}


def whole_model(policy: Path, run: Path, dtype: str | None, trust: bool = False) -> "nn.Module":
    """Return a policy as one model. An adapter is merged in float32. dtype: None for that of the files, or of the base. trust:
    whether code that the run's configuration names may run."""
    import torch

    from grpo.config.resuming import saved_config
    from grpo.config.trust import check_code
    from grpo.extras.quantized.quantized import quantize
    from grpo.models.pretrained import Pretrained

    settings = saved_config(run).model if (run / "config.yaml").exists() else {}
    trusted, bits = settings.get("trust_remote_code", False), settings.get("quantization")
    check_code({"model": {"trust_remote_code": trusted}}, run, (), trust, "--trust")
    pretrained = Pretrained(str(policy), quantization=bits, quantizer=quantize, trust_remote_code=trusted)
    stored = (pretrained.base() or pretrained).config().dtype or torch.float32
    return replace(pretrained, dtype="float32").model().to(getattr(torch, dtype) if dtype else stored)


def push(folder: Path, repo: str, private: bool) -> None:
    """Upload a folder to a repository of the hub, which is created if there is none. Raises UserError if that fails."""
    from huggingface_hub import HfApi

    try:
        url = HfApi().create_repo(repo, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload the policy")
    except (OSError, ValueError) as error:  # no network, no login, no right, a wrong name
        reason = one_line(error, 200)
        raise UserError(
            f"{folder} is complete, but {repo} did not take it: {reason}; after `hf auth login`, `hf upload {repo} {folder}` "
            "sends it again"
        ) from error
    print(f"uploaded to {url}")


if __name__ == "__main__":
    quiet()
    with one_line_errors("eval"):
        main(sys.argv[1:])
