"""Copies from the host's memory to a device that the host does not wait for.

Work is queued on a GPU and the host goes ahead, until it reads a result. An ordinary copy waits for all queued work, in both
directions. See docs/performance.md, and tests/training/test_waits.py, which counts the waits.
"""

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. If it is in the host's memory, the copy is queued; it must not change afterwards."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()  # a page that may be swapped out is copied by the host, which then waits
    queued = device.type != "mps"  # MPS would read the memory when it may be free already
    return tensor.to(device, non_blocking=queued)
