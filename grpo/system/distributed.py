"""The ranks of one training run, one for each device. On a single rank every function returns its argument."""

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this rank, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def all_sum(tensor: Tensor) -> Tensor:
    """Return the sum over ranks."""
    if world_size() == 1:
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def all_gather(items: list[T]) -> list[T]:
    """Return the lists of all ranks, concatenated, on every rank. The items must pickle."""
    if world_size() == 1:
        return items
    lists: list[list[T]] = [[] for _ in range(world_size())]
    dist.all_gather_object(lists, items)
    return [item for items in lists for item in items]


def share(length: int) -> range:
    """Return this rank's indices of `length` items. Shares are consecutive, and their sizes differ by at most one."""
    return range(length * rank() // world_size(), length * (rank() + 1) // world_size())
