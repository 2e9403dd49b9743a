"""Train a policy with GRPO: configuration to objects, objects to a fitted policy. `python train.py --help` says how."""

from pathlib import Path

import hydra
import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from grpo.callbacks.rollout import RolloutCallback
from grpo.cli import check_resumed, flat, one_line_errors, run
from grpo.data import PromptLoader, longest_prompt
from grpo.errors import UserError
from grpo.forecast import forecast
from grpo.module import GRPOModule
from grpo.policy import with_adapter


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> float | None:
    with one_line_errors("train"):
        return train(config)


def train(config: DictConfig) -> float | None:
    """Returns the last held-out accuracy, for a sweep to maximise. Cheap things first: a mistake shows before a model loads."""
    saved = Path(config.output_dir) / "config.yaml"
    first = rank_zero_only.rank == 0  # with several devices this file runs once for each
    if first and saved.exists():
        raise UserError(f"{config.output_dir} holds a run already: set hydra.run.dir to a new folder")
    if not isinstance(config.seed, int) or config.seed < 0:
        raise UserError(f"seed={config.seed} must be a whole number, 0 or more")
    L.seed_everything(config.seed, verbose=False)
    check_resumed(config)

    plan = instantiate(config.rollout)
    algorithm = instantiate(config.algo)
    algorithm.check(plan.prompts, plan.group_size, plan.ahead)
    evaluator = instantiate(config.eval)
    optim = instantiate(config.optim)
    make_trainer = instantiate(config.trainer)
    prompt_limit = instantiate(config.prompt_limit)
    task = instantiate(config.task)
    splits = ("train", evaluator.split) if evaluator.every else ("train",)
    for split in splits:
        task.examples(split)

    pretrained = instantiate(config.model)
    pretrained.check_takes(config.adapter)
    prompt_limit = prompt_limit.within(pretrained.config().max_position_embeddings, config.max_tokens)
    renderer = instantiate(config.renderer)(pretrained.tokenizer(), prompt_limit.kept)
    examples = {split: prompt_limit.fitting(task, split, renderer) for split in splits}
    loader = PromptLoader(examples["train"], plan.prompts, config.seed)
    engine = instantiate(config.engine)
    held_out = examples.get(evaluator.split, ())
    rollout = RolloutCallback(
        plan, task, loader, engine, renderer, algorithm, evaluator, held_out, config.output_dir, config.seed
    )
    callbacks = [rollout, *instantiate(config.callbacks).values()]  # the rest look at what the first has made
    trainer = make_trainer(callbacks=callbacks, logger=list(instantiate(config.logger).values()))

    def module(model) -> GRPOModule:
        policy = with_adapter(model, instantiate(config.adapter))
        return GRPOModule(policy, algorithm, optim, plan.sampling.temperature, plan.num_rollouts, config.seed)

    if first and config.forecast:
        forecast(module, pretrained, plan, engine, longest_prompt(task, examples["train"], renderer), trainer)
    if config.forecast == "only":
        return None
    if first:
        saved.parent.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, saved, resolve=True)
    for logger in trainer.loggers:
        logger.log_hyperparams(flat(OmegaConf.to_container(config, resolve=True)))
    trainer.fit(module(pretrained.model()), train_dataloaders=loader, ckpt_path=config.ckpt_path, weights_only=False)
    accuracy = trainer.callback_metrics.get("eval/accuracy")
    return None if accuracy is None else float(accuracy)


if __name__ == "__main__":
    run(main, "train")
