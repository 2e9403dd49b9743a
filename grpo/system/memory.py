"""Memory in bytes: how much a device has left, and the most that this process held in a phase; and copies between memories.

Work is queued on a GPU and the host goes ahead, until it reads a result. An ordinary copy waits for all queued work, in both
directions; that of `sent` does not. See docs/performance.md, and tests/training/test_waits.py, which counts the waits.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

# bytes of an allocation that goes back to the system when it is freed; every page of the next one is zeroed anew
LARGE = 1 << 22
KEPT = 1 << 28  # free bytes of the heap that stay between phases: enough for small models
# of a GPU, which no plan gives away: a display and other processes grow, and a forecast has errors. A margin, not measured
SLACK = 0.03
PINNED = {"cuda"}  # devices that wait for a copy from or to pages of the host that may be swapped out
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # malloc.h


def settle() -> None:
    """Let glibc's allocator return large tensors when they are freed.

    By itself it soon keeps everything below 32 MB in its heap, where aligned blocks leave holes that the next ones do not fit
    (glibc bug 14581): the updates of a small model with a large vocabulary then take 0.8 GB more.
    """
    if libc := glibc():
        libc.mallopt(MMAP_THRESHOLD, LARGE)
        libc.mallopt(TRIM_THRESHOLD, 8 * LARGE)  # bytes at the end of the heap that stay for the next tensors


class HeapUse(ctypes.Structure):
    """glibc's mallinfo2: ten numbers, of which free is the free bytes in the heap."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "e", "f", "g", "h", "free", "j")]


def give_back(kept: int = 0) -> None:
    """Return the heap's free pages to the system, so that a phase does not hold what another one needed. `kept` bytes or less
    stay: the next phase takes them without new pages, which the kernel would have to zero."""
    if libc := glibc():
        if kept and hasattr(libc, "mallinfo2"):  # glibc 2.33
            libc.mallinfo2.restype = HeapUse
            if libc.mallinfo2().free <= kept:
                return
        libc.malloc_trim(0)


def glibc() -> ctypes.CDLL | None:
    """Return the process's C library; None if it is not glibc."""
    with suppress(OSError, TypeError):  # Windows
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "malloc_trim") else None
    return None


def storage_of(tensor: Tensor) -> int:
    """Return a key that tensors with shared memory have in common."""
    return tensor.untyped_storage()._cdata


def held(device: torch.device) -> int:
    """Return the bytes held now: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return psutil.Process().memory_info().rss


def total(device: torch.device) -> int:
    """Return the bytes that a GPU has."""
    return torch.cuda.get_device_properties(device).total_memory


def free(device: torch.device) -> int:
    """Return the bytes still available. On a CPU: Linux's own figure, or the rest of a container's limit if that is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    limits = [Path(path).read_text().strip() for path in CGROUP_LIMITS if Path(path).exists()]
    rest = [int(limit) - held(device) for limit in limits if limit.isdigit()]
    return min([psutil.virtual_memory().available, *rest])


def with_slack(size: int) -> int:
    """Return the part of a GPU's bytes that a plan may give away."""
    return round((1 - SLACK) * size)


def reset_peak(device: torch.device) -> None:
    """Restart `peak`, after `give_back` if KEPT is exceeded. On Linux this also restarts the kernel's peaks: VmHWM, ru_maxrss."""
    give_back(KEPT)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with suppress(OSError):  # not Linux, or not allowed there
            Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """Return the most bytes held since `reset_peak`; on MPS, and on systems other than Linux, the bytes held now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if device.type == "cpu" and status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return held(device)


T = TypeVar("T")


def in_pieces(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield the items in order, in lists of total size at most `most`; a larger item is a list of its own."""
    piece, filled = list[T](), 0
    for item in items:
        if piece and filled + size(item) > most:
            yield piece
            piece, filled = [], 0
        piece.append(item)
        filled += size(item)
    if piece:
        yield piece


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. If it is in the host's memory, the copy is queued; it must not change afterwards."""
    if device.type in PINNED and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    queued = device.type != "mps"  # MPS would read the memory when it may be free already
    return tensor.to(device, non_blocking=queued)
