"""Builds the Lightning Trainer: one process per device, and an endless epoch."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeVar

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from grpo.system import memory
from grpo.system.errors import UserError
from grpo.system.gpu import check_gpu
from grpo.system.ranges import Range, Seconds, enforced
from grpo.training.checkpoints import RunCheckpoints

T = TypeVar("T", bound=Callback)

# precision of computation. No bf16-true: model.dtype is the precision of parameters, and 16-true is its name for float16
Precision = Literal["auto", "32-true", "bf16-mixed", "16-mixed", "16-true"]
# what passes compute in, of parameters in float32
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
BFLOAT16 = (8, 0)  # the compute capability from which on a GPU has instructions for it


class Sharing(Protocol):
    """The slot `strategy`: what several devices share. One device needs none."""

    def of_lightning(
        self, needs: Callable[[], int], total: int, timeout: float, ranks: int, precision: str
    ) -> tuple[Any, str]:
        """Return Lightning's strategy for several ranks, and the precision that its Trainer gets.

        needs: returns the bytes of one device without sharding. total: those that it may fill. timeout: of a collective, seconds.

        The run asks what it returns for more, if it has it: `share(module)` shares out the weights; `while_sampling(policy)` is
        the context in which a rank samples by itself; `check_ranks(devices, prompts, rollouts)` refuses ranks that do not fit;
        `ranks` watches them, see `Stop.listen`.
        """


@enforced("trainer")
def make_trainer(
    callbacks: list[Callback],
    logger: list[Logger],
    accelerator: str = "auto",
    devices: Annotated[int, Range(1, 1024)] = 1,
    num_nodes: Annotated[int, Range(1, 1024)] = 1,
    precision: Precision = "auto",
    matmul_precision: Literal["highest", "high"] = "highest",
    deterministic: bool | Literal["warn"] = False,
    strategy: Sharing | None = None,
    needs: Callable[[str, int, str], int] = lambda precision, ranks, device: 0,
    timeout: Seconds = 3600.0,
    default_root_dir: str | None = None,
    plugins: Sequence[Any] = (),
    **kwargs,
) -> L.Trainer:
    """Return the Trainer.

    accelerator: auto, cpu, cuda or mps. precision: auto is bf16-mixed on a GPU that has it, 16-mixed on another one, else
    32-true. 16-true computes in the parameters' own number type, which must then be float16.
    matmul_precision: of products of float32 matrices; high is TF32. deterministic: see lightning.Trainer.
    devices: each of several devices samples and learns from its share of every rollout; the gradient equals that of a single
    device. num_nodes: machines, each with so many devices. Where torchrun has started this process, it knows both numbers.
    strategy: what the devices share. needs: the bytes of one device without sharding. timeout: seconds that a device waits for
    another one that still runs. default_root_dir: the folder in which Lightning looks for checkpoints of Slurm by itself.
    plugins, kwargs: more arguments of lightning.Trainer.
    Raises UserError for a missing device, and for a GPU that is there and that torch cannot use.
    """
    memory.settle()
    on_gpu = takes_gpu(accelerator)
    if precision == "auto":
        precision = best_on_gpu(torch.cuda.get_device_capability()) if on_gpu else "32-true"
    if matmul_precision == "high" and not on_gpu:
        raise UserError("trainer.matmul_precision=high is TF32, which only a GPU has: set it to highest")
    torch.set_float32_matmul_precision(matmul_precision)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        devices, num_nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    ranks, among_ranks = devices * num_nodes, "auto"
    if ranks > 1:
        place = torch.device("cuda" if on_gpu else "cpu")
        # each rank chooses alone and must choose the same: by the whole GPU, or by its share of the CPU's memory
        total = memory.with_slack(memory.total(place)) if on_gpu else memory.free(place) // devices
        if strategy is None:
            raise UserError(f"trainer.devices={devices} needs a strategy: those of conf/strategy")
        needed = partial(needs, precision, ranks, place.type)
        among_ranks, precision = strategy.of_lightning(needed, total, timeout, ranks, precision)
    if precision == "16-true":
        precision = "32-true"  # no autocast
    if precision == "16-mixed":
        plugins, precision = [InFloat16("cuda" if on_gpu else "mps" if accelerator == "mps" else "cpu"), *plugins], None
    if SLURMEnvironment.detect():
        plugins = [SLURMEnvironment(auto_requeue=False), *plugins]  # Stop takes the signals
    try:
        trainer = Trainer(
            accelerator=accelerator,
            precision=precision,
            deterministic=deterministic,
            devices=devices,
            num_nodes=num_nodes,
            strategy=among_ranks,
            callbacks=callbacks,
            logger=logger,
            plugins=[RunCheckpoints(), *plugins],
            # a rollout is a batch: how many there are is not known before the data, and a resumed run may ask for more
            max_epochs=1,  # endless: RolloutCallback stops the run
            enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),  # else Lightning adds its own
            enable_progress_bar=False,
            enable_model_summary=False,
            # a batch has no rows before its rollout, and `play` gives each rank its share of the prompts
            use_distributed_sampler=False,
            default_root_dir=default_root_dir,
            **kwargs,
        )
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise UserError(f"trainer: {error}") from error
    if rank_zero_only.rank >= trainer.world_size:  # this process would train and save nothing
        process = f"process {rank_zero_only.rank}, counted from 0, of {trainer.world_size}"
        line = f"the environment says that this is {process}"
        raise UserError(f"{line}: unset RANK, LOCAL_RANK and SLURM_PROCID, or set trainer.devices")
    return trainer


def takes_gpu(accelerator: str) -> bool:
    """Return whether the run uses CUDA GPUs. Raises UserError for a device that is missing, or that torch cannot use."""
    if accelerator in ("auto", "cuda", "gpu"):
        check_gpu("the run", "trainer=cpu")
    cuda = torch.cuda.is_available()
    available = {"cuda": cuda, "mps": torch.backends.mps.is_available(), "cpu": True, "auto": True}
    if not available.get(accelerator, False):
        usable = ", ".join(name for name, is_available in available.items() if is_available)
        raise UserError(f"trainer.accelerator={accelerator} is not available here: choose {usable}")
    return cuda and accelerator in ("auto", "cuda")


class Trainer(L.Trainer):
    """Lightning's Trainer, which knows who asked it to stop. stopped_by: a class, or the file and line of a function."""

    stopped_by: str | None = None
    stops = False

    @property
    def should_stop(self) -> bool:
        """Whether the run ends after this rollout."""
        return self.stops

    @should_stop.setter
    def should_stop(self, stops: bool) -> None:
        if stops and not self.stops:
            frame = sys._getframe(1)
            owner, place = frame.f_locals.get("self"), f"{frame.f_code.co_filename}, line {frame.f_lineno}"
            self.stopped_by = place if owner is None else type(owner).__name__
        self.stops = stops


class InFloat16(MixedPrecision):
    """Autocast to float16. The scale of the loss is the module's: it takes it out before it clips."""

    def __init__(self, device: str) -> None:
        super().__init__("16-mixed", device)
        self.scaler = None


def best_on_gpu(capability: tuple[int, int]) -> Precision:
    """Return the mixed precision that suits a GPU of this compute capability: V100 and T4 have no bfloat16."""
    return "bf16-mixed" if capability >= BFLOAT16 else "16-mixed"


def shards(trainer: L.Trainer) -> bool:
    """Return whether each rank will hold only a part of the policy."""
    return hasattr(trainer.strategy, "share")


def callbacks_of(callbacks: Sequence[Callback], kind: type[T]) -> list[T]:
    """Return a run's callbacks that are of a class. A callback finds another one that it needs in this way."""
    return [callback for callback in callbacks if isinstance(callback, kind)]
