"""Shared by all programs: one-line errors for mistakes, quiet libraries, checks before a run."""

import logging
import os
import sys
import threading
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from shutil import rmtree
from traceback import format_exc
from typing import TYPE_CHECKING, Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from grpo.apps.leave_early import leave_early
from grpo.apps.pipes import quiet_pipe
from grpo.config.appendix import of_appendix
from grpo.config.composing import composed, with_new_names
from grpo.config.early import check_early, check_unused, without_grader
from grpo.config.explain import chain, explain, known_elsewhere
from grpo.config.overruled import not_in_effect
from grpo.config.resuming import (
    add_saved_overrides,
    check_resumed,
    continued,
    folder_of,
    has_checkpoint,
    is_over,
    resolved,
)
from grpo.config.trust import check_code
from grpo.config.validation import check_values
from grpo.env.types import Task
from grpo.system import exits
from grpo.system.errors import UserError
from grpo.system.files import FULL, write_text
from grpo.system.output.console import SCREENS, busy, to_logs
from grpo.system.output.secrets import guard_logs, hidden, learn, masked_argument, masked_values
from grpo.system.output.users_code import from_here
from grpo.system.ranges import flat

if TYPE_CHECKING:  # --help needs no torch
    from grpo.models.pretrained import Pretrained

log = logging.getLogger(__name__)

