"""Layer 3 - the Lightning Trainer as this project needs it: one device, and an epoch that does not end."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from grpo.errors import UserError


def make_trainer(
    callbacks: list[Callback], logger: list[Logger], accelerator: str = "auto", precision: str = "auto", **kwargs
) -> L.Trainer:
    """accelerator: auto, cpu, cuda or mps. precision: auto is bf16-mixed on a GPU (float32 parameters), else 32-true.

    kwargs go to lightning.Trainer. Raises UserError for a device that is not there.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True, "auto": True}
    if not there.get(accelerator, False):
        usable = ", ".join(name for name, is_there in there.items() if is_there)
        raise UserError(f"trainer.accelerator={accelerator} is not available here; usable: {usable}")
    if precision == "auto":
        precision = "bf16-mixed" if accelerator in ("auto", "cuda") and there["cuda"] else "32-true"
    if precision in ("16-mixed", "16", 16):
        raise UserError(
            f"trainer.precision={precision} needs a loss scale that is not here: take bf16-mixed or 32-true"
        )
    if kwargs.get("devices", 1) not in (1, "1", "auto"):
        raise UserError(
            f"trainer.devices={kwargs['devices']}: training runs on one device; start one job for each of them"
        )
    ours = {
        "accelerator": accelerator,
        "precision": precision,
        "devices": 1,
        "callbacks": callbacks,
        "logger": logger,
        "max_epochs": 1,  # endless: RolloutCallback stops the run
        "enable_checkpointing": False,  # callbacks.checkpoint does it, counting rollouts
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    try:
        return L.Trainer(**kwargs | ours)
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise UserError(f"trainer: {error}") from error
