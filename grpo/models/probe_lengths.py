"""How long the rows must be on which two ways to compute a model are compared: beyond each size after which
its layers change.

A layer that picks blocks of tokens or compresses them does nothing of it on a few tokens. Plain windows are
no such size, since trusted.py compares them with the masks; nor is the original context of LongRoPE, since no
row goes beyond it.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from grpo.models import pretrained

SIZE = re.compile(r"window|chunk|block|compress|\.index_|topk|top_k|stride")
OTHER = re.compile(r"\._?sliding_window|layers|heads|dim|expert|moe|group|pattern|multiple|feed|lm_head|infer|token")
COUNT, UNIT = re.compile(r"topk|top_k|blocks$"), re.compile(r"block_size|compress|chunk|stride")
SEEN, LONGEST, FAR = 8, 4096, 2**20  # a few tokens show the first size; rows beyond the second cost too much
FAINT = 0.01  # bound for long rows in float32: near ties of routers and indices may go the other way


def beyond_sizes(
    model: nn.Module, error: Callable[[tuple[int, int], float], str], few: tuple[int, int], bound: float
) -> str:
    """Return what `error` finds on two short prompts; if that is nothing, what it finds on two that are
    longer than the sizes of the model.

    error: compares two ways to compute prompts of two lengths, to a bound; "" if they agree. few: the lengths
    of short prompts.
    """
    tried = [size for size in probe_sizes(model) if size <= LONGEST]
    if (why := error(few, bound)) or not tried:
        return why
    size, context = tried[-1], longest_row(model)
    longest = min(size * 3 // 2, context - 8)
    why = error((longest, min(size * 4 // 3, longest - 3)), max(bound, FAINT))
    return why and f"{why} in rows of more than {size:,} tokens"


def probe_sizes(model: nn.Module) -> list[int]:
    """Return the numbers of tokens below the context after which layers may compute in another way, in
    ascending order.

    They are numbers of the configuration with such names, and products of a count and a unit: 16 blocks of
    128 tokens.
    """
    found = list(named_sizes(model.config.get_text_config().to_dict()))
    counts, units = ([n for name, n in found if kind.search(name)] for kind in (COUNT, UNIT))
    every = {n for _, n in found} | {count * unit for count in counts for unit in units}
    return sorted(size for size in every if SEEN < size <= longest_row(model) - 2 * SEEN)


def longest_row(model: nn.Module) -> int:
    """Return the tokens of the longest row that is compared: the context, or FAR if it is unknown or
    longer."""
    return min(pretrained.context_of(model.config) or FAR, FAR)


def named_sizes(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield the names and values of all sizes in a configuration, or in a part of it with that name."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from named_sizes(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for each in value:
            yield from named_sizes(each, name)
    elif type(value) is int and SIZE.search(name) and not OTHER.search(name):
        yield name, value
