"""The update of a recipe on a GPU without a GPU: tensors have no memory, kernels only write, torch's allocator is simulated.

    PYTHONPATH=.:tests python -m helpers.fake_gpu 8192 false experiment=qwen05b_gsm8k       # tokens at once, recomputed layers

It is a model of CUDA and not CUDA: FlexAttention keeps queries, keys, values, output and a number for each query and head; the
compiled head writes the gradient of the logits. The forecast knows nothing of this file.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo.engines.builtin.engine import TransformersEngine
from grpo.extras.forecast.imagined import computing_as_on, fullest, imagined, minibatch
from grpo.extras.forecast.sizes import CONTEXT
from grpo.extras.kernels.flex import FlexKernel
from grpo.models.gradient_checkpointing import recomputing
from grpo.models.packing import microbatches
from grpo.training import meter
from grpo.training.optimization import learned_by
from grpo.training.trainer import MIXED, best_on_gpu
from helpers.recipes import run_of

GB, MB = 10**9, 1 << 20


class Allocator:
    """torch's caching allocator with its defaults: blocks of 512 bytes; below 1 MB segments of 2 MB, below 10 MB of 20 MB, else
    multiples of 2 MB. The best fit is taken, split, and merged with its free neighbours. Mutable: all numbers, in bytes."""

    def __init__(self) -> None:
        self.free: dict[bool, list[list[int]]] = {False: [], True: []}  # offset, size, segment; by whether it is small
        self.segments = self.reserved = self.allocated = self.most_reserved = self.most_allocated = 0

    def take(self, size: int) -> tuple[bool, list[int]]:
        """Return a block: whether it is small, and where it is."""
        size = max(512, -(-size // 512) * 512)
        small = size <= MB
        fitting = [block for block in self.free[small] if block[1] >= size]
        if fitting:
            self.free[small].remove(block := min(fitting, key=lambda block: block[1]))
        else:
            segment = 2 * MB if small else 20 * MB if size < 10 * MB else -(-size // (2 * MB)) * 2 * MB
            self.reserved, self.segments = self.reserved + segment, self.segments + 1
            block = [0, segment, self.segments]
        rest = block[1] - size
        if rest >= 512 if small else rest > MB:
            self.free[small].append([block[0] + size, rest, block[2]])
            block = [block[0], size, block[2]]
        self.allocated += block[1]
        self.most_reserved = max(self.most_reserved, self.reserved)
        self.most_allocated = max(self.most_allocated, self.allocated)
        return small, block

    def give(self, small: bool, block: list[int]) -> None:
        """Take a block back."""
        self.allocated -= block[1]
        start, size, segment = block
        for other in [free for free in self.free[small] if free[2] == segment]:
            if other[0] + other[1] == start:
                start, size = other[0], other[1] + size
            elif start + size == other[0]:
                size += other[1]
            else:
                continue
            self.free[small].remove(other)
        self.free[small].append([start, size, segment])


class Placed(TorchDispatchMode):
    """Gives each tensor without memory that is created here a block of an allocator, as long as it exists."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.allocator, self.seen = allocator, set()

    def place(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if isinstance(tensor, FakeTensor) and storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            weakref.finalize(storage, self.drop, storage._cdata, *self.allocator.take(storage.nbytes()))

    def drop(self, key: int, small: bool, block: list[int]) -> None:
        self.seen.discard(key)
        self.allocator.give(small, block)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.place(tensor)
        return result


class Saves(torch.autograd.Function):
    """Attention that keeps what FlexAttention's kernel keeps."""

    @staticmethod
    def forward(ctx, query, key, value):
        out, sums = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx, gradient):
        *inputs, _, sums = ctx.saved_tensors
        torch.empty_like(sums)  # the products of output and gradient
        return tuple(map(torch.empty_like, inputs))


class FakeFlex(FlexKernel):
    def attend(self, plan, query, key, value, how):
        return Saves.apply(query, key, value)


@contextmanager
def on_a_device() -> Iterator[None]:
    """Let metrics stay on the device, as they do on a GPU."""
    before, meter.is_on_device = meter.is_on_device, lambda value: isinstance(value, Tensor)
    try:
        yield
    finally:
        meter.is_on_device = before


@dataclass(frozen=True)
class Found:
    """In bytes: the peak of an update's tensors, what the allocator reserves, the forecast without its reserve and with it."""

    peak: int
    reserved: int
    counted: int
    foreseen: int


def update(command: Sequence[str], size: int, again: bool) -> Found:
    """Make an update of a recipe, two microbatches of `size` tokens and the step. again: whether layers are recomputed."""
    with run_of(command) as run:
        optim = replace(run.optim, max_tokens_per_microbatch=size, gradient_checkpointing=again)
        given = run.config.trainer.precision
        precision = best_on_gpu((9, 0)) if given == "auto" else given
        parts = replace(run, optim=optim).sizes(TransformersEngine()).parts(precision, 1, device="cuda")
        held = {part.name: part.size for part in parts if part.phase != "rollout" and not part.host and part.size}
        module = imagined(lambda model: run.make(model, optim), run.pretrained)
    allocator = Allocator()
    with Placed(allocator) as placed, on_a_device():
        for tensor in [*module.parameters(), *module.buffers()]:
            placed.place(tensor)
        [optimizer], _ = module.configure_optimizers()
        module.optimizers, module.manual_backward = lambda: optimizer, lambda loss: loss.backward()
        vars(module)["layout"] = (optim.layout, FakeFlex())
        module.live = lambda tokens: torch.arange(len(tokens))
        for p in learned_by(optimizer):
            p.grad = torch.empty_like(p)
        optimizer.step()
        optimizer.zero_grad()
        plan, rows = run.plan, run.plan.prompts * run.plan.group_size // module.algorithm.num_minibatches
        width = fullest(plan, run.prompt, rows, optim.layout, size)
        plan = replace(plan, sampling=replace(plan.sampling, max_tokens=width))
        batch = replace(minibatch(plan, run.prompt, rows), fresh=None)
        batch = batch.rows(torch.cat(microbatches(batch, optim.layout, size)[:2]).sort().values)
        zeros, rows = torch.zeros(batch.mask.shape), len(batch)
        batch = replace(batch, sample=torch.arange(rows), fresh=torch.ones(rows, dtype=torch.bool))
        batch = replace(batch, advantages=zeros, weights=zeros)
        batch = replace(batch, reference_logprobs=zeros) if module.algorithm.kl.needs_reference else batch
        allocator.most_allocated = 0
        low = torch.autocast("cpu", MIXED.get(precision), enabled=precision in MIXED, cache_enabled=False)
        with computing_as_on("cuda"), low, recomputing(module.policy, again):
            module.gradients(batch, 0.0)
        optimizer.step()
    reserve = held.pop("reserve")
    counted = sum(held.values())
    return Found(allocator.most_allocated, allocator.most_reserved, counted, counted + reserve)


if __name__ == "__main__":
    found = update(sys.argv[3:], int(sys.argv[1]), sys.argv[2] == "true")
    line = (
        "{:.2f} GB of tensors, {:.2f} reserved ({:+.1%}); forecast {:.2f} ({:+.1%}), with its reserve {:.2f} ({:+.1%})"
    )
    above, of_peak = found.reserved / found.peak - 1, found.counted / found.peak - 1
    of_all = found.foreseen / (found.reserved + CONTEXT) - 1
    print(
        line.format(
            found.peak / GB, found.reserved / GB, above, found.counted / GB, of_peak, found.foreseen / GB, of_all
        )
    )
