"""Trains a policy with GRPO: builds all objects from the configuration, then fits the policy. Usage: `python train.py --help`."""

from collections.abc import Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from grpo.apps.cli import announce, check_model, check_run, completed, one_line_errors, quiet, run, save_config


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> float | None:
    with one_line_errors("train"):
        announce(config)
        return train(config, HydraConfig.get().overrides.task)


def train(config: DictConfig, overrides: Sequence[str] = ()) -> float | None:
    """Train and return the last held-out accuracy. Cheap objects first: a mistake is reported before a model is loaded."""
    import lightning as L  # imported here, so that --help, a mistyped key and the parent of a sweep need no torch
    from lightning.pytorch.utilities import rank_zero_only

    from grpo.data.prompts import PromptLoader
    from grpo.models.policy import with_adapter
    from grpo.rollout.prompt_limit import longest_prompt
    from grpo.rollout.rollouts import Rollouts
    from grpo.runs.manifest import kept
    from grpo.system import memory
    from grpo.training.callbacks.evaluation import EvaluationCallback
    from grpo.training.callbacks.preflight import PreflightCallback
    from grpo.training.callbacks.rollout import RolloutCallback
    from grpo.training.forecast import forecast
    from grpo.training.module import GRPOModule

    quiet()  # again, because importing lightning sets its log levels
    memory.settle()
    first = rank_zero_only.rank == 0  # with several devices each has a process that runs this file
    check_run(config, first)
    L.seed_everything(config.seed, verbose=False)

    plan, algorithm, evaluator, optim = map(instantiate, (config.rollout, config.algo, config.eval, config.optim))
    algorithm.check(plan.prompts, plan.group_size, plan.ahead)
    prompt_limit, task = instantiate(config.prompt_limit), instantiate(config.task)
    splits = ("train", evaluator.split) if evaluator.every else ("train",)
    for split in splits:
        task.examples(split)
    pretrained = instantiate(config.model)
    check_model(pretrained, config)
    prompt_limit = prompt_limit.within(pretrained.context(), config.max_tokens)
    tokenizer = pretrained.tokenizer()
    renderer = instantiate(config.renderer)(tokenizer, prompt_limit.kept)
    examples = {split: prompt_limit.fitting(task, split, renderer) for split in splits}
    loader = PromptLoader(examples["train"], plan.prompts, config.seed)
    engine = instantiate(config.engine)
    rollouts = Rollouts(plan, task, loader, engine, renderer, algorithm, config.output_dir, config.seed)
    rollout = RolloutCallback(rollouts)
    evaluation = EvaluationCallback(rollout, evaluator, examples.get(evaluator.split, ()))
    preflight = PreflightCallback(config.preflight, rollout, examples)
    callbacks = [rollout, preflight, evaluation, *completed(instantiate(config.callbacks), tokenizer)]  # in this order
    trainer = instantiate(config.trainer)(callbacks=callbacks, logger=list(instantiate(config.logger).values()))

    def module(model) -> GRPOModule:
        policy = with_adapter(model, instantiate(config.adapter))
        return GRPOModule(policy, algorithm, optim, plan.sampling.temperature, plan.num_rollouts, config.seed)

    if config.forecast and first:
        forecast(module, pretrained, plan, engine, longest_prompt(task, examples["train"], renderer), trainer)
    if config.forecast == "only":
        return None
    if first:
        save_config(config)
    with kept(config.output_dir, overrides, config.seed, examples, lambda: evaluation.progress() | preflight.facts()):
        trainer.fit(module(pretrained.model()), rollout.batches, ckpt_path=config.ckpt_path, weights_only=False)
    return evaluation.accuracy


if __name__ == "__main__":
    run(main, "train")
