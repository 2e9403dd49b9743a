"""Gradients of masters are averaged over ranks in few messages: two ranks of gloo, each in a thread."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo.system import distributed
from grpo.training import optimization
from grpo.training.optimization import average_over_ranks

CPU = torch.device("cpu")


@pytest.fixture
def averaged(monkeypatch):
    """Returns a function that averages the gradients of two ranks, and the bytes of each message of rank 0."""
    mine, messages, store = threading.local(), [], dist.HashStore()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(distributed, "world_size", lambda: 2)

    def all_reduce(tensor: Tensor, group=None) -> None:
        if mine.rank == 0:
            messages.append(tensor.nbytes)
        mine.group.allreduce([tensor]).wait()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)

    def rank(rank: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        mine.rank, mine.group = rank, dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        learned = [nn.Parameter(torch.zeros(3) if grad is None else torch.zeros_like(grad)) for grad in gradients]
        for p, grad in zip(learned, gradients, strict=True):
            p.grad = None if grad is None else grad.clone()
        average_over_ranks(learned, CPU)
        return [p.grad for p in learned]

    def averaged(*gradients: list[Tensor | None]) -> tuple[list[list[Tensor | None]], list[int]]:
        with ThreadPoolExecutor(2) as threads:
            return [*threads.map(rank, range(2), gradients)], messages

    return averaged


def of_rank(rank: int) -> list[Tensor | None]:
    """Gradients as a model has them: a matrix that is laid out by columns, a parameter without a gradient, and 16-bit ones."""
    generator = torch.Generator().manual_seed(rank)
    matrices = [torch.randn(20, 15, generator=generator) for _ in range(7)]
    return [*matrices[:6], matrices[6].T.contiguous().T, None, torch.randn(4, generator=generator).bfloat16()]


@pytest.mark.parametrize(
    ("most", "sent"),
    [
        (25 << 20, [7 * 1200 + 4 * 4]),  # one message for eight; the four 16-bit numbers go as 32 bits beside others
        (4000, [3600, 3600, 1200 + 16]),  # 300 numbers of 4 bytes each: three at once
        (1000, [1200] * 7 + [8]),  # each is larger, and goes alone
    ],
)
def test_each_rank_has_the_mean_of_both_in_messages_of_bounded_size(averaged, monkeypatch, most, sent):
    monkeypatch.setattr(optimization, "MESSAGE", most)
    ones, others = of_rank(0), of_rank(1)
    results, messages = averaged(ones, others)
    assert messages == sent
    for result in results:
        for got, one, other in zip(result, ones, others, strict=True):
            if one is None:
                assert got is None
                continue
            assert torch.equal(got, ((one.float() + other.float()) / 2).to(one.dtype)) and got.dtype == one.dtype
