"""The device: its clock, its peak, the memory in use, how often the host waits for it, and the precision of the Trainer."""

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from grpo.system import memory

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = "bfloat16" if CUDA else "float32"
NO_GPU = "no GPU"
# bfloat16 operations in a second, dense, by the first of these words in the device's name
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}


def facts() -> dict:
    """Return the device's name, its peak in operations a second, and the versions of the libraries."""
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"name": name(), "peak": peak_flops(), **versions}


def name() -> str:
    """Return the device's name."""
    return torch.cuda.get_device_name() if CUDA else "CPU"


def peak_flops() -> float | None:
    """Return the device's peak of bfloat16 operations in a second; None if it is not in PEAKS."""
    return next((peak for words, peak in PEAKS.items() if words in name()), None)


def share_of_peak(flops: float) -> float | str:
    """Return these operations in a second as a share of the peak, or why there is none."""
    if not CUDA:
        return NO_GPU
    return flops / peak if (peak := peak_flops()) else "unknown peak"


def precision():
    """Return the context of the Trainer's precision: bf16-mixed on a GPU, as Lightning makes it, without a cache of casts."""
    from lightning.pytorch.plugins import MixedPrecision

    return MixedPrecision("bf16-mixed", "cuda").forward_context() if CUDA else nullcontext()


def clock() -> float:
    """Return the time in seconds, when the device has done its work."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def peaks(found: dict) -> Iterator[None]:
    """Set `peak_gb`, the most that tensors took in this `with` (on a CPU the process), and `reserved_gb`, with the allocator."""
    memory.reset_peak(DEVICE)
    yield
    found["peak_gb"] = memory.peak(DEVICE) / 1e9
    found["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9 if CUDA else NO_GPU


@contextmanager
def waits(found: dict) -> Iterator[None]:
    """Set `waits`, how often the host waited for the device in this `with`, and `waits_at`, the lines that did so most."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn") if CUDA else None
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default") if CUDA else None
    waited = [warning for warning in seen if "synchronizing CUDA operation" in str(warning.message)]
    places = Counter(f"{'/'.join(warning.filename.split('/')[-3:])}:{warning.lineno}" for warning in waited)
    found["waits"] = len(waited) if CUDA else NO_GPU
    found["waits_at"] = dict(places.most_common(12))
