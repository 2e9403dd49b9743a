"""Finds mistakes that need no torch before it is imported, which takes seconds.

Files of the user's are read, and nothing in them runs. The run applies the same rules to what it builds; a check here is silent
where reading alone cannot decide.
"""

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from grpo.config.appendix import of_appendix
from grpo.config.validation import arguments, needed, no_value
from grpo.data.rows import head
from grpo.engines.only_vllm import NOT_APART
from grpo.objectives.arguments import too_old
from grpo.rewards.resolve import ALWAYS, lacks, not_imported, not_in, not_shipped, shipped_modules
from grpo.system.errors import UserError

NEEDED = (  # what train.py builds
    *("adapter", "algo", "callbacks", "engine", "eval", "logger", "model", "module", "optim", "play", "prompt_limit"),
    *("renderer", "rollout", "sampler", "selection", "source", "task", "trainer"),
)
MODELS = ("model", "teacher.model")
# a module with these may have names that it does not spell
DYNAMIC = {"globals", "exec", "vars", "setattr", "__getattr__"}
HUB_ID = re.compile(r"(?![./~])[\w.-]+(/[\w.-]+)?")
# the teacher that may read a right sample, and selections that do not read rewards
ITSELF = "grpo.extras.teachers.privileged.Itself"
UNGRADED = ("grpo.rollout.draw.Everything", "grpo.extras.teachers.demonstrations.Demonstrations")
AUTO = "grpo.engines.auto.auto_engine"
# engines that sample from the policy's own weights
SHARED = ("grpo.engines.builtin.engine.TransformersEngine", "grpo.extras.shared_weights.shared.VLLMSharedEngine")
ANSWER = 5.0  # seconds for the hub to answer
UNREACHABLE = ("ConnectError", "ConnectTimeout", "ProxyError")  # errors of its client before anything was sent

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def check_early(config: DictConfig) -> None:
    """Raises UserError for the first mistake of a run that can be known without building anything. All values are checked."""
    if lost := [name for name in NEEDED if name not in config]:
        raise UserError(needed(lost[0]))
    if empty := sorted(
        key for key in OmegaConf.missing_keys(config) if key.startswith(("task.", "model.", "teacher."))
    ):
        raise UserError(no_value(empty))
    check_parts(config)
    check_ahead(config)
    check_unused(config)
    check_sources(config)


def check_sources(config: DictConfig) -> None:
    """Raises UserError for reward functions, rows or a model that are not where the configuration says."""
    task = {} if config.task is None else OmegaConf.to_container(config.task, resolve=True)
    needed = needed_by(task)
    dataset = dataset_of(config, task)
    models = [fault for key in MODELS for fault in model_faults(OmegaConf.select(config, key), key)]
    lines = [*models, *([] if config.forecast == "only" else dataset_faults(dataset))]
    if len(lines) > 1:
        lines.append("where there is a network, python -m grpo.prefetch with these arguments fetches both")
    if lines:
        raise UserError("; ".join(lines))
    if dataset and task["_target_"] == "tasks.jsonl.Jsonl":
        check_columns(task, dataset, needed)


def check_parts(config: DictConfig) -> None:
    """Raises UserError for a part of the loss that has a weight and nothing to learn from, and if no part has a weight."""
    texts, coef = OmegaConf.select(config, "algo.imitation") or {}, OmegaConf.select(config, "algo.teacher.coef")
    weighed = [f"algo.imitation.{key}={texts[key]}" for key in ("sampled", "observed", "given") if texts.get(key)]
    if coef and config.get("teacher") is None:
        line = f"algo.teacher.coef={coef}, but teacher=none"
        raise UserError(f"{line}: take teacher=model teacher.model.path=FOLDER, or another of --help teacher")
    if weighed and config.get("teacher") is None:
        raise UserError(f"{weighed[0]}, but teacher=none: take teacher=tokens, or teacher=rows for demonstrations")
    if OmegaConf.select(config, "algo.policy_coef") == 0 and not coef and not weighed:
        line = "algo.policy_coef=0, and no other part of the loss has a weight"
        raise UserError(f"{line}: raise it, algo.teacher.coef or one of algo.imitation")


