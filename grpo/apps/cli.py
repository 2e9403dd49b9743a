"""The part that all command lines share: one-line errors for mistakes, quiet libraries, checks before a run."""

import logging
import os
import re
import shlex
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo.apps.border import check_values
from grpo.apps.composing import CONF, composed, literal
from grpo.apps.resuming import (
    check_resumed,
    continued,
    folder_of,
    has_checkpoint,
    is_over,
    key_in,
    resolved,
    with_those_of_the_run,
)
from grpo.apps.sweep import sweep
from grpo.apps.trust import check_code
from grpo.env.types import Task
from grpo.system import witness
from grpo.system.errors import UserError, lacks_memory
from grpo.system.files import FULL, write_text
from grpo.system.secrets import guard_logs, hidden, learn, masked_argument, masked_values
from grpo.system.settings import flat
from grpo.system.stop import leave_early, on_signals

if TYPE_CHECKING:  # --help needs no torch
    from grpo.models.pretrained import Pretrained

log = logging.getLogger(__name__)

# The user's own setting. `run` sets HYDRA_FULL_ERROR as well, and the processes of further devices inherit that.
FULL_ERROR = os.environ.setdefault("GRPO_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "0")) == "1"

TYPED: list[str] = []  # the user's own arguments, without those of a resumed run that `run` puts before them

RENAMED = {
    "loader": "sampler",
    "algo.sampling_rounds": "selection=dynamic selection.rounds",
    "algo.sampling_filter": "selection=dynamic selection.by",
}
OWN_REWARD = "task.rewards: the reward of this task is its own: see its keys (--help), or define score (docs/tasks.md)"


def given_arguments() -> list[str]:
    """Return the arguments of the command line, with references such as ${oc.env:NAME} as they were given."""
    return OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)