# The user's own setting. `run` sets HYDRA_FULL_ERROR as well, and the processes of further devices inherit that.
FULL_ERROR = os.environ.setdefault("GRPO_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "0")) == "1"

EARLY = {"train": "training", "eval": "evaluation"}  # until these begin, a signal leaves nothing to save
TYPED: list[str] = []  # the user's own arguments, without those of a resumed run that `run` puts before them


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
        sys.argv[1:] = add_saved_overrides(sys.argv[1:])
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
            sys.argv.append("hydra.output_subdir=null")  # the first process writes Hydra's record
    screen = of_appendix("terminal.screen.screen", nullcontext)(os.environ.get(rank_variable(), "0") == "0")
    with screen, one_line_errors(config_name), of_appendix("sweep.sweep.reported", nullcontext)():
        arguments = parsed()
        if arguments.help:
            from grpo.config.overview import help_text

            print(help_text(config_name, arguments.overrides))
        else:
            exits.watch()
            if config_name in EARLY and not arguments.multirun:
                leave_early(EARLY[config_name])
            with busy("working") if config_name == "train" else nullcontext():
                main()


def parsed() -> Namespace:
    """Return flags and overrides of the command line. Raises UserError for a flag that Hydra does not have."""

    def refuse(reason: str) -> NoReturn:
        raise UserError(f"{reason}; settings are KEY=VALUE, and --help all lists them")

    parser = get_args_parser()
    parser.error = refuse
    arguments, unknown = parser.parse_known_args()
    if arguments.help:  # names of groups may follow it
        arguments.overrides += [word for word in unknown if not word.startswith("-")]
        unknown = [word for word in unknown if word.startswith("-")]
    if unknown and not unknown[0].startswith("-"):
        refuse(f"{unknown[0]} comes after a flag: give flags, as -m, before all settings")
    if unknown:
        flag = unknown[0].partition("=")[0]
        refuse("; ".join(filter(None, [f"there is no flag {flag}", known_elsewhere(flag)])))
    return arguments


def no_replay(config: DictConfig) -> NoReturn:
    """In place of the preflight's `replay`, in a tree without it."""
    raise UserError("replay=... needs grpo/extras/preflight, which this tree does not have")


def no_card(config: DictConfig) -> NoReturn:
    """In place of the preflight's `on_paper`, in a tree without it."""
    raise UserError("device=... needs grpo/extras/preflight, which this tree does not have")


@contextmanager
def one_line_errors(config_name: str) -> Iterator[None]:
    """Exit with one line if `explain` has one for the exception. Jobs use it too, because Hydra would add its own comment."""
    if in_sweep():
        quiet()  # the job may run in a new process
    try:
        with quiet_pipe():
            yield
    except Exception as error:
        if in_sweep():
            raise  # the sweep continues with the next job, and the sweeper raises this again at the end
        if FULL_ERROR or (line := explain(error, config_name, sys.argv[1:])) is None:
            to_logs(format_exc())
            raise
        mistake = next((cause for cause in chain(error) if isinstance(cause, UserError)), UserError())
        hydra = HydraConfig.instance().cfg
        folder = None if hydra is None else OmegaConf.select(hydra, "hydra.runtime.output_dir")
        if folder and not rank_variable():
            remove_unused(Path(folder))
        print(f"{mistake.kind}{hidden(line)}", file=sys.stderr)
        if not SCREENS:  # which write to the log, too
            to_logs(f"{mistake.kind}{line}")
        sys.exit(mistake.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def remove_unused(folder: Path) -> None:
    """Remove the folder of a run that ended before it wrote anything: Hydra makes one, with its record and a log, which says at
    most that the run begins."""
    files = [file for file in folder.iterdir() if file.name != ".hydra"] if folder.is_dir() else []
    if all(file.name.endswith(".log") for file in files):
        said = [line for file in files for line in file.read_bytes().splitlines()]
        if all(b"training: " in line for line in said):  # of `announced`
            rmtree(folder, ignore_errors=True)


def rank_variable() -> str:
    """Return the variable of the environment that numbers this process among those of a run; "" if there is none."""
    return next((name for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), "")


def make_task(overrides: Sequence[str], path: str) -> Task:
    """Return the task of a command line. path: the task's dataset if the configuration names none."""
    if (config := composed("train", overrides).task) is None:
        raise UserError("task=none has no reward: name a task, or task=jsonl with task.rewards")
    if OmegaConf.is_missing(config, "path"):
        config.path = path
    return instantiate(config)


def check_run(config: DictConfig, first: bool, overrides: Sequence[str]) -> None:
    """Check the output folder and a resumed checkpoint before anything is created. All values are checked. Raises UserError.

    first: whether this is the first of the run's processes, which owns the output folder. overrides: the arguments; those of a
    Python program name the folder.
    """
    if config.task is None:
        if config.source is None:
            raise UserError("task=none is for samples that others play: give a task, or source=atropos or file")
        config.eval.every = 0
    if config.get("device"):
        of_appendix("forecast.cards.on_paper", no_card)(config)
    keep_secrets(config)
    processes = config.trainer.num_nodes > 1 or "TORCHELASTIC_RUN_ID" in os.environ
    if processes and not any(word.startswith(("hydra.run.dir=", "output_dir=")) for word in [*sys.argv, *overrides]):
        raise UserError("each process would make a folder of its own: set hydra.run.dir to one that all of them see")
    if first:
        check_unused(config)
        monitor = OmegaConf.select(config, "callbacks.checkpoint.monitor") or ""
        if config.eval.every == 0 and monitor.startswith("eval/"):
            log.info(
                "eval.every=0: the run is not evaluated, and there is no checkpoints/best; last is its newest policy"
            )
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
        if config.trainer.get("precision") == "16-true" and pretrained.dtype != "float16":
            line = "trainer.precision=16-true computes in float16 parameters, whose float32 masters learn"
            raise UserError(f"{line}: set model.dtype=float16, or trainer.precision=16-mixed")
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
    """Warn of bfloat16 where it is computed on a CPU or a GPU without instructions for it."""
    import torch

    from grpo.training.trainer import BFLOAT16

    chosen = "model.dtype=bfloat16" if dtype == "bfloat16" else f"trainer.precision={trainer.get('precision')}"
    on_cpu = trainer.get("accelerator") == "cpu" or not torch.accelerator.is_available()
    if not chosen.endswith(("bfloat16", "bf16-mixed")) or trainer.get("card"):  # the card is not of this machine
        return
    if not on_cpu:
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < BFLOAT16:
            log.warning(
                "%s: this GPU has no instructions for it: set model.dtype=float16 trainer.precision=16-mixed", chosen
            )
        return
    can_tell = torch.backends.mkldnn.is_available()  # whether torch can tell what the CPU has
    if can_tell and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        log.warning("%s: this CPU has no instructions for it, so it saves memory and is slower than float32", chosen)


def announced(config: DictConfig, overrides: Sequence[str] | None = None) -> DictConfig | None:
    """Print what will be trained and where, before the large libraries load, which takes seconds. All values are checked.

    overrides: the arguments; None for those that Hydra has read. Returns the configuration, which is that of the resumed run
    with the command line on top; None if resume=auto names a run that has finished, or after replay.
    """
    with_new_names(config)
    check_values(config)
    name = rank_variable()
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
        quiet()
        of_appendix("preflight.replay.replay", no_replay)(config)  # imports torch
        return None
    ungraded = without_grader(config)
    shows = not int(rank) and not in_sweep()
    if not int(rank) and not config.ckpt_path:
        for line in not_in_effect(config, given_arguments() if overrides is None else overrides):
            log.warning("%s", line)
    if config.resume.auto and is_over(config):
        if shows:
            print(f"this run has finished: {config.output_dir}")
        return None
    if not name and not in_sweep():  # other processes of the run may have made its folder
        check_early(config)
    if shows and config.ckpt_path:
        print(f"resuming {config.ckpt_path}", flush=True)
    if shows:
        chosen = HydraConfig.get().runtime.choices if overrides is None else {}
        what = "".join(f" {group}={chosen[group]}" for group in ("task", "model", "algo") if group in chosen)
        print(f"training{':' if what else ''}{what}, written to {from_here(config.output_dir)}", flush=True)
        if ungraded:
            print(ungraded, flush=True)
    return config


def completed(callbacks: Mapping[str, Any], tokenizer: Any) -> list[Any]:
    """Return the callbacks of the configuration as a list; those with `_partial_: true` first get the tokenizer. Where the policy
    sees, tables of samples get pictures."""
    made = [one(tokenizer) if isinstance(one, partial) else one for one in callbacks.values()]
    return [*map(sight.taught, made)] if (sight := getattr(tokenizer, "sight", None)) else made


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
