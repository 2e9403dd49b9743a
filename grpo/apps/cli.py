"""The command lines' common part: a mistake gets one line, and libraries are quiet."""

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
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo.apps.composing import CONF, composed
from grpo.apps.sweep import sweep
from grpo.env.types import Task
from grpo.moved import today
from grpo.system.errors import UserError
from grpo.system.settings import flat

log = logging.getLogger(__name__)

MOVED = {  # keys of before: where they are now
    "warm_start.worked_answers": "model.path.worked_answers._target_",
    "warm_start.clean_steps": "model.path.clean_steps",
}

# as the user set it: `run` sets it too, and a further device's process inherits that
FULL_ERROR = os.environ.setdefault("GRPO_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "0")) == "1"


def in_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def run(main: Callable[[], object], config_name: str) -> None:
    """Call a `hydra.main` function. HYDRA_FULL_ERROR=1 in the environment shows every mistake with its traceback."""
    quiet()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print
    with one_line_errors(config_name), sweep.reported():
        arguments = get_args_parser().parse_args()
        if arguments.help:
            from grpo.apps.help import USAGE, described

            print(USAGE, described(config_name, arguments.overrides), sep="\n\n")
        else:
            main()


@contextmanager
def one_line_errors(config_name: str) -> Iterator[None]:
    """Leave the program with one line where `explain` has one. Inside of a job too, or Hydra would comment on it."""
    if in_sweep():
        quiet()  # the process of a job may be new
    try:
        yield
    except Exception as error:
        if in_sweep():
            raise  # on with the next job; at the end the sweeper raises it again
        if FULL_ERROR or (line := explain(error, config_name, sys.argv[1:])) is None:
            raise
        sys.exit(f"error: {line}")
    except KeyboardInterrupt:
        sys.exit(130)


def explain(error: BaseException, config_name: str, arguments: Sequence[str] = ()) -> str | None:
    """One line for a mistake of the user's, None for a mistake of ours (which deserves its traceback).

    arguments: of the command line, for the groups that were chosen.
    """
    causes = list(chain(error))
    for cause in causes:
        if isinstance(cause, UserError):
            return str(cause)
    for cause in causes:
        if isinstance(cause, MissingConfigException):
            group, _, option = (cause.missing_cfg_file or "").rpartition("/")
            options = ", ".join(option for option in cause.options or () if option != "base")
            return (
                f"{group} has no option {option!r}; there are: {options}" if options else " ".join(str(cause).split())
            )
    if isinstance(error, OSError) and error.filename and not isinstance(error, FileNotFoundError):
        return f"the output folder cannot be written: {error}; set hydra.run.dir=FOLDER"
    if key := re.search(r"Could not override '([^']+)'", str(error)):
        if key[1] in MOVED:
            return f"{key[1]} is {MOVED[key[1]]} now"
        near = nearest(key[1], known_keys(config_name, arguments))
        hint = f"did you mean {near}?" if near else "--help lists them"
        return f"there is no key {key[1]!r}; {hint} (+{key[1]}=... adds a new key)"
    if isinstance(error, InstantiationException):
        where = re.search(r"full_key: (\S+)", str(error))
        reason = f"{where[1]}: {error.__cause__}" if where and error.__cause__ else str(error)
        return f"{' '.join(reason.split())} (a key too many, or a value of the wrong type?)"
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return " ".join(str(error).split())
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def nearest(key: str, known: list[str]) -> str | None:
    """The key that was probably meant: by its last name, then as a whole, in its own group before the others."""
    group, last = key.partition(".")[0], key.rpartition(".")[2]
    for names in ([name for name in known if name.startswith(f"{group}.")], known):
        ends = {name.rpartition(".")[2]: name for name in reversed(names)}
        if alike := get_close_matches(last, ends, n=1) or get_close_matches(key, names, n=1):
            return ends.get(alike[0], alike[0])
    return None


def known_keys(config_name: str, arguments: Sequence[str]) -> list[str]:
    """Every key of the configuration with the groups that were chosen, dotted."""
    chosen = [a for a in arguments if (CONF / f"{a.replace('=', '/')}.yaml").is_file()]
    leaves = [key.split(".") for key in flat(OmegaConf.to_container(composed(config_name, chosen)))]
    return sorted({".".join(names[:depth]) for names in leaves for depth in range(1, len(names) + 1)})


def make_task(overrides: Sequence[str], path: str) -> Task:
    """The task that a command line means; `path` is its dataset's where it has none of its own."""
    config = composed("train", overrides).task
    if OmegaConf.is_missing(config, "path"):
        config.path = path
    return instantiate(config)


def changes(config: DictConfig, before: Path) -> list[str]:
    """What differs from the configuration saved in `before`, as 'key=now (was then)'."""
    now, then = (flat(OmegaConf.to_container(c, resolve=True)) for c in (config, OmegaConf.load(before)))
    then = {key: today(value) if key.endswith("_target_") else value for key, value in then.items()}
    others = ("output_dir", "ckpt_path", "callbacks", "logger", *MOVED)
    keys = [key for key in now | then if not key.startswith(others)]
    return [f"{key}={now.get(key)} (was {then.get(key)})" for key in keys if now.get(key) != then.get(key)]


def check_run(config: DictConfig, first: bool) -> None:
    """Before anything is made. first: of the processes of a run, the one that owns its folder."""
    if not isinstance(config.seed, int) or config.seed < 0:
        raise UserError(f"seed={config.seed} must be a whole number, 0 or more")
    folder = Path(config.output_dir).resolve()
    in_place = config.ckpt_path and folder in Path(config.ckpt_path).resolve().parents
    if first and (folder / "config.yaml").exists() and not in_place:
        raise UserError(
            f"{config.output_dir} holds a run already: set hydra.run.dir to a new folder, or go on with that run: "
            f"ckpt_path={config.output_dir}/checkpoints/last.ckpt"
        )
    check_resumed(config)


def save_config(config: DictConfig) -> None:
    """As config.yaml in the run's folder, which is made."""
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, Path(config.output_dir) / "config.yaml", resolve=True)


def completed(parts: Mapping[str, Any], *missing: object) -> list[Any]:
    """The parts of a group. A part with `_partial_: true` is called with what only the program has."""
    return [part(*missing) if isinstance(part, partial) else part for part in parts.values()]


def check_resumed(config: DictConfig) -> None:
    """Say what differs from the run that is resumed, if one is: a forgotten argument would change it in silence."""
    if not config.ckpt_path:
        return
    checkpoint = Path(config.ckpt_path)
    if not checkpoint.is_file():
        raise UserError(f"ckpt_path={checkpoint} is not a file: give a run's checkpoints/last.ckpt")
    before = checkpoint.resolve().parents[1] / "config.yaml"
    if before.is_file() and (changed := changes(config, before)):
        log.warning("resuming with other values: %s", ", ".join(changed))


def quiet() -> None:
    """Silence what a user cannot act on: advertising, and advice for set-ups that are not this one."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers asks for it too
    for name in ("lightning.pytorch", "lightning.fabric", "httpx", "httpx2", "huggingface_hub", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
