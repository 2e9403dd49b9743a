"""The Python API: `grpo.train`, `grpo.evaluate` and `grpo.load_run`. A call does what the command line with its values does.

Text, numbers, lists and dictionaries set options and values. Any other object takes the place of the one that the configuration
would build: a model, a task, a reward function, an engine, callbacks, an optimizer, a PEFT configuration.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache, cached_property
from importlib.util import module_from_spec, spec_from_file_location
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from grpo.apps.cli import announced, quiet
from grpo.config.composing import CONF, composed, literal, options
from grpo.config.explain import explain, known_elsewhere, no_key, with_keys
from grpo.config.objects import placed
from grpo.runs.run import Run
from grpo.system.errors import UserError
from grpo.system.root import ROOT

if TYPE_CHECKING:  # `import grpo` needs no torch
    from torch import nn

load_run = Run
SHORT = {"rewards": "task.rewards", "optimizer": "optim.optimizer", "schedule": "optim.schedule"}
# by the key of an object: the group and the option to choose beside it
PLACEHOLDER = {"model": "model=path", "task": "task=jsonl", "sampler.weight": "sampler=weighted"}
ACTS = ("model.kernels",)  # beside a model that is an object; if its tokenizer is none, also these
READS = ("model.chat_template", "model.revision", "model.trust_remote_code")


class TrainedRun(Run):
    """The folder of a finished run, and what it had in memory. model: the policy; None if nothing was left to train."""

    def __init__(self, folder: str | Path, model: "nn.Module | None", objects: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self.model, self.objects = model, objects


class EvaluatedRun(Run):
    """The folder of an evaluation."""

    @cached_property
    def results(self) -> dict[str, Any]:
        """Each metric as {"value", "low", "high", ...}, by its name without eval/."""
        return {name.removeprefix("eval/"): value for name, value in self.saved("metrics.json", json.loads).items()}


def train(
    model: Any = None,
    task: Any = None,
    rewards: Any = None,
    algo: Any = None,
    *,
    dataset: Any = None,
    tokenizer: Any = None,
    callbacks: Any = None,
    output_dir: str | PathLike | None = None,
    **settings: Any,
) -> TrainedRun:
    """Train a policy. Returns its run, with `folder`, `metrics` (a table) and `model`.

        run = grpo.train("tiny", rewards=[f], algo="dr_grpo", rollout={"num_rollouts": 20}, **{"algo/kl": "loss"})

    model: an option, a folder, a hub id, or a transformers model; `tokenizer` belongs to the latter. task: an option or a Task.
    rewards: names or functions, one, a list, or a dictionary with the weight of each. dataset: rows with a column
    `prompt`, and maybe pictures in `image` or `images`, as dictionaries or a datasets.Dataset, or such rows for each split; the
    run's folder keeps them. callbacks: options
    of the group, or callbacks besides the default ones. output_dir: the run's folder. settings: other keys; `optimizer` and
    `schedule` are short for `optim.optimizer` and `optim.schedule`. Raises UserError for a mistake.
    """
    quiet()
    chosen = {"model": model, "task": task, "rewards": rewards, "algo": algo}
    values = {key: value for key, value in chosen.items() if value is not None} | settings
    if isinstance(model, Run):
        raise UserError('a run is no model: name its model, with **{"model.path": run.folder / "checkpoints/best"}')
    if isinstance(rewards, Mapping) and "_target_" not in rewards:
        values = {**values, "rewards": [*rewards], "task.weights": [*rewards.values()]} | settings
    if rewards is not None and task is not None and not is_plain(task):
        raise UserError("rewards=... belongs to a task by its name; a task that is an object has its own score")
    folder = Path(output_dir or timed_folder("python"))
    if dataset is not None:
        if not is_plain(task) or "task.path" in dict(by_key(settings)):
            raise UserError(
                "dataset=... belongs to a task by its name: leave out task.path, or the task that is an object"
            )
        values = {"task": "jsonl", "task.path": folder / "data"} | values
    if tokenizer is not None:
        values["tokenizer"] = tokenizer
    if callbacks is not None:
        values |= callback_values(callbacks)
    words, objects = split(values)
    if model is not None and not is_plain(model):
        words.append(f"model.path={literal(model.name_or_path)}")
        words.append(f"model.dtype={str(model.dtype).removeprefix('torch.')}")
        objects.setdefault("tokenizer", None)
    elif tokenizer is not None:
        raise UserError("tokenizer=... belongs to a model that is an object too; a model by its name has its own")
    words.append(f"output_dir={literal(folder)}")
    with in_one_line("train", words):
        config = with_known_keys(composed("train", words), objects)
        if dataset is not None:
            save_rows(dataset, folder)
        config = placed(config, objects)
        if output_dir is None and config.trainer.devices * config.trainer.num_nodes > 1:
            raise UserError("on several devices each process runs this program: give output_dir, which all share")
        config = announced(config, words)
        policy = None if config is None else script("train").train(placed(config, objects), words)[1]
    return TrainedRun(folder, policy, objects)


def evaluate(run: Any = None, *, output_dir: str | PathLike | None = None, **settings: Any) -> EvaluatedRun:
    """Evaluate a policy. Returns the folder of the evaluation, with its `results`.

        grpo.evaluate(run, eval={"samples": 4, "sampling.temperature": 1}).results["accuracy"]["value"]

    run: a run, a checkpoint or a Hugging Face folder, or the result of `train`, whose objects are used again; None if the
    settings name a model and a task. settings: other keys, as in `train`. Raises UserError for a mistake.
    """
    quiet()
    folder = Path(output_dir or timed_folder("python/eval"))
    words, objects = split(({} if run is None else {"run": getattr(run, "folder", run)}) | settings)
    words.append(f"output_dir={literal(folder)}")
    with in_one_line("eval", words):
        config = with_known_keys(composed("eval", words), objects)
        config = placed(config, getattr(run, "objects", {}) | objects, objects)
        script("eval").evaluate(config, words)
    return EvaluatedRun(folder)


# -- from values of Python to a configuration


def callback_values(callbacks: Any) -> dict[str, Any]:
    """Return the values that set callbacks: names of options as `callbacks`, each object as `callbacks.CLASS`, in lower case."""
    listed = callbacks if isinstance(callbacks, Sequence) and not isinstance(callbacks, str) else [callbacks]
    names = [callback for callback in listed if isinstance(callback, str)]
    objects = {f"callbacks.{type(each).__name__.lower()}": each for each in listed if not isinstance(each, str)}
    return ({"callbacks": names} if names else {}) | objects


def split(values: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments of the command line with these values, and the objects, which cannot be written there, by key."""
    words, objects = [], {}
    check_moot(pairs := list(by_key(values)))
    for key, value in pairs:
        if not is_plain(value):
            objects[key] = value
            if key in PLACEHOLDER:
                words.insert(0, PLACEHOLDER[key])  # an option that is given comes later
        elif key == "optim.optimizer" and isinstance(value, str):
            words.append(f"optim={value}")
        elif key == "model" and str(value) not in options("model"):
            words += ["model=path", f"model.path={literal(value)}"]
        elif (CONF / key).is_dir() and value is not None:
            option = value if isinstance(value, str) else f"[{','.join(value)}]"
            words.append(f"{key}={option}")
        else:
            words.append(f"{key}={literal(value)}")
    return words, objects