def without_grader(config: DictConfig) -> str:
    """Give a run whose loss and selection read no reward one that grades nothing, if it has none. Returns a line, or ""."""
    reads = OmegaConf.select(config, "algo.policy_coef") != 0 or OmegaConf.select(config, "teacher._target_") == ITSELF
    if (
        reads
        or OmegaConf.select(config, "selection._target_") not in UNGRADED
        or not OmegaConf.is_missing(config.get("task") or {}, "rewards")
    ):
        return ""
    config.task.rewards = "ungraded"
    measured = "teacher/divergence" if OmegaConf.select(config, "algo.teacher.coef") else "imitation/loss"
    if OmegaConf.select(config, "callbacks.checkpoint.monitor") == "eval/accuracy":
        config.callbacks.checkpoint.monitor, config.callbacks.checkpoint.mode = measured, "min"
    return f"task.rewards=ungraded: no reward is in the loss, and nothing grades the answers; `best` has the least {measured}"


def check_ahead(config: DictConfig) -> None:
    """Raises UserError for rollouts ahead of the update with an engine or an objective that cannot have them, in one line."""
    lines, algo, ahead = [], config.algo, config.rollout.get("ahead")
    if not ahead:
        return
    try:
        instantiate(config.rollout)  # which imports no torch
    except InstantiationException as error:
        lines.append(str(error.__cause__))
    engine, surrogate = (OmegaConf.select(config, f"{key}._target_") for key in ("engine", "algo.surrogate"))
    if str(surrogate).startswith("grpo.") and algo.policy_coef:
        takes, corrected = arguments(surrogate).keys(), algo.correction is not None
        lines.append(too_old(f"rollout.ahead={ahead}", takes, corrected, algo.old_policy))
    if engine in SHARED or (engine == AUTO and find_spec("vllm") is None and not config.get("device")):
        lines.append(f"rollout.ahead={ahead} {NOT_APART}")
    if lines := [line for line in lines if line]:
        raise UserError("; and ".join(lines))


def check_unused(config: DictConfig) -> None:
    """Raises UserError if the output folder has another run than the one that is resumed."""
    folder, resumed = Path(config.output_dir).resolve(), config.ckpt_path and Path(config.ckpt_path).resolve()
    in_place = resumed and folder in (resumed, *resumed.parents)
    if (folder / "config.yaml").exists() and not in_place and not config.resume.auto:
        line = f"{config.output_dir} already has a run: set hydra.run.dir to a new folder"
        raise UserError(f"{line}, or resume that run with ckpt_path={config.output_dir}")


# -- functions by name


