"""How several devices share the work: strategies of Lightning, with a limit for each message, and ranks that watch each other."""

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from grpo.extras.devices.siblings import Siblings
from grpo.system import distributed
from grpo.system.errors import UserError
from grpo.system.ranges import enforced

log = logging.getLogger(__name__)

FIRST = "GRPO_FIRST_RANK"  # the process id of rank 0, for the ranks that it starts


@enforced("strategy")
@dataclass(frozen=True)
class Strategy:
    """A choice of what several devices share.

    kind: ddp: every device has the whole policy. fsdp2: each has a part (extras/devices/sharding.py). auto: ddp where that fits.
    reshard: whether a layer is given up between its forward and its backward pass. checkpoint: sharded: each writes a part.
    """

    kind: Literal["auto", "ddp", "fsdp2"] = "auto"
    reshard: bool = True
    checkpoint: Literal["whole", "sharded"] = "whole"

    def chosen(self, needs: Callable[[], int], total: int) -> "Strategy":
        """Return ddp or fsdp2 in place of auto, and log why. needs: the bytes of one device with ddp. total: what it has."""
        if self.kind != "auto":
            return self
        wanted = needs()
        kind, fits = ("ddp", "fits") if wanted <= total else ("fsdp2", "does not fit")
        log.info("strategy=%s: the whole policy needs %.1f GB, which %s %.1f GB", kind, wanted / 1e9, fits, total / 1e9)
        return replace(self, kind=kind)


def shards(trainer: L.Trainer) -> bool:
    """Return whether each rank will hold only a part of the policy."""
    return hasattr(trainer.strategy, "share")


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
        self.siblings = Siblings(timeout)

    def _configure_launcher(self) -> None:
        self._launcher = _Launcher(self.siblings, self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the process group and meet the other ranks."""
        super().setup_environment()
        distributed.open_play_group(self._timeout)
        me = (self.global_rank, os.getpid(), socket.gethostname())
        for other in distributed.all_gather([me]):
            if other != me:
                self.siblings.add(*other)


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
