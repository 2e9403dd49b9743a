"""The part that all command lines share: one-line errors for mistakes, quiet libraries, checks before a run."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo.apps.border import check_values
from grpo.apps.composing import CONF, composed
from grpo.apps.sweep import sweep
from grpo.env.types import Task
from grpo.moved import today
from grpo.system import witness
from grpo.system.errors import UserError
from grpo.system.settings import flat

if TYPE_CHECKING:  # --help needs no torch
    from grpo.models.pretrained import Pretrained

log = logging.getLogger(__name__)

MOVED = {  # old key -> new key
    "warm_start.worked_answers": "model.path.worked_answers._target_",
    "warm_start.clean_steps": "model.path.clean_steps",
}

# The user's own setting. `run` sets HYDRA_FULL_ERROR as well, and the processes of further devices inherit that.
FULL_ERROR = os.environ.setdefault("GRPO_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "0")) == "1"


def in_sweep() -> bool:
    """Return whether this process runs a sweep or a job of one."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def run(main: Callable[[], object], config_name: str) -> None:
    """Call a `hydra.main` function. Mistakes end the program with one line, or with a traceback if HYDRA_FULL_ERROR=1 is set."""
    quiet()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise errors instead of printing them
    with one_line_errors(config_name), sweep.reported():
        arguments = get_args_parser().parse_args()
        if arguments.help:
            from grpo.apps.help import USAGE, described

            print(USAGE, described(config_name, arguments.overrides), sep="\n\n")
        else:
            witness.watch()
            main()


