"""A GPU that is there and cannot be used: torch is silent about it, and a run would take the CPU."""

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
        raise UserError(f"this machine has a GPU that {who} would not use: {why}, or set {cpu}")


def unused_gpu() -> str | None:
    """Return why torch sees no GPU although this process may open one; None if it sees one, there is none, or
    CUDA_VISIBLE_DEVICES hides it."""
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
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