def needed_by(task: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the arguments without a default value of each reward function whose source can be read, by the function's name.

    Raises UserError for a function that is not there.
    """
    rewards = task.get("rewards")
    names = [name for name in (rewards if isinstance(rewards, list) else [rewards]) if isinstance(name, str)]
    found = {name.rpartition(":")[2]: definition_of(name, "the reward function") for name in names}
    if isinstance(environment := task.get("environment"), str):
        definition_of(environment, "task.environment")
    return {name: required(node) for name, node in found.items() if node is not None}


def definition_of(name: str, what: str) -> Definition | None:
    """Return the definition of FILE.py:NAME, or of a name without a dot; None if it is of another kind, or has no `def` there.

    what: the words for it in an error. Raises UserError if it is not there.
    """
    owner, colon, attribute = name.rpartition(":")
    if not colon and ("." in name or "/" in name or Path(name).exists()):
        return None
    files = [Path(owner).expanduser()] if colon else [*shipped_modules().values()]
    if colon and not files[0].is_file():
        raise not_imported(what, name, FileNotFoundError(f"there is no file {owner}"))
    try:
        trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
        tree = ast.Module([node for each in trees for node in each.body], [])
    except (OSError, ValueError, SyntaxError):
        return None  # the import will say it
    defined = {node.name: node for node in tree.body if isinstance(node, Definition | ast.ClassDef)}
    bound = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    if attribute in bound:  # to something else, as a partial function
        return None
    if attribute in defined:
        return defined[attribute] if isinstance(defined[attribute], Definition) else None
    public = [each for each in defined if each[0] != "_"]
    if not colon:
        raise not_shipped(name, public)
    if not (DYNAMIC | {attribute}) & set(names_in(tree)):
        raise not_in(files[0].stem, what, name, public)
    return None


def names_in(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a module may give to something, and those that it uses; `vars` for an import of all names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            yield "vars" if node.name == "*" else (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, Definition | ast.ClassDef):
            yield node.name


def required(node: Definition) -> list[str]:
    """Return the parameters of a function that have no default value; none if a decorator may change them."""
    if node.decorator_list:
        return []
    named = [*node.args.posonlyargs, *node.args.args]
    named = named[: len(named) - len(node.args.defaults)][len(node.args.posonlyargs) :]
    only = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return [argument.arg for argument in [*named, *(argument for argument, default in only if default is None)]]


# -- rows and models


def dataset_of(config: DictConfig, task: Mapping[str, Any]) -> Any:
    """Return the `Dataset` that the run will train on, or None. Raises UserError for settings that it refuses."""
    Dataset = of_appendix("datasets.dataset.Dataset", None)
    if Dataset is None or not isinstance(task.get("path"), str) or "filters" not in task or config.source is not None:
        return None
    settings = signature(Dataset).parameters.keys() - {"path", "columns", "form"}
    return Dataset(task["path"], (), **{key: value for key, value in task.items() if key in settings})


def dataset_faults(dataset: Any) -> Iterator[str]:
    """Yield a line if the rows are not on this machine and cannot come from the hub. Raises UserError for a wrong path."""
    if dataset is None or dataset.file("train"):
        return
    from huggingface_hub import constants

    dataset.check_path()
    owner, _, name = dataset.path.partition("/")
    made = os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME, "datasets"))
    prepared = {folded_name(folder.name) for folder in Path(made).glob("*___*")}
    is_here = in_cache(dataset.path, "dataset") or folded_name(f"{owner}___{name}") in prepared
    if not is_here and (reason := no_hub()):
        yield str(dataset.not_given(reason))


def model_faults(model: DictConfig | None, key: str) -> Iterator[str]:
    """Yield a line if the model is no folder of this machine and cannot come from the hub. key: that of the model."""
    path = model.path if model is not None and model._target_ == "grpo.models.pretrained.Pretrained" else None
    if isinstance(path, str) and Path(path, "checkpoints", "best").is_dir() and not Path(path, "config.json").exists():
        yield f"{key}.path={path} is a run: give its policy, {key}.path={Path(path, 'checkpoints', 'best')}"
    if not isinstance(path, str) or Path(path).exists():
        return
    line = f"{key}.path={path} is neither a local folder nor a model that the hub gives"
    if not HUB_ID.fullmatch(path):
        yield f"{line}: give a folder that exists, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
    elif not in_cache(path, "model") and (reason := no_hub()):
        yield f"{line} ({reason}): give {key}.path=FOLDER"


def folded_name(name: str) -> str:
    """Return a name without case and underscores, which datasets change in the names of its folders."""
    return name.lower().replace("_", "")


def in_cache(name: str, kind: str) -> bool:
    """Return whether the hub's cache on this machine has something of a repository. kind: model or dataset."""
    from huggingface_hub import constants  # when it is imported, it reads what `quiet` has set

    return Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}").is_dir()


@cache
def no_hub() -> str:
    """Return why nothing can be loaded from the hub; "" if it can be reached, by the client that will load from it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE=1 is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER)
    except Exception as error:  # of a client that has had several names
        if type(error).__name__ in UNREACHABLE:
            return f"{constants.ENDPOINT} does not answer: {error}"
    return ""


def check_columns(task: Mapping[str, Any], dataset: Any, needed: Mapping[str, Sequence[str]]) -> None:
    """Raises UserError if a local file of training rows lacks the question, the right answer, or what a reward function needs."""
    if (file := dataset.file("train")) is None:
        return
    columns_in, columns, may_have = of_appendix("datasets.glance.columns_in", None), [], None
    with suppress(Exception):  # the run will say what is wrong with the file
        columns, may_have = columns_in(file)
    if may_have is None:
        return
    for name in filter(None, (task["prompt"], task["gold"])):
        if not may_have(name) and not may_have(head(name)):
            raise dataset.no_column("train", head(name, columns), columns)
    given = ALWAYS | {"prompt"} | ({"gold"} if task["gold"] else set())
    for function, parameters in needed.items():
        for parameter in parameters:
            if parameter not in given and not may_have(parameter):
                raise lacks(function, parameter, columns, "train")
