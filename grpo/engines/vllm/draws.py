"""Draws the tokens of all rows at once, by seed and position. vLLM's own `random_sample` launches a kernel
for each seeded row.

The noise of a row and a token of the vocabulary is a hash of the request's seed, the number of tokens that
the request has drawn, and the token's id. So a completion depends on its seed and its logits alone, whatever
else is in the batch.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from vllm.v1.sample.ops import topk_topp_sampler

from grpo.models.compiled import Compiled

LOW = (1 << 32) - 1
STEP = 4  # vLLM sets a generator back by so much for a token that it discards, as of a prompt read in pieces

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
    on_gpu = probs.is_cuda
    keys = torch.tensor([draw_of(generators[row]) for row in rows], pin_memory=on_gpu).to(
        probs.device, non_blocking=True
    )
    noise = compiled(keys, probs.shape[1])
    if len(rows) < len(probs):
        every = torch.empty_like(probs).exponential_()
        every[rows] = noise
        noise = every
    return probs.div_(noise).argmax(dim=-1)


def draw_of(generator: torch.Generator) -> tuple[int, int, int]:
    """Return what decides a generator's next draw, three numbers of 32 bits, and move it on by one draw.

    On a GPU these are the halves of its seed and its position, which the host knows. On a CPU they are two
    draws and 0.
    """
    if generator.device.type == "cpu":
        low, high = torch.randint(LOW + 1, (2,), generator=generator).tolist()
        return low, high, 0
    seed, position = generator.initial_seed(), generator.get_offset()
    generator.set_offset(position + STEP)
    return seed & LOW, seed >> 32, position & LOW


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
