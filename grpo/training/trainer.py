"""Builds the Lightning Trainer: one process per device, and an endless epoch."""

from typing import Annotated, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from grpo.system import memory
from grpo.system.errors import UserError
from grpo.system.ranges import Range, enforced

# precision of computation. No bf16-true: model.dtype is the precision of parameters. No 16-mixed: clipping needs the loss scale
Precision = Literal["auto", "32-true", "bf16-mixed"]


@enforced("trainer")
def make_trainer(
    callbacks: list[Callback],
    logger: list[Logger],
    accelerator: str = "auto",
    devices: Annotated[int, Range(1, 1024)] = 1,
    precision: Precision = "auto",
    **kwargs,
) -> L.Trainer:
    """Return the Trainer.

    accelerator: auto, cpu, cuda or mps. precision: auto is bf16-mixed on a GPU, else 32-true.
    devices: each of several devices samples and learns from its share of every rollout (DistributedDataParallel); the gradient
    equals that of a single device. kwargs: more arguments of lightning.Trainer.
    Raises UserError for a missing device.
    """
    memory.settle()
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True, "auto": True}
    if not there.get(accelerator, False):
        usable = ", ".join(name for name, is_there in there.items() if is_there)
        raise UserError(f"trainer.accelerator={accelerator} is not available here: choose {usable}")
    if precision == "auto":
        precision = "bf16-mixed" if accelerator in ("auto", "cuda") and there["cuda"] else "32-true"
    try:
        trainer = L.Trainer(
            accelerator=accelerator,
            precision=precision,
            devices=devices,
            strategy="ddp" if devices > 1 else "auto",
            callbacks=callbacks,
            logger=logger,
            max_epochs=1,  # endless: RolloutCallback stops the run
            enable_checkpointing=False,  # callbacks.checkpoint does it, by rollouts
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **kwargs,
        )
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise UserError(f"trainer: {error}") from error
    if rank_zero_only.rank >= trainer.world_size:  # this process would train and save nothing
        line = (
            f"the environment says that this is process {rank_zero_only.rank}, counted from 0, of {trainer.world_size}"
        )
        raise UserError(f"{line}: unset RANK, LOCAL_RANK and SLURM_PROCID, or set trainer.devices")
    return trainer
