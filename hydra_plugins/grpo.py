"""The default launcher of sweeps, hydra/launcher=processes: Hydra finds it in this package, and it runs grpo/apps/sweep."""

import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus, configure_log
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError

from grpo.config.composing import literal
from grpo.config.validation import check_values
from grpo.extras.sweep.arms import check_arms
from grpo.extras.sweep.jobs import Job
from grpo.extras.sweep.sweep import Sweep, places
from grpo.system.errors import UserError
from grpo.system.ranges import Count, require

ASK = 300.0  # seconds for torch to start and to count the GPUs
OF_THE_SWEEP = re.compile(r"[+~]*hydra(/launcher|[.]launcher|/sweeper|[.]sweeper|[.]sweep[.]|[.]mode|[.]run[.])")


class Processes(Launcher):
    """Runs each job as a plain command in its own process, so that it can be repeated by hand.

    jobs: number of jobs at the same time; auto is one for each CUDA device, and one on a CPU. prune: in a search a job is stopped
    when its accuracy is below the median of at least so many finished ones; None: no job is.
    """

    def __init__(self, jobs: int | str = "auto", prune: int | None = None) -> None:
        require("hydra.launcher.prune", prune, Count | None)
        self.jobs, self.prune = jobs, prune

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Prepare the sweep and check that its folder has no other sweep. Hydra calls this before the sweeper writes anything."""
        self.context, self.config = hydra_context, config
        params = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
        overrides = parsed([*params, *config.hydra.overrides.task])
        self.swept = {key for key, override in overrides.items() if override.is_sweep_override()}
        if self.searches and config.eval.every == 0:
            raise UserError("eval.every=0: a search maximises held-out accuracy, so set eval.every to 1 or more")
        if self.prune and not self.searches:
            raise UserError("hydra.launcher.prune is for a search (sweep=optuna): arms are compared by whole runs")
        folder = Path(config.hydra.sweep.dir)
        again = [argument for argument in sys.argv if not argument.startswith("hydra.sweep.dir=")]
        again = shlex.join(["python", *again, f"hydra.sweep.dir={literal(folder)}"])
        trials = config.hydra.sweeper.get("n_trials") or 0
        self.sweep = Sweep(folder, self.command, places(self.jobs, devices(), os.environ), again, trials, self.prune)
        logging.getLogger("optuna").setLevel(logging.WARNING)  # Hydra names the study, too
        for number, job in enumerate(self.sweep.numbered()):
            before = parsed(job)
            for key in before | overrides:
                was, now = before.get(key), overrides.get(key)
                if not (was and now and (key in self.swept or text(was) == text(now))):
                    theirs, ours = (o.input_line if o else f"no {key}" for o in (was, now))
                    line = f"{folder} has another sweep: its job {number} has {theirs}, this one {ours}"
                    raise UserError(f"{line}; set hydra.sweep.dir to a new folder")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return their accuracies; a failed job returns None, because an exception would stop the sweeper."""
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        before = self.sweep.numbered()
        try:
            jobs = [self.job(list(overrides)) for overrides in job_overrides]
            if not self.searches and "algo" in self.config:
                check_arms({job.label: config for job, config in jobs if job.status == "waiting"})
        except UserError:
            self.sweep.forget(before)
            raise
        jobs = [job for job, _ in jobs]
        self.sweep.run()
        done = JobStatus.COMPLETED
        return [JobReturn(overrides=job.overrides, status=done, _return_value=job.accuracy) for job in jobs]

    @property
    def searches(self) -> bool:
        """Whether a sweeper chooses jobs by the results of others, so that a job may fail."""
        return self.config.hydra.sweeper._target_.rpartition(".")[2] != "BasicSweeper"

    def job(self, overrides: list[str]) -> tuple[Job, DictConfig]:
        """Return the job with these overrides, added to the sweep, and its configuration without `hydra`."""
        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        values = OmegaConf.masked_copy(config, set(config) - {"hydra"})
        values.output_dir = "."  # known only in the job, as other values that refer to hydra
        with suppress(InterpolationResolutionError):
            check_values(values)
        if config.trainer.devices != 1:
            raise UserError(f"trainer.devices={config.trainer.devices}: a job of a sweep uses one device: set it to 1")
        with open_dict(config):
            config.hydra.job.num = number = self.sweep.number(overrides)
            config.hydra.job.id = str(number)
        folder = self.sweep.folder / config.hydra.sweep.subdir
        label = " ".join(short(o) for key, o in parsed(overrides).items() if key in self.swept)
        rollouts = config.rollout.num_rollouts if "rollout" in config else None
        return self.sweep.add(Job(number, folder, overrides, label or "default settings", rollouts)), values

    def command(self, job: Job, overrides: Sequence[str]) -> list[str]:
        """Return the command that runs a job with these overrides in its folder."""
        arguments = get_args_parser().parse_args()
        flags = {name: getattr(arguments, name) for name in ("config_path", "config_name", "config_dir")}
        hydra = [override for override in self.config.hydra.overrides.hydra if not OF_THE_SWEEP.match(override)]
        return [
            *(sys.executable, sys.argv[0]),
            *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None),
            *(*overrides, *hydra, "hydra.mode=RUN", f"hydra.run.dir={literal(job.folder)}"),
        ]


def parsed(overrides: Iterable[str]) -> dict[str, Override]:
    """Return parsed overrides by key; the last override of a key wins."""
    return {o.get_key_element(): o for o in OverridesParser.create().parse_overrides(list(overrides))}


def short(override: Override) -> str:
    """Return an override for people: a number that a search has drawn is in four digits."""
    value = override.value()
    return f"{override.get_key_element()}={value:.4g}" if isinstance(value, float) else str(override.input_line)


def text(override: Override) -> str:
    """Return the value of an override as text."""
    return override.get_value_element_as_str()


def devices() -> list[str]:
    """Return the CUDA devices that this process may use, as values for CUDA_VISIBLE_DEVICES of its children."""
    if not any(Path("/dev", driver).exists() for driver in ("nvidiactl", "dxg", "kfd")):  # NVIDIA, WSL, AMD
        return []
    ask = "import torch; print(torch.cuda.device_count())"  # in a process of its own, so that the sweep need not import torch
    try:
        count = int(subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, check=True, timeout=ASK).stdout)
    except subprocess.TimeoutExpired:
        line = f"torch did not count this machine's GPUs within {ASK:g} s"
        raise UserError(f"{line}: see whether nvidia-smi answers, or set hydra.launcher.jobs") from None
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in named.split(",")][:count] if named else [str(i) for i in range(count)]
