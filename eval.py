"""Evaluates a run, a checkpoint or a base model on the test split of a task. Usage: `python eval.py --help`."""

import sys
from collections.abc import Sequence
from operator import eq
from pathlib import Path

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from grpo.apps.cli import check_model, given_arguments, keep_secrets, one_line_errors, quiet, run
from grpo.config.appendix import of_appendix
from grpo.config.composing import CONF, with_new_names
from grpo.config.resuming import changes, policy_folder, resolved, save_config, saved_config
from grpo.config.trust import check_code
from grpo.config.validation import check_values
from grpo.system.errors import UserError
from grpo.system.files import write_json


@hydra.main(version_base="1.3", config_path="conf", config_name="eval")
def main(config: DictConfig) -> float:
    """Evaluate, or compare if `compare` is set, with Hydra's configuration."""
    with one_line_errors("eval"):
        check_values(with_new_names(config))
        return compared(config) if config.compare else evaluate(config, given_arguments())


def compared(config: DictConfig) -> float:
    """Compare runs, write metrics.json, and return the first difference. Loads no model."""
    # imported here, so that --help and a mistyped key need neither pandas nor torch
    from grpo.apps.show_evaluation import show_comparison
    from grpo.extras.report.comparison import arms_of, compare
    from grpo.extras.report.predictions import predictions, printable
    from grpo.system.output.console import console

    comparison = compare(arms := arms_of(OmegaConf.to_container(config.compare)), config.after)
    if config.after is None and any(run.learned for runs in arms.values() for run in runs):
        by_letter = dict(zip(comparison["arms"], arms.values(), strict=True))
        comparison["predictions"] = predictions(by_letter, config.compute, config.times)
    write_json(Path(config.output_dir) / "metrics.json", comparison)
    show_comparison(out := console(), comparison)
    for part in printable(comparison.get("predictions")):
        out.print(part, soft_wrap=True, highlight=False)
    return comparison["comparisons"][0]["difference"]["value"]


