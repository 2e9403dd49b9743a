"""Draws the tokens of all rows at once, by seed and position. vLLM's own `random_sample` launches a kernel
for each seeded row.

The noise of a row and a token of the vocabulary is a hash of the request's seed, the number of tokens that
the request has drawn, and the token's id. So a completion depends on its seed and its logits alone, whatever
else is in the batch.
"""

from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch import Tensor
from vllm.v1.sample.ops import topk_topp_sampler

from grpo.models.compiled import Compiled

LOW = (1 << 32) - 1
STEP = 4  # vLLM sets a generator back by so much for a token that it discards, as of a prompt read in pieces

latest = SimpleNamespace(known=([], None))  # the rows of the step before, and their seeds: most stay for many steps
theirs = topk_topp_sampler.random_sample


def use() -> None:
    """Make vLLM's sampler draw seeded requests with this module. On a CPU vLLM has a sampler of its own,
    which stays."""
    topk_topp_sampler.random_sample = random_sample


def random_sample(probs: Tensor, generators: Mapping[int, torch.Generator], use_fp64_gumbel: bool = False) -> Tensor:
    """Return a token for each row of probs, [B, V] in float32, as vLLM's function of this name; overwrites
    probs.

    generators: those of seeded rows, by row; each moves on by one draw. The other rows draw from torch's
    global generator.
    """
    if not generators or use_fp64_gumbel:
        return theirs(probs, generators, use_fp64_gumbel)
    rows = sorted(generators)
    keys = keys_of([generators[row] for row in rows], probs.is_cuda).to(probs.device, non_blocking=True)
    noise = compiled(keys, probs.shape[1])
    if len(rows) < len(probs):
        every = torch.empty_like(probs).exponential_()
        every[rows] = noise
        noise = every
    return probs.div_(noise).argmax(dim=-1)


def keys_of(generators: list[torch.Generator], pinned: bool = False) -> Tensor:
    """Return what decides the next draw of each generator, three numbers of 32 bits, [B, 3], and move it on by
    one draw. pinned: in memory that a GPU reads.

    On a GPU these are the halves of its seed and its position, which the host knows. On a CPU they are two
    draws and 0.
    """
    keys = torch.zeros(len(generators), 3, dtype=torch.int64, pin_memory=pinned)
    if generators[0].device.type == "cpu":
        for key, generator in zip(keys, generators, strict=True):
            torch.randint(LOW + 1, (2,), generator=generator, out=key[:2])
        return keys
    rows, halves = latest.known
    if generators != rows:
        seeds = [generator.initial_seed() for generator in generators]
        halves = torch.tensor([(seed & LOW, seed >> 32) for seed in seeds])
        latest.known = generators, halves
    positions = [generator.get_offset() for generator in generators]
    for generator, position in zip(generators, positions, strict=True):
        generator.set_offset(position + STEP)
    keys[:, :2], keys[:, 2] = halves, torch.tensor(positions) & LOW
    return keys


def exponentials(keys: Tensor, size: int) -> Tensor:
    """Return independent draws of the exponential distribution with mean 1, [B, V] in float32. keys: [B, 3],
    V: size.

    The token with the largest p / e, of its probability and its draw, has probability p (a Gumbel-max draw).
    """
    low, high, position = keys[:, :1], keys[:, 1:2], keys[:, 2:]
    first = mixed(mixed(mixed(low) ^ high) ^ position)  # two hashes of the row, [B, 1]
    second = mixed(mixed(mixed(high + 0x9E3779B9) ^ position) ^ low)
    token = torch.arange(size, device=keys.device)
    bits = mixed(mixed(token + first) ^ second)  # [B, V], 32 random bits
    # above 0, and finest there, where the draws that win are
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log1p(-uniform)


def mixed(x: Tensor) -> Tensor:
    """Return a hash of the low 32 bits of an integer, again 32 bits: lowbias32 of C. Wellons'
    hash-prospector."""
    x = x & LOW
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & LOW
    return x ^ (x >> 16)


compiled = Compiled(exponentials)  # one kernel on a GPU