def in_sweep() -> bool:
    """Return whether this process runs a sweep or a job of one."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def run(main: Callable[[], object], config_name: str) -> None:
    """Call a `hydra.main` function. Mistakes end the program with one line, or with a traceback if HYDRA_FULL_ERROR=1 is set."""
    quiet()
    if "--quiet" in sys.argv:  # warnings and errors go to stderr, everything to the log
        sys.argv.remove("--quiet")
        sys.argv += ["hydra.job_logging.handlers.console.stream=ext://sys.stderr"]
        sys.argv += ["+hydra.job_logging.handlers.console.level=WARNING"]
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise errors instead of printing them
    TYPED[:] = sys.argv[1:]
    if config_name == "train":
        sys.argv[1:] = with_those_of_the_run(sys.argv[1:])
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
            sys.argv.append("hydra.output_subdir=null")  # the first process writes Hydra's record
    with one_line_errors(config_name), sweep.reported():
        given = get_args_parser().parse_args()
        if given.help:
            from grpo.apps.help import USAGE, described

            print(USAGE, described(config_name, given.overrides), sep="\n\n")
        else:
            witness.watch()
            if config_name == "train" and not given.multirun:
                on_signals(leave_early)  # until the training begins
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
        print(f"{known.kind}{hidden(line)}", file=sys.stderr)
        sys.exit(known.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def explain(error: BaseException, config_name: str, arguments: Sequence[str] = ()) -> str | None:
    """Return one line that explains a mistake of the user; None for a bug of ours, which needs its traceback.

    arguments: the command line, which says which options of the groups are in use.
    """
    causes = list(chain(error))
    if own := next((cause for cause in causes if isinstance(cause, UserError)), None):
        return str(own)
    if missing := next((cause for cause in causes if isinstance(cause, MissingConfigException)), None):
        group, _, option = (missing.missing_cfg_file or "").rpartition("/")
        options = ", ".join(option for option in missing.options or () if option != "base")
        return f"{group} has no option {option!r}; options: {options}" if options else " ".join(str(missing).split())
    if unread := next((cause.override for cause in causes if isinstance(cause, OverrideParseException)), None):
        return " ".join(f"{unread}: {_quote(unread)}".split())
    if lacking := next((str(cause) for cause in causes if lacks_memory(cause)), None):
        least = "python train.py debug=forecast shows what a run needs, docs/memory.md how to need less"
        return f"not enough memory: {' '.join(lacking.split())[:200]}; {least}"
    wanted = isinstance(error, OSError) and (f"hydra.run.dir={error.filename}" in arguments or error.errno in FULL)
    if wanted or (isinstance(error, OSError) and error.filename and not isinstance(error, FileNotFoundError)):
        return f"the output folder cannot be written: {error}; set hydra.run.dir=FOLDER"
    if key := re.search(r"Could not override '([^']+)'", str(error)):
        if key[1] in ("task.rewards", "task.weights"):
            return OWN_REWARD
        near = RENAMED.get(key[1].removesuffix("._target_")) or nearest(key[1], known_keys(config_name, arguments))
        hint = f"did you mean {near}?" if near else "--help lists them"
        return f"there is no key {key[1]!r}; {hint} (+{key[1]}=... adds a new key)"
    if there := re.search(r"An item is already at '([^']+)'", str(error)):
        return f"there is a key {there[1]} already: leave out the +"
    if re.search(r"unexpected keyword argument '(rewards|weights)'", str(error)):
        return OWN_REWARD
    deleted = re.search(r"Could not delete from config. '([^']+)' does not exist", str(error))
    if deleted and deleted[1] in known_keys(config_name, arguments):
        return f"~{deleted[1]}: its value is null, and Hydra deletes no null: give {deleted[1]}=0 ~{deleted[1]}"
    if "Config group override must be" in str(error):
        named = [a for a in arguments if (CONF / a.partition("=")[0]).is_dir()]
        wrong = [a for a in named if not (CONF / f"{a.replace('=', '/')}.yaml").is_file()]
        return f"{' '.join(wrong)}: a group takes the name of an option, and --help lists them"
    if isinstance(error, InstantiationException):
        where = re.search(r"full_key: (\S+)", str(error))
        reason = f"{where[1]}: {error.__cause__}" if where and error.__cause__ else str(error)
        lacks = any(isinstance(cause, ModuleNotFoundError) for cause in causes)
        guess = "is it installed?" if lacks else "a key too many, or a value of the wrong type?"
        return f"{' '.join(reason.split())} ({guess})"
    gone = next((a for a in arguments if a.startswith("~") and key_in(a) in re.split(r"\W+", str(error))), None)
    if gone and not deleted and isinstance(error, (HydraException, OmegaConfBaseException)):
        return f"{gone}: the run needs {key_in(gone)}: give it another value or option, and --help lists them"
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return " ".join(str(error).split())
    return None


def _quote(argument: str) -> str:
    """Return what to do about an argument that Hydra's grammar cannot read."""
    key, given, value = argument.partition("=")
    if not given or not re.fullmatch(r"[+~]*[\w.@/-]+", key):
        return "an argument is KEY=VALUE, and --help lists the keys"
    word = f"{key}={literal(value)}"
    whole = shlex.quote(word) if re.search(r'["$`!\\]', word) else f'"{word}"'
    inner = ", or each text in it" if value[:1] in ("[", "{") else ""
    return f"quote the value{inner}, and the argument for the shell: {whole}"


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
    if (config := composed("train", overrides).task) is None:
        raise UserError("task=none has no reward: name a task, or task=jsonl with task.rewards")
    if OmegaConf.is_missing(config, "path"):
        config.path = path
    return instantiate(config)


def check_run(config: DictConfig, first: bool, overrides: Sequence[str]) -> None:
    """Check all values, the output folder and a resumed checkpoint before anything is created. Raises UserError.

    first: whether this is the first of the run's processes, which owns the output folder. overrides: the arguments; those of a
    Python program name the folder.
    """
    check_values(config)
    if config.task is None:
        if config.source is None:
            raise UserError("task=none is for samples that others play: give a task, or source=atropos or file")
        config.eval.every = 0
    keep_secrets(config)
    folder = Path(config.output_dir).resolve()
    given = config.ckpt_path and Path(config.ckpt_path).resolve()
    processes = config.trainer.num_nodes > 1 or "TORCHELASTIC_RUN_ID" in os.environ
    if processes and not any(word.startswith(("hydra.run.dir=", "output_dir=")) for word in [*sys.argv, *overrides]):
        raise UserError("each process would make a folder of its own: set hydra.run.dir to one that all of them see")
    in_place = given and folder in (given, *given.parents)
    if first and (folder / "config.yaml").exists() and not in_place and not config.resume.auto:
        line = f"{config.output_dir} already has a run: set hydra.run.dir to a new folder"
        raise UserError(f"{line}, or resume that run with ckpt_path={config.output_dir}")
    check_resumed(config)


