"""Passes and steps of tensors without memory (torch's FakeTensorMode), whose bytes are counted.

So there is no table of models, optimizers or layouts to keep up to date. torch's MemTracker counts the same bytes, but it rounds
them on a GPU and does not separate logits from other activations.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from grpo.engines.builtin.kv_cache import PREFILL_TOKENS
from grpo.engines.builtin.next_token import LOGITS_PER_DRAW, NextTokens
from grpo.extras.forecast.pictured import prompts_of, with_prompts_that_see
from grpo.models import packed_attention, token_scores
from grpo.models.gradient_checkpointing import layers_of, recomputing
from grpo.models.head import LOGITS_AT_ONCE, has_float32_head, logits_at_once
from grpo.models.logprobs import Layout, completion_logprobs
from grpo.models.packed_attention import Kernel, Packed, attending, sdpa
from grpo.models.packing import microbatches
from grpo.models.pretrained import Pretrained
from grpo.models.states import logprobs_and_states
from grpo.objectives.batch import TokenBatch
from grpo.rollout.types import Plan
from grpo.system.errors import UserError
from grpo.system.memory import storage_of

log = logging.getLogger(__name__)
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # `known` logs it


def known(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Return the measurement; None if a model or an optimizer needs values of tensors, which tensors without memory lack."""
    try:
        return measure(*arguments)
    except UserError:
        raise
    except Exception as error:  # a model's code may raise anything
        log.debug("forecast: %s", error)
        return None


@contextmanager
def computing_as_on(device: str) -> Iterator[None]:
    """Let the head cut its logits as on this device, since tensors without memory are the CPU's, and let head and attention make
    the tensors that they make there."""
    before = token_scores.CACHED, token_scores.forward, token_scores.backward, packed_attention.sdpa
    at_once, LOGITS_AT_ONCE["cpu"] = LOGITS_AT_ONCE["cpu"], logits_at_once(device)
    if is_compiled(device):
        token_scores.forward, token_scores.backward = written_scores, written_gradient
    if device != "cpu":
        token_scores.CACHED, packed_attention.sdpa = 1 << 62, with_all_heads
    try:
        yield
    finally:
        LOGITS_AT_ONCE["cpu"] = at_once
        token_scores.CACHED, token_scores.forward, token_scores.backward, packed_attention.sdpa = before


def is_compiled(device: str) -> bool:
    """Return whether the formulas of the head are kernels on this type of device: on a GPU, unless it is known to fail, because
    it has failed in this process, or the GPU of this machine has no compiler."""
    functions = token_scores.forward, token_scores.backward
    no_compiler = torch.cuda.is_available() and find_spec("triton") is None
    return all(device in each.devices and not each.failed for each in functions) and not no_compiler


def written_scores(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Return empty tensors like those that the compiled `scores_of_rows` writes."""
    return logits.new_empty(3, len(logits), dtype=torch.float32).unbind()


def written_gradient(logits: Tensor, *_: Any) -> Tensor:
    """Return an empty tensor like the one that the compiled `gradient_of_rows` writes."""
    return torch.empty_like(logits)


def with_all_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return what `sdpa` does. With a mask, keys and values are repeated for all heads first, as it does on a GPU."""
    if mask is not None:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return sdpa(query, key, value, mask, scale)


class Attended(Function):
    """An empty output of attention. It keeps the tensors that the kernels of FlexAttention keep."""

    @staticmethod
    def forward(ctx, query, key, value):
        out, sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


class FlexOnPaper:
    """Stands for FlexAttention, a `Kernel`, for tensors without memory."""

    failed = ""

    def padding(self, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[Sequence[int]]]) -> int:
        return 0

    def attend(self, plan: Packed, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        return Attended.apply(query, key, value)


def imagined(make_module: Callable[[nn.Module], L.LightningModule], pretrained: Pretrained) -> L.LightningModule:
    """Return a module of CPU tensors without memory, so that kernels are chosen as for real tensors."""
    with torch.device("meta"):
        module = make_module(pretrained.outline())
        parts = [*module.modules()]
        beside = [each for part in getattr(module, "parts", {}).values() for each in part.models()]
        parts = [*dict.fromkeys([*parts, *(each for model in beside for each in model.modules())])]
    empty: dict[Tensor, Tensor] = {}  # by the tensor that it replaces: tied ones stay tied
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in parts:
            for name, x in [*part._parameters.items(), *part._buffers.items()]:
                tensors = part._parameters if name in part._parameters else part._buffers
                if x is not None and x not in empty:
                    empty[x] = torch.empty_like(x, device="cpu")
                    if tensors is part._parameters:
                        empty[x] = nn.Parameter(empty[x], x.requires_grad)
                tensors[name] = empty.get(x)
    return module


def with_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Give each parameter a gradient, and return the gradients."""
    for p in (parameters := list(parameters)):
        p.grad = torch.zeros_like(p)
    return [p.grad for p in parameters]


def after_a_step(optimizer: Optimizer) -> int:
    """Make one step, and return the bytes of the optimizer's state after it."""
    optimizer.step()
    return bytes_of(tensor for state in optimizer.state.values() for tensor in state.values())


def optimizer_step_bytes(optimizer: Optimizer, before: Iterable[Tensor]) -> int:
    """Make a step after the first one, and return the peak bytes of its temporary tensors. before: parameters and gradients."""
    state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, Tensor)]
    with Live([*before, *state]) as live:
        optimizer.step()
    return live.most.total()