@contextmanager
def one_line_errors(config_name: str) -> Iterator[None]:
    """Exit with one line if `explain` has one for the exception. Jobs use it too, because Hydra would add its own comment."""
    if in_sweep():
        quiet()  # the job may run in a new process
    try:
        yield
    except Exception as error:
        if in_sweep():
            raise  # the sweep continues with the next job, and the sweeper raises this again at the end
        if FULL_ERROR or (line := explain(error, config_name, sys.argv[1:])) is None:
            raise
        known = next((cause for cause in chain(error) if isinstance(cause, UserError)), UserError())
        print(f"{known.kind}{line}", file=sys.stderr)
        sys.exit(known.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def explain(error: BaseException, config_name: str, arguments: Sequence[str] = ()) -> str | None:
    """Return one line that explains a mistake of the user; None for a bug of ours, which needs its traceback.

    arguments: the command line, which says which options of the groups are in use.
    """
    causes = list(chain(error))
    for cause in causes:
        if isinstance(cause, UserError):
            return str(cause)
    for cause in causes:
        if isinstance(cause, MissingConfigException):
            group, _, option = (cause.missing_cfg_file or "").rpartition("/")
            options = ", ".join(option for option in cause.options or () if option != "base")
            return f"{group} has no option {option!r}; options: {options}" if options else " ".join(str(cause).split())
    wanted = isinstance(error, OSError) and f"hydra.run.dir={error.filename}" in arguments
    if wanted or (isinstance(error, OSError) and error.filename and not isinstance(error, FileNotFoundError)):
        return f"the output folder cannot be written: {error}; set hydra.run.dir=FOLDER"
    if key := re.search(r"Could not override '([^']+)'", str(error)):
        if key[1] in MOVED:
            return f"{key[1]} is {MOVED[key[1]]} now"
        near = nearest(key[1], known_keys(config_name, arguments))
        hint = f"did you mean {near}?" if near else "--help lists them"
        return f"there is no key {key[1]!r}; {hint} (+{key[1]}=... adds a new key)"
    if "Config group override must be" in str(error):
        named = [a for a in arguments if (CONF / a.partition("=")[0]).is_dir()]
        wrong = [a for a in named if not (CONF / f"{a.replace('=', '/')}.yaml").is_file()]
        return f"{' '.join(wrong)}: a group takes the name of an option, and --help lists them"
    if isinstance(error, InstantiationException):
        where = re.search(r"full_key: (\S+)", str(error))
        reason = f"{where[1]}: {error.__cause__}" if where and error.__cause__ else str(error)
        return f"{' '.join(reason.split())} (a key too many, or a value of the wrong type?)"
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return " ".join(str(error).split())
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def nearest(key: str, known: list[str]) -> str | None:
    """Return the known key most similar to a mistyped one; None if none is similar.

    Keys of the same group come first. Within a group the last part of the key is compared before the whole key.
    """
    group, last = key.partition(".")[0], key.rpartition(".")[2]
    for names in ([name for name in known if name.startswith(f"{group}.")], known):
        ends = {name.rpartition(".")[2]: name for name in reversed(names)}
        if alike := get_close_matches(last, ends, n=1) or get_close_matches(key, names, n=1):
            return ends.get(alike[0], alike[0])
    return None


def known_keys(config_name: str, arguments: Sequence[str]) -> list[str]:
    """Return every dotted key of the configuration with the options that the arguments choose."""
    chosen = [a for a in arguments if (CONF / f"{a.replace('=', '/')}.yaml").is_file()]
    try:
        config = composed(config_name, chosen)
    except HydraException:  # a group of another program
        config = composed(config_name, [])
    leaves = [key.split(".") for key in flat(OmegaConf.to_container(config))]
    return sorted({".".join(names[:depth]) for names in leaves for depth in range(1, len(names) + 1)})


def make_task(overrides: Sequence[str], path: str) -> Task:
    """Return the task of a command line. path: the task's dataset if the configuration names none."""
    config = composed("train", overrides).task
    if OmegaConf.is_missing(config, "path"):
        config.path = path
    return instantiate(config)


def changes(config: DictConfig, before: Path) -> list[str]:
    """Return the differences from the configuration saved in `before`, each as 'key=now (was then)'."""
    now, then = (flat(OmegaConf.to_container(c, resolve=True)) for c in (config, saved_config(before)))
    then = {key: today(value) if key.endswith("_target_") else value for key, value in then.items()}
    others = ("output_dir", "ckpt_path", "resume", "max_time", "preflight", "callbacks", "logger", *MOVED)
    keys = [key for key in now | then if not key.startswith(others)]
    return [f"{key}={now.get(key)} (was {then.get(key)})" for key in keys if now.get(key) != then.get(key)]


def saved_config(file: Path) -> DictConfig:
    """Return the configuration that a run has saved. Raises UserError if the file is damaged."""
    try:
        found = OmegaConf.load(file)
    except Exception as error:  # a parser may raise anything
        found, reason = None, f": {' '.join(str(error).split())[:200]}"
    if not isinstance(found, DictConfig) or "task" not in found:
        raise UserError(f"{file} is no configuration of a run{'' if found is not None else reason}")
    return found


def check_run(config: DictConfig, first: bool) -> None:
    """Check all values, the output folder and a resumed checkpoint before anything is created. Raises UserError.

    first: whether this is the first of the run's processes, which owns the output folder.
    """
    check_values(config)
    folder = Path(config.output_dir).resolve()
    in_place = config.ckpt_path and folder in Path(config.ckpt_path).resolve().parents
    if first and (folder / "config.yaml").exists() and not in_place and not config.resume:
        raise UserError(
            f"{config.output_dir} already has a run: set hydra.run.dir to a new folder, or resume that run with "
            f"ckpt_path={config.output_dir}/checkpoints/last.ckpt"
        )
    check_resumed(config)


def check_model(pretrained: "Pretrained", config: DictConfig) -> None:
    """Raises UserError if the model cannot take the new adapter, or does not have the ids of stop_ids and of its end tokens."""
    pretrained.check_takes(config.get("adapter"))
    text = pretrained.config().get_text_config()
    last, ends = text.vocab_size - 1, text.eos_token_id
    if never := [token for token in (ends if isinstance(ends, list) else [ends or 0]) if token > last]:
        line = f"model.path={pretrained.path} has the end token {never[0]}, and its vocabulary ends at {last}"
        raise UserError(f"{line}: set eos_token_id in its config.json")
    for key in ("rollout.sampling.stop_ids", "eval.sampling.stop_ids"):
        if outside := [token for token in OmegaConf.select(config, key) or () if token > last]:
            raise UserError(f"{key}: the model has no token {outside[0]}, only 0 to {last}")


def announce(config: DictConfig) -> bool:
    """Check all values, and print what will be trained and where, before the large libraries load, which takes seconds.

    Returns whether there is something to train: False if resume=auto names a run that has finished.
    """
    check_values(config)
    if not (rank := os.environ.get("LOCAL_RANK", "0")).isdecimal():
        raise UserError(f"LOCAL_RANK={rank} in the environment is no number: unset it")
    over = bool(config.resume) and continued(config)
    if int(rank) or in_sweep():
        return True
    if over:
        print(f"this run has finished: {config.output_dir}")
        return False
    if config.ckpt_path:
        print(f"resuming {config.ckpt_path}", flush=True)
    chosen = HydraConfig.get().runtime.choices
    what = " ".join(f"{group}={chosen[group]}" for group in ("task", "model", "algo"))
    print(f"training: {what}, written to {config.output_dir}", flush=True)
    return True


def continued(config: DictConfig) -> bool:
    """Set ckpt_path to the checkpoint in the output folder, if there is one. Returns whether that run has already learned from as
    many rollouts as the configuration asks for."""
    from grpo.runs.runs import Run  # imports pandas

    newest = Path(config.output_dir, "checkpoints", "last.ckpt")
    if not config.ckpt_path and newest.exists():
        config.ckpt_path = str(newest)
    found = Run(config.output_dir).manifest
    return found.get("status") == "finished" and found.get("rollouts", 0) >= config.rollout.num_rollouts


def save_config(config: DictConfig) -> None:
    """Create the output folder and write the resolved configuration to its config.yaml."""
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, Path(config.output_dir) / "config.yaml", resolve=True)