def keep_secrets(config: DictConfig) -> None:
    """Mask secrets of configuration, command line and environment in the logs, and in Hydra's record in the output folder."""
    values = flat(OmegaConf.to_container(config, resolve=True))
    learn([*sys.argv[1:], *(f"{key}={value}" for key, value in values.items())])
    guard_logs()
    for file in Path(config.output_dir, ".hydra").glob("*.yaml"):
        record = masked_values(OmegaConf.to_container(OmegaConf.load(file)), masked_argument)
        write_text(file, OmegaConf.to_yaml(OmegaConf.create(record)))


def check_model(pretrained: "Pretrained", config: DictConfig) -> None:
    """Raises UserError if the model cannot take the new adapter, or does not have the ids of stop_ids and of its end tokens."""
    if "adapter" in config:  # of a run that trains
        pretrained.check_takes(config.adapter)
        warn_of_bfloat16(str(pretrained.dtype), config.trainer)
    text = pretrained.config().get_text_config()
    last, ends = text.vocab_size - 1, text.eos_token_id
    if never := [token for token in (ends if isinstance(ends, list) else [ends or 0]) if token > last]:
        line = f"model.path={pretrained.path} has the end token {never[0]}, and its vocabulary ends at {last}"
        raise UserError(f"{line}: set eos_token_id in its config.json")
    for key in ("rollout.sampling.stop_ids", "eval.sampling.stop_ids"):
        if outside := [token for token in OmegaConf.select(config, key) or () if token > last]:
            raise UserError(f"{key}: the model has no token {outside[0]}, only 0 to {last}")


def warn_of_bfloat16(dtype: str, trainer: DictConfig) -> None:
    """Warn of bfloat16 where it is computed on a CPU without instructions for it."""
    import torch

    chosen = "model.dtype=bfloat16" if dtype == "bfloat16" else f"trainer.precision={trainer.get('precision')}"
    on_cpu = trainer.get("accelerator") == "cpu" or not torch.accelerator.is_available()
    known = torch.backends.mkldnn.is_available()  # whether torch can tell what the CPU has
    if (
        chosen.endswith(("bfloat16", "bf16-mixed"))
        and on_cpu
        and known
        and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        log.warning("%s: this CPU has no instructions for it, so it saves memory and is slower than float32", chosen)


def announced(config: DictConfig, overrides: Sequence[str] | None = None) -> DictConfig | None:
    """Print what will be trained and where, before the large libraries load, which takes seconds. All values are checked.

    overrides: the arguments; None for those that Hydra has read. Returns the configuration, which is that of the resumed run
    with the command line on top; None if resume=auto names a run that has finished, or after replay.
    """
    check_values(config)
    name = next((name for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), "")
    if not (rank := os.environ.get(name, "0")).isdecimal():
        raise UserError(f"{name}={rank} in the environment is no number: unset it")
    if config.resume.auto and not config.ckpt_path and has_checkpoint(Path(config.output_dir)):
        config.ckpt_path = config.output_dir
    if config.ckpt_path or config.replay:
        arguments = given_arguments() if overrides is None else overrides
        config = continued(config, arguments)
        check_values(config)
        words = arguments if overrides is not None or in_sweep() else TYPED
        check_code(resolved(config), folder_of(Path(config.ckpt_path or config.replay)), words, config.trust)
    if config.replay:
        from grpo.apps.replay import replay  # imports torch

        quiet()
        replay(config)
        return None
    said = not int(rank) and not in_sweep()
    if config.resume.auto and is_over(config):
        if said:
            print(f"this run has finished: {config.output_dir}")
        return None
    if said and config.ckpt_path:
        print(f"resuming {config.ckpt_path}", flush=True)
    if said:
        chosen = HydraConfig.get().runtime.choices if overrides is None else {}
        what = "".join(f" {group}={chosen[group]}" for group in ("task", "model", "algo") if group in chosen)
        print(f"training{':' if what else ''}{what}, written to {config.output_dir}", flush=True)
    return config


def completed(parts: Mapping[str, Any], *missing: object) -> list[Any]:
    """Return the parts of a group as a list; parts with `_partial_: true` are first called with the `missing` arguments."""
    return [part(*missing) if isinstance(part, partial) else part for part in parts.values()]


def quiet() -> None:
    """Silence messages of libraries that a user cannot act on: advertising, and advice for other kinds of setups."""
    # a full disk is no reason for a traceback of a log file, or of the thread of TensorBoard
    logging.raiseExceptions = False
    threading.excepthook = lambda its: getattr(its.exc_value, "errno", 0) in FULL or threading.__excepthook__(its)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers reads it, too
    for name in ("lightning.pytorch", "lightning.fabric", "httpx", "httpx2", "huggingface_hub", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
