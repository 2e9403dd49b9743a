"""FlexAttention (arXiv 2412.05496) of a row that holds many sequences: which keys each query sees, by blocks, and the kernel.

A query sees at most two intervals of keys: of its prompt, and of its own row. All plans and windows have this form, so that one
compiled kernel serves them. A row is padded to whole blocks, so that few graphs are made.

Shapes: T tokens in the row, n = T / BLOCK blocks, H heads, K key heads.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from grpo.extras.kernels.agreement import gradient_disagreement
from grpo.extras.kernels.fallback import Replaceable
from grpo.models.logprobs import Layout
from grpo.models.packed_attention import How, Packed
from grpo.models.packing import Compare, disagreement
from grpo.models.trusted import objection
from grpo.system.memory import sent

BLOCK = 128
# dynamo takes sizes that are equal in its first call for the same: a number of blocks that is no number of heads, nor 1
FEWEST = 5


class FlexKernel(Replaceable):
    """A `Kernel`, and the attention function."""

    name, without = "FlexAttention", "optim.layout=padded"
    instead = "attention is computed by sdpa, which is slower on a GPU and takes more memory"
    code = ("torch/_functorch/_aot_autograd/", __file__)  # the first calls compiled kernels in a backward pass

    @cached_property
    def compiled(self) -> Callable[..., Tensor]:
        """FlexAttention as kernels of a GPU. More graphs than torch allows are an error, not a slow kernel."""
        return torch.compile(flex_attention, dynamic=True, fullgraph=True)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, how: How) -> Tensor | None:
        """Return the output, [1, H, T, D]; None if it fails, after a warning. query: [1, H, T, D]; key, value: [1, K, T, D]."""
        function = self.compiled if query.is_cuda else flex_attention
        if how.scores is not None:
            function = partial(how.scores.fused, function)
        try:
            return function(
                query, key, value, block_mask=mask, scale=how.scale, enable_gqa=len(key[0]) != len(query[0])
            )
        except Exception as error:  # a compiler may raise anything
            # a backward pass computes a layer again, and needs what the kernel gave: the whole update is made again
            if torch._C._current_graph_task_id() >= 0 or not self.raised(error):
                raise
            self.fail(error)
            return None

    def attend(self, plan: Packed, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor | None:
        if how.window not in plan.masks:
            plan.masks[how.window] = block_mask(plan, how)
        return self(query, key, value, plan.masks[how.window], how)

    def padding(self, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[Sequence[int]]]) -> int:
        """Return how many tokens a row lacks to whole blocks, and to the fewest."""
        tokens = sum(map(len, prompts)) + sum(len(row) for rows_of_prompt in rows for row in rows_of_prompt)
        return max(-tokens % BLOCK, FEWEST * BLOCK - tokens)

    def objection(self, model: nn.Module, layout: Layout, compare: Compare) -> str:
        """Return why it must not be used for `model`; empty if it agrees in a forward and a backward pass. The kernels of
        both are compiled here."""
        why = self.failed or objection(model, partial(compare, model, layout, self))
        if not (why := why or self.failed) and compare is disagreement:
            why = objection(model, partial(self.tried, gradient_disagreement, model, layout, self))
        return why or self.failed


FLEX = FlexKernel()


def block_mask(plan: Packed, how: How) -> BlockMask:
    """Return the mask of a row, from the two intervals of keys that each of its T tokens sees, see `blocks_of`."""
    count = len(plan.prompt_lengths)
    starts, index = torch.tensor(plan.starts), torch.arange(len(plan.prompt_of))
    first, length, in_row = starts[plan.prompt_of], plan.prompt_lengths[plan.prompt_of], plan.row_of >= 0
    row = torch.where(in_row, starts[count + plan.row_of.clamp(min=0)], first) if in_row.any() else first
    hidden = how.hidden(plan.within)
    seen = [first + hidden, torch.where(in_row, first + length, index + 1)]
    seen += [row + (hidden - length).clamp(min=0), torch.where(in_row, index + 1, 0)]
    return blocks_of(sent(torch.stack(seen).int(), plan.device))


def blocks_of(seen: Tensor) -> BlockMask:
    """Return the mask of these intervals. Its memory grows with T^2 / BLOCK.

    seen: [4, T] int32, whole blocks: each query sees the keys in [seen[0], seen[1]) and those in [seen[2], seen[3]).
    """
    low, high, low_own, high_own = seen
    joined = (low < high) & (high == low_own)  # two that touch are one, which may cover a block that neither covers
    spans = ((low, high), (torch.where(joined, low, low_own), high_own))
    first = torch.arange(0, len(low), BLOCK, dtype=low.dtype, device=low.device)
    some = every = torch.zeros((), dtype=torch.bool, device=low.device)
    for low, high in spans:
        low, high = low[:, None], high[:, None]  # [T, 1], against the blocks' [n]
        some = some | ((low < high) & (low < first + BLOCK) & (high > first))
        every = every | ((low <= first) & (high >= first + BLOCK))
    blocks = len(first)
    some, every = some.view(blocks, BLOCK, blocks).any(1), every.view(blocks, BLOCK, blocks).all(1)  # [n, n]

    def sees(_batch, _head, q, k):
        return ((k >= seen[0, q]) & (k < seen[1, q])) | ((k >= seen[2, q]) & (k < seen[3, q]))

    parts = (*in_order(some & ~every), *in_order(every))
    return BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=BLOCK, mask_mod=sees)


def in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, [1, 1, n] int32, and which, first ones first, [1, 1, n, n]."""
    counts, places = blocks.sum(-1), blocks.int().argsort(dim=-1, descending=True, stable=True)
    return counts[None, None].int(), places[None, None].int()
