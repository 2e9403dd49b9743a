"""Evaluate a run, a checkpoint or a base model on the test split of a task. `python eval.py --help` says how."""

import json
from pathlib import Path

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console

from grpo.callbacks.samples import records, write
from grpo.callbacks.terminal import evaluation_table
from grpo.cli import one_line_errors, run
from grpo.data import check_prompts
from grpo.errors import UserError
from grpo.renderer import TokenizerRenderer


@hydra.main(version_base="1.3", config_path="conf", config_name="eval")
def main(config: DictConfig) -> float:
    with one_line_errors("eval"):
        return evaluate(config)


def policy_folder(run: str) -> str:
    """The Hugging Face folder that `run=` means: a run's best policy, that of a checkpoint, or the folder itself."""
    path = Path(run)
    candidates = [path / "checkpoints" / "best", path / "checkpoints" / "last", path.with_suffix(""), path]
    for folder in candidates:
        if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
            return str(folder)
    raise UserError(f"run={run} has no policy: give a run's folder, a checkpoint of it, or a Hugging Face folder")


def evaluate(config: DictConfig) -> float:
    """Returns the accuracy. Writes metrics.json and samples.jsonl beside config.yaml."""
    if config.run:
        with open_dict(config):
            config.model = {"_target_": "grpo.policy.Pretrained", "path": policy_folder(config.run), "dtype": "float32"}
    folder = Path(config.output_dir)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    evaluator = instantiate(config.eval)
    trainer = instantiate(config.trainer)(callbacks=[], logger=[])
    task = instantiate(config.task)
    task.examples("test")

    pretrained = instantiate(config.model)
    renderer = TokenizerRenderer(pretrained.tokenizer())
    check_prompts(task, renderer, pretrained.config().max_position_embeddings, config.max_tokens, splits=("test",))
    engine = instantiate(config.engine)
    engine.load_weights(pretrained.model().to(trainer.strategy.root_device), 0)
    with trainer.precision_plugin.forward_context():
        evaluation = evaluator(task, engine, renderer, config.seed)
    engine.close()

    write(folder / "samples.jsonl", records(evaluation.groups))
    (folder / "metrics.json").write_text(json.dumps(evaluation.metrics, indent=2) + "\n")
    console = Console()
    console.print(evaluation_table([(pretrained.path, evaluation.metrics)], first="policy"))
    console.print(f"{len(evaluation.groups)} examples; written to {folder}", soft_wrap=True)
    return evaluation.metrics["eval/accuracy"]


if __name__ == "__main__":
    run(main, "eval")