def as_in_run(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the configuration for evaluating the policy of `config.run`, with that run's model, renderer, problem settings, and
    what ends its answers or gives them their form in its own evaluations.

    Values of the command line win. If the command line chooses a task, the problem settings of the run are not used.
    """
    folder = policy_folder(config.run)
    trained = folder.parent.parent
    words = {key: f"{key}={value}" for key, _, value in (o.lstrip("+").partition("=") for o in overrides)}
    problem = [] if "task" in words else ["task", *OmegaConf.load(CONF / "problem" / "default.yaml")]
    with open_dict(config):
        if (trained / "config.yaml").exists():
            before = saved_config(trained)
            taken = [key for key in ("model", "renderer", *problem) if key in before]
            config.update({key: before[key] for key in taken})
            ours = [key for key in words if key.partition(".")[0] in taken and not (CONF / key).is_dir()]
            config.merge_with_dotlist([words[key] for key in ours])
            for key in ("eval.sampling.stop_ids", *(["eval.sampling.guided"] if problem else [])):
                if key not in words and (value := OmegaConf.select(before, key)):
                    OmegaConf.update(config, key, value)
        config.model.path = str(folder)
    check_code(resolved(config), trained, overrides, config.trust)
    return config


def evaluate(config: DictConfig, overrides: Sequence[str] = ()) -> float:
    """Evaluate, write metrics.json and samples.parquet beside config.yaml, and return the accuracy.

    An evaluation that was interrupted in the same folder is resumed.
    overrides: the arguments of the command line.
    """
    from grpo.apps.engines import engine_of
    from grpo.apps.longest import most_tokens
    from grpo.apps.scorecard import Scorecard, finished, policy_in
    from grpo.apps.show_evaluation import Bar, show
    from grpo.evaluation.estimates import columns
    from grpo.rollout.samples_table import saving_failures
    from grpo.runs.manifest import kept
    from grpo.system.output.console import console
    from grpo.system.stopping.stop import Stop

    quiet()  # again, because importing lightning sets its log levels
    out = console()
    if config.run:
        config = as_in_run(config, overrides)
    check_values(config)
    keep_secrets(config)
    folder = Path(config.output_dir)
    if (folder / "config.yaml").is_file() and (changed := changes(config, folder)):
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"{folder} has an evaluation with other values: {', '.join(changed[:3])}{more}; set hydra.run.dir to a new folder"
        )
    if found := finished(folder):
        show(out, config.task._target_.rpartition(".")[2], found)
        out.print(f"this evaluation had finished before, in {folder}", soft_wrap=True)
        also(config.export, folder)
        return found["eval/accuracy"]["value"]
    evaluator = instantiate(config.eval, equal=of_appendix("grading.answers.equal", eq))
    if evaluator.sets:
        raise UserError("eval.sets is for evaluations during training: evaluate each set by itself, with task=")
    trainer = instantiate(config.trainer)(callbacks=[], logger=[])
    if trainer.num_devices > 1:
        raise UserError(f"trainer.devices={trainer.num_devices}: an evaluation runs on one device")
    prompt_limit = instantiate(config.prompt_limit)
    if (task := instantiate(config.task)) is None:
        raise UserError("this run had no task, its samples came from a source: name one to evaluate on, as task=gsm8k")
    task.examples(evaluator.split)

    pretrained = instantiate(config.model)
    check_model(pretrained, config)
    prompt_limit = prompt_limit.within(pretrained.context(), config.max_tokens)
    renderer = instantiate(config.renderer)(tokenizer := pretrained.tokenizer(), prompt_limit.kept)
    examples = evaluator.chosen(prompt_limit.fitting(task, evaluator.split, renderer))
    rows = {evaluator.split: examples}
    engine = engine_of(config, lambda: most_tokens(prompt_limit, evaluator.sources(task), rows, renderer, [evaluator]))
    engine.load_weights(pretrained.model().to(trainer.strategy.root_device), 0)
    card = Scorecard(folder, examples, policy_in(pretrained.path))
    save_config(config)
    stop, again = Stop(), f"to resume, repeat the command with hydra.run.dir={folder}"
    try:
        with (
            stop.during(),
            kept(config.output_dir, overrides, config.seed, {evaluator.split: examples}, card.progress),
            trainer.precision_plugin.forward_context(),
            saving_failures(folder / "samples.failed.parquet"),
            Bar(out, len(examples)) as bar,
            stop.allowed(again, saves=False),  # finished batches are on the disk
        ):
            stop.listen()
            todo = [places for places in evaluator.batches(len(examples)) if not card.recovered(places)]
            bar.begin(card)
            for places in todo:
                groups = evaluator.one_batch(task, engine, renderer, config.seed, examples, places)
                if sight := getattr(tokenizer, "sight", None):
                    sight.keep(folder, groups)
                card.add(places, groups, columns(task, groups, evaluator.by))
                bar.show(card)
            speed = card.speed
            found = card.finish(evaluator.equal)
    except KeyboardInterrupt:
        out.print(f"stopped; {again}", soft_wrap=True)
        raise
    engine.close()

    show(out, config.task._target_.rpartition(".")[2], found)
    out.print(f"{pretrained.path}: {speed}; written to {folder}", soft_wrap=True)
    also(config.export, folder)
    return found["eval/accuracy"]["value"]


def also(export: str | None, folder: Path) -> None:
    """Write a finished evaluation in another program's form, and print the file's name. export: None or inspect."""
    if export:
        from grpo.extras.report.inspect_log import write_inspect_log

        print(f"written for Inspect: {write_inspect_log(folder)}")


def as_list(argument: str) -> str:
    """Turn compare=A,B, which Hydra would read as a sweep, into a list of quoted paths; return other arguments unchanged."""
    key, _, value = argument.partition("=")
    inner = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if key != "compare" or set(inner) & set("[]'\""):
        return argument
    return f"compare=[{','.join(repr(path) for path in inner.split(','))}]"


if __name__ == "__main__":
    sys.argv[1:] = map(as_list, sys.argv[1:])
    run(main, "eval")