def activation_bytes(
    module: L.LightningModule,
    plan: Plan,
    prompt_tokens: int,
    before: Iterable[Tensor],
    kernel: Kernel | None,
    layout: Layout,
) -> tuple[Counter[str], int]:
    """Return the peak bytes of the fullest microbatch, forward and backward, and those of the passes of the module's parts, which
    come first. before: tensors that exist before it. kernel: of the policy's attention."""
    policy, algorithm, optim = module.policy, module.algorithm, module.optim
    rows, most = plan.prompts * plan.group_size // algorithm.num_minibatches, optim.max_tokens_per_microbatch
    width = fullest(plan, prompt_tokens, rows, layout, most)
    batch = minibatch(replace(plan, sampling=replace(plan.sampling, max_tokens=width)), prompt_tokens, rows)
    batch = with_prompts_that_see(batch, policy, plan.group_size)
    batch = batch.rows(microbatches(batch, layout, most)[0])
    live = Live(before, policy.config.get_text_config().vocab_size)
    settings = batch, module.temperature, algorithm.entropy.active, layout, kernel
    with live, recomputing(policy, optim.gradient_checkpointing):
        readers = [part.imagined(batch, layout) for part in getattr(module, "parts", {}).values()]
        of_parts = live.most.total()
        if readers := [reader for reader in readers if reader]:
            outputs = logprobs_and_states(policy, *settings, readers, algorithm.of_logprobs)
        else:
            outputs = completion_logprobs(policy, *settings)
        sum(numbers.sum() for numbers in outputs).backward()
    return live.most, of_parts


