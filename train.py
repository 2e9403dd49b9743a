"""Trains a policy with GRPO: builds all objects from the configuration, then fits the policy. Usage: `python train.py --help`."""

from collections.abc import Sequence
from operator import eq

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from grpo.apps.cli import announced, check_model, check_run, completed, given_arguments, one_line_errors, quiet, run
from grpo.config.appendix import of_appendix
from grpo.config.resuming import check_data, recipe_of, save_config, sized


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> float | None:
    with one_line_errors("train"):
        return train(config, given_arguments())[0] if (config := announced(config)) else None


def train(config: DictConfig, overrides: Sequence[str] = ()) -> tuple[float | None, object]:
    """Train; return the last held-out accuracy and the policy. Cheap objects first: mistakes show before a model is loaded."""
    import lightning as L  # imported here, so that --help, a mistyped key and the parent of a sweep need no torch

    from grpo.apps.engines import ahead_of, engine_of
    from grpo.apps.longest import longest_prompt, most_tokens
    from grpo.apps.own_pieces import check_objective, check_own, tried_sampler, tried_selection
    from grpo.apps.rows import with_rows
    from grpo.apps.unchecked import NoCallback, NoSizes, no_forecast
    from grpo.models.policy import with_adapter
    from grpo.rollout.rollouts import Rollouts
    from grpo.runs.manifest import kept
    from grpo.system.stopping.stop import Stop
    from grpo.training.callbacks.ending import Ending
    from grpo.training.callbacks.evaluation import EvaluationCallback
    from grpo.training.callbacks.measure import Measure, Recorder
    from grpo.training.callbacks.rollout import RolloutCallback
    from grpo.training.trainer import shards

    quiet()  # again, because importing lightning sets its log levels
    check_run(config, first := L.pytorch.utilities.rank_zero_only.rank == 0, overrides)  # each device runs this file
    L.seed_everything(config.seed, verbose=False)
    plan, algorithm = instantiate(config.rollout), instantiate(config.algo)
    evaluator = instantiate(config.eval, equal=of_appendix("grading.answers.equal", eq))
    optim = instantiate(config.optim)
    check_objective(algorithm, plan, bool(config.get("critic")))
    prompt_limit = instantiate(config.prompt_limit)
    task, source = instantiate(config.task), instantiate(config.source)
    task, splits = with_rows(task, evaluator, config, trains=source is None)
    pretrained = instantiate(config.model)
    check_model(pretrained, config)
    prompt_limit = prompt_limit.within(pretrained.context(), config.max_tokens)
    tokenizer = pretrained.tokenizer()
    renderer = instantiate(config.renderer)(tokenizer, prompt_limit.kept)
    examples = {"train": ()} | {name: prompt_limit.fitting(*split, renderer) for name, split in splits.items()}
    source = source and source(pretrained, renderer)
    check_data(config, examples)
    plan = sized(plan, config, len(examples["train"]))
    folder, seed, data_seed = config.output_dir, config.seed, config.get("data_seed", config.seed)
    sampler = source or tried_sampler(instantiate(config.sampler), examples["train"], plan.prompts, data_seed)
    engine = engine_of(config, lambda: most_tokens(prompt_limit, splits, examples, renderer, (plan, evaluator)))
    loggers = [*instantiate(config.logger).values()]
    play = instantiate(config.play)
    selection = tried_selection(instantiate(config.selection), plan, examples["train"], algorithm, data_seed)
    slots = plan, task, sampler, engine, renderer, algorithm, folder, seed, play, selection
    rollouts, stop = Rollouts(*slots, recipe=recipe_of(config)), Stop(config.max_time)
    rollout = RolloutCallback(rollouts, stop, ahead_of(rollouts, stop))
    kernels = of_appendix("kernels.callback.KernelsCallback", NoCallback)(pretrained.kernels)
    evaluation = EvaluationCallback(rollout, evaluator, examples)
    checks = of_appendix("preflight.callback.PreflightCallback", NoCallback)
    of_update = getattr(instantiate(config.module), "keywords", {}).get("parts")
    preflight = checks(config.preflight, rollout, evaluator, examples, tokenizer, of_update)
    others = completed(instantiate(config.callbacks), tokenizer)
    check_own(play, engine, others, L.Callback)
    # called in this order
    callbacks = [Ending(rollout), Measure(), rollout, kernels, preflight, evaluation, *others, Recorder()]

    def module(model) -> L.LightningModule:
        policy, make = with_adapter(model, instantiate(config.adapter)), instantiate(config.module)
        return make(policy, algorithm, optim, plan.sampling.temperature, plan.num_rollouts, seed)

    kernels.sizes = sizes = of_appendix("forecast.sizes.Sizes", NoSizes)(
        module, pretrained, plan, engine, lambda: longest_prompt(prompt_limit, task, examples["train"], renderer)
    )
    trainer = instantiate(config.trainer)(callbacks=callbacks, logger=loggers, needs=sizes.needed)
    optim, parts = sizes.fitted(optim, trainer)
    forecast = of_appendix("forecast.forecast.forecast", no_forecast)
    kernels.parts = preflight.parts = forecast(sizes, trainer, parts, shown=first and config.forecast)
    if config.forecast == "only":
        return None, None
    save_config(config)
    noted = (evaluation.progress, preflight.facts, kernels.facts, callbacks[0].facts)
    with kept(folder, overrides, seed, examples, *noted) as preflight.noted, rollout.stop.during():
        trainer.fit(module(pretrained.model(mapped=shards(trainer))), rollout.batches, ckpt_path=config.ckpt_path)
    return evaluation.accuracy, rollout.policy


if __name__ == "__main__":
    run(main, "train")
