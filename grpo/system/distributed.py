"""The processes of one training run, one a device. With a single one every function here gives back what it got."""

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def all_sum(tensor: Tensor) -> Tensor:
    """The sum over ranks."""
    if world_size() == 1:
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def all_gather(items: list[T]) -> list[T]:
    """The lists of all ranks, one after the other, on every rank. The items must pickle."""
    if world_size() == 1:
        return items
    lists: list[list[T]] = [[] for _ in range(world_size())]
    dist.all_gather_object(lists, items)
    return [item for items in lists for item in items]


def share(length: int) -> range:
    """The places among `length` things that are this rank's to do; the shares follow each other and differ by one at most."""
    return range(length * rank() // world_size(), length * (rank() + 1) // world_size())