def by_key(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys that values set. A dictionary sets those of its section; below a section it is one value, as {"correct": 1}
    of task.weights, unless it has objects."""
    for name, value in values.items():
        key = SHORT.get(name, name)
        if not isinstance(value, Mapping) or (is_plain(value) and ("." in key or key == "compare")):
            yield key, value
        else:
            yield from by_key({f"{key}.{inner}": below for inner, below in value.items()})


def check_moot(pairs: Sequence[tuple[str, Any]]) -> None:
    """Raise UserError for a value below a key whose value is an object, which has its own. pairs: of `by_key`."""
    acts = ACTS if dict(pairs).get("tokenizer") else ACTS + READS
    names = [f"{name}.{inner}" for name, value in pairs for inner in (value if isinstance(value, Mapping) else [""])]
    for key in (key for key, value in pairs if not is_plain(value)):
        below = [
            name.rstrip(".") for name in names if name.replace("/", ".").startswith(f"{key}.") and name != f"{key}."
        ]
        if moot := [name for name in below if name not in acts]:
            raise UserError(f"{moot[0]} has no effect beside {key}=..., which is an object with its own: leave it out")


def with_known_keys(config: DictConfig, objects: Mapping[str, Any]) -> DictConfig:
    """Return the configuration. Raises UserError if an object has a key that belongs to no group of it, as reward_funcs=f."""
    for key in objects.keys() - {"tokenizer"}:
        if key.partition(".")[0] not in config:
            headers = ["argument"] if known_elsewhere(key, "argument") else []
            raise UserError(no_key(key, list(config), *headers))
    return config


def is_plain(value: Any) -> bool:
    """Return whether a configuration can hold a value."""
    if isinstance(value, list | tuple | Mapping):
        return all(map(is_plain, value.values() if isinstance(value, Mapping) else value))
    return value is None or isinstance(value, bool | int | float | str | PathLike)


def save_rows(dataset: Any, folder: Path) -> None:
    """Save rows as FOLDER/data/SPLIT.parquet, unless a run there has them already."""
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    splits = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    for split, rows in splits.items() if not (folder / "config.yaml").exists() else ():
        table = rows if isinstance(rows, Dataset) else Dataset.from_list([with_files(row) for row in rows])
        table.to_parquet(folder / "data" / f"{split}.parquet")


def with_files(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose pictures are found from any folder: paths are whole, and a `Picture` is its bytes."""
    from grpo.env.pictures import Picture
    from grpo.extras.datasets.pictures import AUTO

    def found(value: Any) -> Any:
        if isinstance(value, Picture):
            return value.data
        if isinstance(value, list | tuple):
            return [found(one) for one in value]
        is_path = isinstance(value, str | PathLike) and "://" not in str(value) and not str(value).startswith("data:")
        return str(Path(value).expanduser().absolute()) if is_path and str(value) else value

    return {name: found(value) if name in AUTO else value for name, value in row.items()}


@contextmanager
def in_one_line(program: str, words: Sequence[str]) -> Iterator[None]:
    """Raise UserError in place of other exceptions that a mistake causes, with the line that the program prints."""
    try:
        yield
    except UserError as error:
        error.args = (with_keys(str(error)),)
        raise
    except Exception as error:
        if (line := explain(error, program, words)) is None:
            raise
        raise UserError(line) from error


def timed_folder(kind: str) -> str:
    """Return outputs/KIND/ with the time."""
    return f"outputs/{kind}/{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"


@cache
def script(name: str) -> ModuleType:
    """Return train.py or eval.py as a module, also where another program has a file of that name."""
    spec = spec_from_file_location(f"grpo_{name}", ROOT / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
