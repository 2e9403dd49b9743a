"""Ranks that watch each other: a dead one is named and ends the others. Each message between them has a limit."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from grpo.extras.devices.siblings import Siblings
from grpo.system import distributed
from grpo.system.errors import UserError

FIRST = "GRPO_FIRST_RANK"  # the process id of rank 0, for the ranks that it starts


def check_devices(devices: int, prompts: int, rollouts: int) -> None:
    """Raise UserError if the engine or the number of prompts does not fit this number of devices, or if they resume apart."""
    if distributed.world_size() != devices:  # vLLM in the trainer's process creates its own process group
        line = f"the engine has made a process group of {distributed.world_size()} for the {devices} devices"
        raise UserError(f"{line}: set trainer.devices and num_nodes, also with torchrun, or engine=transformers")
    resumed_after = set(distributed.all_gather([rollouts]))
    if len(resumed_after) > 1:
        line = f"the devices resume after {min(resumed_after)} and {max(resumed_after)} rollouts"
        raise UserError(f"{line}: all machines must see the same hydra.run.dir")
    if prompts < devices:
        raise UserError(f"rollout.prompts={prompts} is fewer than the {devices} devices: each needs a prompt, raise it")


class Watched:
    """A part of a strategy: a dead rank is named and ends the others. timeout: seconds for one collective."""

    def __init__(self, timeout: float, **settings: Any) -> None:
        super().__init__(timeout=timedelta(seconds=timeout), **settings)
        self.ranks = Siblings(timeout)

    def check_ranks(self, devices: int, prompts: int, rollouts: int) -> None:
        """See `check_devices`."""
        check_devices(devices, prompts, rollouts)

    def _configure_launcher(self) -> None:
        self._launcher = _Launcher(self.ranks, self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the process group and meet the other ranks."""
        super().setup_environment()
        distributed.open_play_group(self._timeout)
        me = (self.global_rank, os.getpid(), socket.gethostname())
        for other in distributed.all_gather([me]):
            if other != me:
                self.ranks.add(*other)


class WatchedRanks(Watched, DDPStrategy):
    """DistributedDataParallel: each rank holds the whole policy."""


class _Launcher(_SubprocessScriptLauncher):
    """Starts the other ranks. Lightning's own observer of them is not started: it kills all ranks without a word."""

    def __init__(self, siblings: Siblings, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.siblings = siblings

    def launch(self, function: Callable, *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks, unless this is one of them, and call the function. Raises UserError if they can never come."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            if self.num_nodes > 1 and "MASTER_ADDR" not in os.environ:
                line = f"trainer.num_nodes={self.num_nodes} needs a process on each machine"
                raise UserError(f"{line}: python -m grpo.launch starts them (docs/hardware.md)")
            if self.num_processes > (most := max(8, os.cpu_count() or 1)):
                raise UserError(f"trainer.devices={self.num_processes} are too many processes here: at most {most}")
            os.environ[FIRST] = str(os.getpid())
            self._call_children_scripts()
        elif first := os.environ.get(FIRST):
            self.siblings.add(0, int(first), socket.gethostname())
        for i, process in enumerate(self.procs):
            self.siblings.add(i + 1, process.pid, socket.gethostname())
        _set_num_threads_if_needed(num_processes=self.num_processes)
        with self.siblings.watched(together=dist.barrier):
            return function(*args, **kwargs)