def fullest(plan: Plan, prompt_tokens: int, rows: int, layout: Layout, most: int) -> int:
    """Return the tokens of each answer with which a microbatch of equal rows is the fullest: `most` tokens may leave a large rest
    where all answers have their full length, and shorter ones fill it. Among equals the longest counts."""
    groups, size = (
        (rows, 1) if layout != "shared_prompt" else (max(1, rows // plan.group_size), min(rows, plan.group_size))
    )

    def tokens(width: int) -> int:
        if (whole := prompt_tokens + size * width) <= most or size == 1:
            return min(groups, max(1, most // whole)) * whole
        return prompt_tokens + max(1, (most - prompt_tokens) // width) * width

    return max(range(1, plan.sampling.max_tokens + 1), key=lambda width: (tokens(width), width))


def minibatch(plan: Plan, prompt_tokens: int, rows: int) -> TokenBatch:
    """Return a batch of groups, [rows, longest prompt + longest completion]: every token counts."""
    width = plan.sampling.max_tokens
    group = torch.arange(rows) // plan.group_size
    ids = group[:, None].expand(rows, prompt_tokens + width)  # a different prompt for each group
    completion, logprobs = torch.ones(rows, width, dtype=torch.bool), torch.zeros(rows, width)
    return TokenBatch(ids, torch.ones_like(ids), completion, logprobs, torch.arange(rows))


def in_the_cache(
    config: PretrainedConfig,
    dtype: torch.dtype,
    plan: Plan,
    prompt_tokens: int,
    bound: int,
    states: tuple[int, int] | None = None,
) -> int:
    """Return the bytes of a rollout's cache in the built-in engine, which stores a prompt once. bound: the cache's tokens.
    states: the measured bytes of a sequence's states, and of a token's keys and values."""
    tokens = plan.prompts * (prompt_tokens + plan.group_size * plan.sampling.max_tokens)
    if states and (carried := states[0]):  # a prompt has states, and so has each sample
        keys, sequences = states[1], plan.prompts * (1 + plan.group_size)
        return keys * min(tokens + sequences * (carried // keys), bound) if keys else sequences * carried
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize * min(tokens, bound)


@torch.no_grad()
def in_sampling(
    policy: nn.Module, dtype: torch.dtype, plan: Plan, prompt_tokens: int, before: Iterable[Tensor]
) -> int | None:
    """Return the peak bytes of the built-in engine besides its cache: it reads prompts, or draws a token for each row."""
    vocabulary, rows = policy.config.get_text_config().vocab_size, plan.prompts * plan.group_size
    count = max(1, min(plan.prompts, PREFILL_TOKENS // prompt_tokens))
    prompts = Packed(prompts_of(policy, prompt_tokens, count), [[]] * count, torch.device("cpu"))
    last = torch.arange(1, count + 1) * prompt_tokens - 1
    with Live(before) as live:
        with attending(policy, prompts):
            policy(prompts.ids, position_ids=prompts.positions, use_cache=False, logits_to_keep=last)
        kind = torch.float32 if has_float32_head(policy) else dtype
        logits = next(policy.parameters()).new_empty(rows, vocabulary, dtype=kind)
        at_once = logits[: max(1, LOGITS_PER_DRAW // vocabulary)]
        uniform, heat = at_once.new_empty(len(at_once), dtype=torch.float64), plan.sampling.temperature or 1.0
        NextTokens((), plan.sampling, (), torch.device("cpu")).drawn(at_once, uniform, heat, None)
    return live.most.total()


def in_a_layer(model: nn.Module) -> int:
    """Return the bytes that sharding gathers at once: two layers, their gradients, and the rest."""
    layers = [bytes_of(layer.parameters()) for layer in layers_of(model)]
    return 4 * max(layers) + 2 * (bytes_of(model.parameters()) - sum(layers))


def by_groups(a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any) -> Tensor:
    """Return an empty tensor of the shape of torch._grouped_mm(a, b, offsets), a product for each of E experts.

    a, b: [E, M, K] and [E, K, N] give [E, M, N]. If one of them has two dimensions, with the rows of all experts, so has the
    result. If both have, [M, R] and [R, N], the offsets, [E], cut R into experts, and the result is [E, M, N].
    """
    if a.ndim != b.ndim:
        return a.new_empty(a.shape[-2], b.shape[-1])
    experts = len(a) if a.ndim == 3 else len(offsets)
    return a.new_empty(experts, a.shape[-2], b.shape[-1])


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of the tensors; each storage counts once."""
    return sum(sizes_of(tensors))


def sizes_of(tensors: Iterable[Any]) -> Iterable[int]:
    """Return the bytes of each storage of the tensors."""
    return {storage_of(t): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}.values()


def pinned(size: int) -> int:
    """Return the bytes of the host's memory that torch takes for a pinned tensor of so many: the next power of two."""
    return 1 << (size - 1).bit_length()


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are created while it is active, as long as they exist; `most` is the highest count.

    before: earlier tensors, which do not count. A tensor counts as logits if its last dimension is the vocabulary.
    """

    def __init__(self, before: Iterable[Tensor], vocabulary: int | None = None) -> None:
        super().__init__()
        self.seen, self.vocabulary = {storage_of(tensor) for tensor in before}, vocabulary
        self.now, self.most = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        grouped = function is torch.ops.aten._grouped_mm.default  # torch describes its result in bfloat16 only
        result = (by_groups if grouped else function)(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := storage_of(tensor)) not in self.seen:
                place = tensor.untyped_storage()
                name = "logits" if tensor.ndim and tensor.shape[-1] == self.vocabulary else "activations"
                self.seen.add(key)
                self.now[name] += place.nbytes()
                weakref.finalize(place, self.forget, key, name, place.nbytes())
        if self.now.total() > self.most.total():
            self.most = self.now.copy()
        return result

    def forget(self, key: int, name: str, size: int) -> None:
        """Subtract a storage that was freed."""
        self.seen.discard(key)
        self.now[name] -= size
