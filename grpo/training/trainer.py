"""The Lightning Trainer as this project needs it: one process a device, and an epoch that does not end."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from grpo.system.errors import UserError, oneof

# of the arithmetic. No bf16-true: model.dtype is the precision of parameters. No 16-mixed: clipping would need the loss scale
PRECISIONS = ("auto", "32-true", "bf16-mixed")
ELSEWHERE = {
    "gradient_clip_val": "optim.max_grad_norm",
    "accumulate_grad_batches": "optim.max_tokens_per_microbatch",
    "max_epochs": "rollout.num_rollouts",
    "max_steps": "rollout.num_rollouts",
}


def make_trainer(
    callbacks: list[Callback],
    logger: list[Logger],
    accelerator: str = "auto",
    devices: int = 1,
    precision: str = "auto",
    **kwargs,
) -> L.Trainer:
    """accelerator: auto, cpu, cuda or mps. precision: auto is bf16-mixed on a GPU, else 32-true.

    devices: with several, each samples and learns from its share of every rollout (DistributedDataParallel); the gradient is that
    of one device. kwargs go to lightning.Trainer. Raises UserError for a missing device and for settings without effect.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True, "auto": True}
    if not there.get(accelerator, False):
        usable = ", ".join(name for name, is_there in there.items() if is_there)
        raise UserError(f"trainer.accelerator={accelerator} is not available here; usable: {usable}")
    oneof("trainer.precision", precision, PRECISIONS)
    if precision == "auto":
        precision = "bf16-mixed" if accelerator in ("auto", "cuda") and there["cuda"] else "32-true"
    if not isinstance(devices, int) or devices < 1:
        raise UserError(f"trainer.devices={devices} must be a number of devices, 1 or more")
    for name in kwargs.keys() & ELSEWHERE:
        raise UserError(f"trainer.{name} has no effect here: set {ELSEWHERE[name]}")
    try:
        return L.Trainer(
            accelerator=accelerator,
            precision=precision,
            devices=devices,
            strategy="ddp" if devices > 1 else "auto",
            callbacks=callbacks,
            logger=logger,
            max_epochs=1,  # endless: RolloutCallback stops the run
            enable_checkpointing=False,  # callbacks.checkpoint does it, counting rollouts
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **kwargs,
        )
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise UserError(f"trainer: {error}") from error