def completed(parts: Mapping[str, Any], *missing: object) -> list[Any]:
    """Return the parts of a group as a list; parts with `_partial_: true` are first called with the `missing` arguments."""
    return [part(*missing) if isinstance(part, partial) else part for part in parts.values()]


def check_resumed(config: DictConfig) -> None:
    """Warn about values that differ from those of the resumed run: a forgotten argument would change the run unnoticed."""
    if not config.ckpt_path:
        return
    checkpoint = Path(config.ckpt_path)
    if not checkpoint.is_file():
        raise UserError(f"ckpt_path={checkpoint} is not a file: give checkpoints/last.ckpt of a run")
    check_whole(checkpoint)
    before = checkpoint.resolve().parents[1] / "config.yaml"
    if before.is_file() and (changed := changes(config, before)):
        if other := [line for line in changed if line.startswith("optim.optimizer._target_=")]:
            fix = "resume with that one, or start from the run's policy by model=path model.path=RUN/checkpoints/last"
            raise UserError(f"ckpt_path={checkpoint} has the state of another optimizer: {other[0]}; {fix}")
        log.warning("resuming with other values: %s", ", ".join(changed))


def check_whole(checkpoint: Path) -> None:
    """Raises UserError if a file is damaged or no checkpoint of a run. The tensors are not read."""
    import torch

    advice = "give checkpoints/last.ckpt of a run, or one of an earlier rollout"
    try:
        found = torch.load(checkpoint, map_location="cpu", weights_only=False, mmap=True)
    except Exception as error:  # a damaged file may raise anything
        raise UserError(
            f"ckpt_path={checkpoint} is damaged or no checkpoint ({type(error).__name__}): {advice}"
        ) from error
    parts = {
        "state_dict",
        "optimizer_states",
        "lr_schedulers",
        "loops",
        "callbacks",
        "pytorch-lightning_version",
        "policy_shapes",
    }
    if lacking := parts - (found.keys() if isinstance(found, dict) else set()):
        raise UserError(
            f"ckpt_path={checkpoint} is no checkpoint of a run, it lacks {', '.join(sorted(lacking))}: {advice}"
        )


def quiet() -> None:
    """Silence messages of libraries that a user cannot act on: advertising, and advice for other kinds of setups."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers reads it, too
    for name in ("lightning.pytorch", "lightning.fabric", "httpx", "httpx2", "huggingface_hub", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
