"""A GPU that is there and cannot be used: torch is silent about it, and a run would take the CPU, or end in its first kernel."""

import os
import re
from contextlib import suppress
from glob import glob
from pathlib import Path

import torch

from grpo.system.errors import UserError

NODES = "/dev/nvidia[0-9]*"
DRIVER = "/proc/driver/nvidia/version"
NEEDED = {"12": 525, "13": 580}  # the oldest driver by the CUDA version that torch was built for


def check_gpu(who: str, cpu: str) -> None:
    """Raise UserError if there is a GPU that torch cannot use. who: what would use it. cpu: the setting to suggest instead."""
    if why := unused_gpu():
        raise UserError(f"this machine has a GPU that {who} cannot use: {why}, or set {cpu}")


def unused_gpu() -> str | None:
    """Return why torch cannot use a GPU that this process may open; None if it can, there is none, or
    CUDA_VISIBLE_DEVICES hides it."""
    if torch.cuda.is_available():
        return gpu_without_code()
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    if not any(map(may_be_opened, glob(NODES))):
        return None
    cuda = torch.version.cuda
    if cuda is None:
        return f"torch {torch.__version__} was built for CPUs: install its CUDA build"
    driver, needed = driver_version(), NEEDED.get(cuda.partition(".")[0])
    if driver and needed and int(driver.partition(".")[0]) < needed:
        return f"torch is built for CUDA {cuda}, which needs driver {needed} or newer, and this is {driver}: update it"
    return f"torch is built for CUDA {cuda} and cannot start it: see what nvidia-smi says"


def gpu_without_code() -> str | None:
    """Return why torch cannot compute on the first GPU that it sees, since it was built for other ones; None if it can."""
    arches, card = torch.cuda.get_arch_list(), torch.cuda.get_device_capability()
    built = [(kind, (int(x), int(y))) for kind, x, y in re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(arches))]
    # code for a card runs on later ones of its generation, and PTX (compute) on all later ones
    if not built or any(of <= card and (kind == "compute" or of[0] == card[0]) for kind, of in built):
        return None
    line = f"{torch.cuda.get_device_name()} has compute capability {card[0]}.{card[1]}, and torch was built for"
    return f"{line} {', '.join(arches)}: install a build that has it (up to 7.2: for CUDA 12.6), take another card"


def may_be_opened(node: str) -> bool:
    """Return whether this process may use a device: a job without a GPU sees the nodes of a machine, and may not open them."""
    with suppress(OSError):
        os.close(os.open(node, os.O_RDWR))
        return True
    return False


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, as 580.65.06; None if it is unknown."""
    with suppress(OSError):
        if version := re.search(r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)\s", Path(DRIVER).read_text()):
            return version[1]
    return None
