"""The ranks of one training run, one for each device. On a single rank every function returns its argument.

A model may be sharded: each rank then holds a part of every parameter. The functions for this know such a
parameter and model by their methods, so that nothing of torch's sharding is imported here.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")
_chosen = threading.local()  # the process group that messages of a thread go through; the default one if it has none
_groups: dict[str, dist.ProcessGroup] = {}


def open_play_group(timeout: Any) -> None:
    """Make a process group for `in_play`. Every rank calls this once. timeout: a timedelta, for each message."""
    _groups["play"] = dist.new_group(backend="gloo", timeout=timeout)


def join_group(
    address: str, port: int, rank: int, size: int, kind: str, timeout: float, device: torch.device, listener: Any = None
) -> Any:
    """Return a process group beside those of this program, as a backend of torch. Rank 0 is its host, and passes `listener`, its
    socket at this address and port. kind: gloo or nccl. timeout: seconds for each message."""
    limit = timedelta(seconds=timeout)
    host = {"master_listen_fd": listener.detach()} if listener else {}
    store = dist.TCPStore(address, port, size, rank == 0, limit, **host)
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def in_play() -> Iterator[None]:
    """Send this thread's messages through a group of their own: a rollout may be played while another thread updates."""
    _chosen.group = _groups.get("play")
    try:
        yield
    finally:
        _chosen.group = None


@contextmanager
def by_itself() -> Iterator[None]:
    """In a `with` block of this thread, `all_gather` and `share` know this rank alone."""
    _chosen.by_itself = True
    try:
        yield
    finally:
        _chosen.by_itself = False


def own_store() -> Any:
    """Return a connection of its own to the store of all ranks, which a second thread may use; None if there is one rank."""
    return dist.distributed_c10d._get_default_store().clone() if world_size() > 1 else None


def world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this rank, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def all_sum(tensor: Tensor) -> Tensor:
    """Return a tensor of any shape, summed over the ranks."""
    if world_size() == 1:
        return tensor
    # all_reduce writes into its argument
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=getattr(_chosen, "group", None))
    return tensor


def all_gather(items: list[T]) -> list[T]:
    """Return the lists of all ranks, concatenated, on every rank. The items must pickle."""
    if world_size() == 1 or getattr(_chosen, "by_itself", False):
        return items
    lists: list[list[T]] = [[] for _ in range(world_size())]
    dist.all_gather_object(lists, items, group=getattr(_chosen, "group", None))
    return [item for items in lists for item in items]


def share(length: int) -> range:
    """Return this rank's indices of `length` items. Shares are consecutive, and their sizes differ by at most one."""
    if getattr(_chosen, "by_itself", False):
        return range(length)
    return range(length * rank() // world_size(), length * (rank() + 1) // world_size())


def balanced(sizes: Sequence[int]) -> list[int]:
    """Return this rank's indices, in order: every rank has one at least, and the sums of their sizes are close to each other."""
    loads, mine = [0] * world_size(), [[] for _ in range(world_size())]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = min(range(world_size()), key=lambda r: (loads[r], len(mine[r])))
        loads[least] += max(1, sizes[i])
        mine[least].append(i)
    return sorted(mine[rank()])


# -- sharded models


def is_sharded(model: nn.Module) -> bool:
    """Return whether each rank holds only a part of the model's parameters."""
    return hasattr(model, "unshard")


def full(tensor: Tensor) -> Tensor:
    """Return a parameter with the parts of all ranks. If it is sharded, all ranks must ask at the same time."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter; if it is not sharded, all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def part_of(whole: Any, parameter: Tensor) -> Tensor:
    """Return the part of a whole tensor that this rank keeps, sharded as `parameter` is. whole: [rows, ...] of the parameter's
    whole shape; only a slice of its rows is read, so it may be a tensor in a file."""
    if not hasattr(parameter, "to_local"):
        return whole
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    mine = whole[offset[0] : offset[0] + shape[0]].to(parameter.to_local().device, copy=True)
    return DTensor.from_local(mine, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def one_pass(model: nn.Module, function: Callable[..., T], *arguments: Any) -> T:
    """Return function(model, *arguments), a pass in which the parameters are whole. All ranks make the same number of passes."""
    return model.one_pass(function, *arguments) if is_sharded(model) else function(model, *arguments)


def computes_in(model: nn.Module) -> torch.dtype:
    """Return the number type of a model's passes, which sharded parameters do not have."""
    return getattr(model, "computes_in", next(model.parameters()).dtype)
