"""Evaluate a run, a checkpoint or a base model on the test split of a task. `python eval.py --help` says how."""

import json
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console

from grpo.callbacks.samples import on_disk, records, write
from grpo.callbacks.terminal import evaluation_table
from grpo.cli import one_line_errors, run
from grpo.errors import UserError


@hydra.main(version_base="1.3", config_path="conf", config_name="eval")
def main(config: DictConfig) -> float:
    with one_line_errors("eval"):
        return evaluate(config, HydraConfig.get().overrides.task)


def policy_folder(run: str) -> Path:
    """The Hugging Face folder that `run=` means: a run's best policy, that of a checkpoint, or the folder itself."""
    path = Path(run).resolve()
    for folder in (path / "checkpoints" / "best", path / "checkpoints" / "last", path.with_suffix(""), path):
        if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
            return folder
    raise UserError(f"run={run} has no policy: give a run's folder, a checkpoint of it, or a Hugging Face folder")


def as_in_run(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The policy of `config.run`, with model, renderer, task and max_tokens as that run had them; a task on the command line
    wins."""
    folder = policy_folder(config.run)
    trained = folder.parent.parent / "config.yaml"
    with open_dict(config):
        if trained.exists():
            before = OmegaConf.load(trained)
            config.model = OmegaConf.merge(
                before, OmegaConf.from_dotlist([o for o in overrides if o.startswith("model.")])
            ).model
            config.renderer = before.get("renderer", config.renderer)
            again = ["renderer."]
            if not any(override.startswith("task=") for override in overrides):
                for key in ("task", "max_tokens", "max_turns", "prompt_limit"):
                    config[key] = before.get(key, config[key])
                again += ["task.", "max_tokens=", "max_turns=", "prompt_limit."]
            given = [override.lstrip("+") for override in overrides]
            config.merge_with_dotlist([override for override in given if override.startswith(tuple(again))])
        config.model.path = str(folder)
    return config


def evaluate(config: DictConfig, overrides: Sequence[str] = ()) -> float:
    """Returns the accuracy. Writes metrics.json and samples.parquet beside config.yaml. overrides: of the command line."""
    if config.run:
        config = as_in_run(config, overrides)
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    evaluator = instantiate(config.eval)
    trainer = instantiate(config.trainer)(callbacks=[], logger=[])
    if trainer.num_devices > 1:
        raise UserError(f"trainer.devices={trainer.num_devices}: an evaluation runs on one device")
    prompt_limit = instantiate(config.prompt_limit)
    task = instantiate(config.task)
    task.examples(evaluator.split)

    pretrained = instantiate(config.model)
    prompt_limit = prompt_limit.within(pretrained.config().max_position_embeddings, config.max_tokens)
    renderer = instantiate(config.renderer)(pretrained.tokenizer(), prompt_limit.kept)
    examples = prompt_limit.fitting(task, evaluator.split, renderer)
    engine = instantiate(config.engine)
    engine.load_weights(pretrained.model().to(trainer.strategy.root_device), 0)
    with trainer.precision_plugin.forward_context(), on_disk(folder / "samples.failed.parquet"):
        evaluation = evaluator(task, engine, renderer, config.seed, examples=examples)
    engine.close()

    write(folder / "samples.parquet", records(evaluation.groups))
    (folder / "metrics.json").write_text(json.dumps(evaluation.metrics, indent=2) + "\n")
    console = Console()
    title = f"{type(task).__name__}: {len(evaluation.groups)} held-out examples"
    console.print(evaluation_table([(pretrained.path, evaluation.metrics)], first="policy", title=title))
    console.print(f"written to {folder}", soft_wrap=True)
    return evaluation.metrics["eval/accuracy"]


if __name__ == "__main__":
    run(main, "eval")
