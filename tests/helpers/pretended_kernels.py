"""The kernels of a GPU on the pretended device: what `torch.compile` makes, FlexAttention, and products of 16-bit matrices.

Their stand-ins compute the same on the CPU. A compiled function must not read a number, since it is one graph; FlexAttention sees
a pair of tokens if both the mask of blocks and the rule of pairs say so, as the real one does.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from grpo.models import head, token_scores
from grpo.models.compiled import Compiled
from helpers import pretended
from helpers.pretended import LAZY, OnDevice, Pretended
from helpers.pretended_autocast import Autocast, is_on, lowered

aten = torch.ops.aten
LOGITS = 8 * 282  # in one product: those of eight tokens


def attention(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Return FlexAttention's output, [1, H, T, D], in autocast's number type. query: [1, H, T, D]; key, value: [1, K, T, D]."""
    size, T, repeats = block_mask.BLOCK_SIZE[0], query.shape[2], query.shape[1] // key.shape[1]
    assert T % size == 0 and enable_gqa == (repeats > 1)  # the kernel takes nothing else
    query, key, value = (x.to(lowered()) if is_on() else x for x in (query, key, value))
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    index, zero = torch.arange(T, device=query.device), torch.zeros((), dtype=torch.int64, device=query.device)
    partly = blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
    wholly = blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    partly, wholly = (each.repeat_interleave(size, 0).repeat_interleave(size, 1) for each in (partly, wholly))
    sees = (partly & block_mask.mask_mod(zero, zero, index[:, None], index)) | wholly
    with Autocast(enabled=False):
        scores = (query.float() @ key.float().mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        return weights.to(value.dtype) @ value


def blocks(counts: Tensor, indices: Tensor) -> Tensor:
    """Return which blocks of keys each block of queries has, [n, n]. counts: [1, 1, n]; indices: [1, 1, n, n]."""
    n = counts.shape[-1]
    listed = torch.arange(n, device=counts.device) < counts[0, 0][:, None]
    return torch.zeros(n, n, dtype=torch.bool, device=counts.device).scatter_(1, indices[0, 0].long(), listed)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Stand in for torch.compile: call the function, or what stands in for FlexAttention. Raises RuntimeError if it waits."""
    assert options.get("fullgraph")
    call = attention if function is flex_attention else function

    def run(*args: Any, **named: Any) -> Any:
        device = Pretended.now
        before, mine = device.count(), threading.get_ident() == device.thread
        result = call(*args, **named)
        if mine and device.count() > before:
            raise RuntimeError(f"{function.__name__} reads a number, which ends a graph")
        device.compiled[function.__name__] += 1
        return result

    return run


def takes(of_project: Callable[..., bool], self: Compiled, first: Tensor) -> bool:
    """Return Compiled.takes, which knows plain tensors, for those of the device, too."""
    return not self.failed and len(first) > 1 if isinstance(first, OnDevice) else of_project(self, first)


def product(of_two: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the product of two matrices in 16 bits, which is added up and given in another number type."""
    return lambda a, b, out_dtype: of_two(a.to(out_dtype), b.to(out_dtype))


@contextmanager
def kernels() -> Iterator[None]:
    """Let the pretended device have a GPU's kernels in a `with`."""
    of_head = (token_scores.forward, token_scores.backward)
    products = {aten.mm.dtype: product(torch.mm), aten.bmm.dtype: product(torch.bmm)}
    with ExitStack() as stack:
        for each in of_head:
            stack.enter_context(
                patch.dict(vars(each), devices=("cuda", LAZY.type), compiled=compiled(each.function, fullgraph=True))
            )
        for owner, name, new in [
            (torch, "compile", compiled),
            (OnDevice, "is_cuda", True),
            (Compiled, "takes", lambda self, first, own=Compiled.takes: takes(own, self, first)),
        ]:
            stack.enter_context(patch.object(owner, name, new, create=True))
        stack.enter_context(patch.dict(head.LOGITS_AT_ONCE, {LAZY.type: LOGITS}))
        stack.enter_context(patch.dict(pretended.INSTEAD, products))
        yield
