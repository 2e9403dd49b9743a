"""The memory forecast: the bytes that a run will hold, logged before it starts.

The run's own model, adapter, optimizer and longest microbatch are built from tensors without memory (torch's FakeTensorMode), and
their bytes are counted, so there is no table of models, optimizers or layouts to keep up to date. torch's MemTracker counts the
same bytes, but it rounds them on a GPU and does not separate logits from other activations.
"""

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.builtin.kv_cache import PREFILL_TOKENS
from grpo.engines.builtin.sampler import LOGITS_PER_DRAW, Draws
from grpo.engines.protocol import Engine
from grpo.models.critic import states_before
from grpo.models.gradient_checkpointing import layers_of, recomputing
from grpo.models.logprobs import Layout, completion_logprobs
from grpo.models.packed_attention import Packed, attending
from grpo.models.packing import microbatches
from grpo.models.pretrained import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.rollout.types import Plan
from grpo.system import memory
from grpo.system.errors import UserError
from grpo.system.memory import storage_of
from grpo.training.optimization import learned_by
from grpo.training.strategy import shards

log = logging.getLogger(__name__)
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # `known` logs it

FEWER_TOKENS = "optim.gradient_checkpointing=true or a lower optim.max_tokens_per_microbatch"
FEWER_ROWS = "a lower rollout.prompts"
PHASES = ("update", "rollout")


@dataclass(frozen=True)
class Part:
    """One part of a run's memory.

    size: bytes; None if unknown. remedy: the setting that makes it smaller. phase: the one of PHASES that holds it; "": both.
    host: True if it is in the CPU's memory, whatever the device.
    """

    name: str
    size: int | None
    remedy: str = ""
    phase: str = ""
    host: bool = False


# on a CPU the process's own growth: code that loads later, and holes in the heap. A margin, measured by benchmarks/forecast.py
LATER = Part("process", 100_000_000)


@dataclass(frozen=True)
class Sizes:
    """The settings on which memory depends. make_module: from a model. longest: returns the tokens of the longest prompt."""

    make_module: Callable[[nn.Module], L.LightningModule]
    pretrained: Pretrained
    plan: Plan
    engine: Engine
    longest: Callable[[], int]

    def parts(self, precision: str, ranks: int, sharded: bool = False) -> list[Part] | None:
        """Return the parts of memory that one process will hold; None if they are unknown."""
        found = known(self.counted, self.longest(), precision, ranks, sharded)
        memory.give_back()  # some optimizers compute with real tensors even here
        return found

    def needed(self, precision: str, ranks: int) -> int:
        """Return the most bytes that one of these ranks holds on its device without sharding; 0 if unknown."""
        return largest_phase([part for part in self.parts(precision, ranks) or () if not part.host])

    def counted(
        self, prompt_tokens: int, precision: str = "32-true", devices: int = 1, sharded: bool = False
    ) -> list[Part]:
        """Return the parts of memory that one process will hold. sharded: each of the devices has a part of every parameter."""
        plan, engine = replace(self.plan, prompts=math.ceil(self.plan.prompts / devices)), self.engine
        module = imagined(self.make_module, self.pretrained)
        policy, optim = module.policy, module.optim
        [optimizer], _ = module.configure_optimizers()
        own = [*module.parameters(), *module.buffers()]  # of the critic, too
        learned = learned_by(optimizer)  # the float32 masters, if there are any
        gradients = with_gradients(learned)
        copies = module.reference.own() if module.reference else []
        passes, there = module, [*own, *learned, *gradients, *copies]
        beside, mixed = there, precision == "bf16-mixed"
        # layers that are gathered in 16 bits, so autocast copies no weight
        if low_shards := sharded and mixed and policy.dtype.itemsize == 4:
            passes = imagined(self.make_module, replace(self.pretrained, dtype="bfloat16"))
            parameters = [*passes.parameters()]
            beside = [*parameters, *passes.buffers(), *with_gradients(p for p in parameters if p.requires_grad)]
        one_pass = partial(in_a_pass, passes, plan, prompt_tokens, beside)
        casts = partial(torch.autocast, "cpu", torch.bfloat16, enabled=mixed and not low_shards)
        with casts():
            passing = known(one_pass, optim.layout) or known(one_pass, "padded")
        optimizer_state = known(after_a_step, optimizer)
        stepping = known(in_a_step, optimizer, there) or 0
        if not optim.offload:  # a step begins when the activations are gone
            stepping = max(0, stepping - (passing.total() if passing else 0))
        shared, lora = hasattr(engine, "shared_bytes"), "adapter=lora"  # shared: vLLM already holds the weights
        weights, masters = 0 if shared else bytes_of(own), bytes_of([*own, *learned]) - bytes_of(own)
        if sharded:
            weights, masters = bytes_of(p for p in own if not p.requires_grad) + bytes_of(learned), 0
        buckets = bytes_of(p for p in own if p.requires_grad) if devices > 1 and not sharded else 0
        models = [model for model in (passes.policy, below_the_critic(passes)) if model is not None]
        gathered = sum(map(in_a_layer, models)) if sharded else 0  # layers that are whole while they compute
        of_device = devices if sharded else 1
        parts = [
            Part("weights", weights // of_device, "" if policy.dtype.itemsize == 2 else "model.dtype=bfloat16"),
            Part("masters", masters, lora, host=optim.offload),
            Part("optimizer", optimizer_state and optimizer_state // of_device, "optim=adamw_8bit", host=optim.offload),
            Part("reference", bytes_of(copies) // of_device, lora),
            Part("gradients", bytes_of(gradients) // of_device, lora, "update", optim.offload),
            Part("step", stepping // of_device, "optim=adamw", "update", optim.offload),
            Part("buckets", buckets, lora),  # of gradients, in DistributedDataParallel
            Part("gathered", gathered, "", "update"),
            *(Part(name, passing and passing[name], FEWER_TOKENS, "update") for name in ("activations", "logits")),
        ]
        if not isinstance(engine, TransformersEngine):
            return [*parts, Part("engine", None, phase="rollout")]
        dtype = torch.bfloat16 if mixed else policy.dtype
        with casts():
            sampling = known(in_sampling, passes.policy, dtype, plan, prompt_tokens, beside)
        cache = known(in_the_cache, policy.config, dtype, plan, prompt_tokens, engine.max_cache_tokens)
        whole = bytes_of(passes.policy.parameters()) if sharded else 0
        rest = {"cache": cache, "sampling": sampling, "whole policy": whole}
        return [*parts, *(Part(name, size, FEWER_ROWS, "rollout") for name, size in rest.items())]


def largest_phase(parts: Sequence[Part]) -> int:
    """Return the most bytes that these parts take in a phase; unknown ones count as 0."""
    return max(sum(part.size or 0 for part in parts if part.phase in ("", phase)) for phase in PHASES)


def forecast(sizes: Sizes, trainer: L.Trainer) -> list[Part]:
    """Log one line per memory (device, CPU), and a warning if it may be too small. Returns the parts; none if unknown."""
    sharded = shards(trainer)
    precision = "bf16-mixed" if sharded and trainer.strategy.mixed else trainer.precision
    parts = sizes.parts(precision, trainer.world_size, sharded)
    if parts is None:
        log.info("memory: no forecast for this model")
        return []
    device, cpu = trainer.strategy.root_device, torch.device("cpu")
    parts += [LATER] if device == cpu else []
    for place in dict.fromkeys([device, cpu]):
        here = [part for part in parts if part.size != 0 and (device == cpu or part.host == (place == cpu))]
        if not here:
            continue
        now, more = memory.held(place), memory.free(place) // (trainer.num_devices if place == cpu else 1)
        phases = {phase: [part for part in here if part.phase in ("", phase)] for phase in PHASES}
        most = {phase: now + sum(part.size or 0 for part in there) for phase, there in phases.items()}
        table = ", ".join(f"{part.name} {human(part.size)}" for part in [Part("so far", now), *here])
        amounts = map(human, [*most.values(), now + more])
        log.info("memory: %s in an update, %s in a rollout, of %s on %s: %s", *amounts, place, table)
        for phase, there in phases.items():
            if most[phase] > now + more:
                remediable = [part for part in there if part.size and part.remedy]
                largest = sorted(remediable, key=lambda part: part.size, reverse=True)[:3]
                remedies = dict.fromkeys(part.remedy for part in largest)
                log.warning("memory: the %s may not fit; what helps most: %s", phase, ", ".join(remedies))
    return [Part("so far", memory.held(device)), *parts]


def in_a_layer(model: nn.Module) -> int:
    """Return the bytes that sharding gathers at once: two layers, their gradients, and the rest."""
    layers = [bytes_of(layer.parameters()) for layer in layers_of(model)]
    return 4 * max(layers) + 2 * (bytes_of(model.parameters()) - sum(layers))


def human(size: int | None) -> str:
    """Return a number of bytes as text, in MB or GB."""
    return "unknown" if size is None else f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def known(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Return the measurement; None if a model or an optimizer needs values of tensors, which tensors without memory lack."""
    try:
        return measure(*arguments)
    except UserError:
        raise
    except Exception as error:  # a model's code may raise anything
        log.debug("forecast: %s", error)
        return None


def imagined(make_module: Callable[[nn.Module], L.LightningModule], pretrained: Pretrained) -> L.LightningModule:
    """Return a module of CPU tensors without memory, so that kernels are chosen as for real tensors."""
    with torch.device("meta"):
        module = make_module(pretrained.outline())
    there: dict[Tensor, Tensor] = {}  # tied ones stay tied
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in module.modules():
            for name, x in [*part._parameters.items(), *part._buffers.items()]:
                if x is not None and x not in there:
                    empty = torch.empty_like(x, device="cpu")
                    there[x] = nn.Parameter(empty, x.requires_grad) if name in part._parameters else empty
                (part._parameters if name in part._parameters else part._buffers)[name] = there.get(x)
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


def in_a_step(optimizer: Optimizer, there: Iterable[Tensor]) -> int:
    """Make a step after the first one, and return the peak bytes of its temporary tensors. there: parameters and gradients."""
    state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, Tensor)]
    with Live([*there, *state]) as live:
        optimizer.step()
    return live.most.total()


def in_a_pass(
    module: L.LightningModule, plan: Plan, prompt_tokens: int, there: Iterable[Tensor], layout: Layout
) -> Counter[str]:
    """Return the peak bytes of the longest microbatch, forward and backward. there: tensors that exist before it."""
    policy, optim, algorithm = module.policy, module.optim, module.algorithm
    batch = minibatch(plan, prompt_tokens, plan.prompts * plan.group_size // algorithm.num_minibatches)
    batch = batch.rows(microbatches(batch, layout, optim.max_tokens_per_microbatch)[0])
    live = Live(there, policy.config.get_text_config().vocab_size)
    below, again = below_the_critic(module), optim.gradient_checkpointing
    with live, recomputing(policy, again), recomputing(below, again and below is not None):
        found = completion_logprobs(policy, batch, module.temperature, algorithm.entropy.active, layout)
        valued = [] if below is None else [states_before(below, batch, layout)]
        sum(numbers.sum() for numbers in (*found, *valued)).backward()
    return live.most


def below_the_critic(module: L.LightningModule) -> nn.Module | None:
    """Return the model of a critic that has its own."""
    return module.critic.model if hasattr(module, "critic") else None


def minibatch(plan: Plan, prompt_tokens: int, rows: int) -> TokenBatch:
    """Return a batch of groups with this many rows, all as long as possible."""
    width = plan.sampling.max_tokens
    group = torch.arange(rows) // plan.group_size
    ids = group[:, None].expand(rows, prompt_tokens + width)  # a different prompt for each group
    completion, logprobs = torch.ones(rows, width, dtype=torch.bool), torch.zeros(rows, width)
    return TokenBatch(ids, torch.ones_like(ids), completion, logprobs, torch.arange(rows))


def in_the_cache(config: PretrainedConfig, dtype: torch.dtype, plan: Plan, prompt_tokens: int, bound: int) -> int:
    """Return the bytes of a rollout's KV cache in the built-in engine, which stores a prompt once. bound: the cache's tokens."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = plan.prompts * (prompt_tokens + plan.group_size * plan.sampling.max_tokens)
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize * min(tokens, bound)


@torch.no_grad()
def in_sampling(
    policy: nn.Module, dtype: torch.dtype, plan: Plan, prompt_tokens: int, there: Iterable[Tensor]
) -> int | None:
    """Return the peak bytes of the built-in engine besides its cache: it reads prompts, or draws a token for each row."""
    vocabulary, rows = policy.config.get_text_config().vocab_size, plan.prompts * plan.group_size
    count = max(1, min(plan.prompts, PREFILL_TOKENS // prompt_tokens))
    prompts = Packed([[0] * prompt_tokens] * count, [[]] * count, torch.device("cpu"))
    last = torch.arange(1, count + 1) * prompt_tokens - 1
    with Live(there) as live:
        with attending(policy):
            policy(prompts.ids, position_ids=prompts.positions, plan=prompts, use_cache=False, logits_to_keep=last)
        logits = next(policy.parameters()).new_empty(rows, vocabulary, dtype=dtype)
        at_once = logits[: max(1, LOGITS_PER_DRAW // vocabulary)]
        uniform = at_once.new_empty(len(at_once), dtype=torch.float64)
        Draws((), plan.sampling, (), torch.device("cpu")).drawn(at_once, uniform, None)
    return live.most.total()


def by_groups(a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any) -> Tensor:
    """Return the result of a product for each expert, without numbers. Two dimensions: the rows of all experts together."""
    groups = () if a.ndim != b.ndim else (len(a),) if a.ndim == 3 else (len(offsets),)
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of the tensors; each storage counts once."""
    return sum({storage_of(t): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}.values())


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are created while it is active, as long as they exist; `most` is the highest count.

    there: earlier tensors, which do not count. A tensor counts as logits if its last dimension is the vocabulary.
    """

    def __init__(self, there: Iterable[Tensor], vocabulary: int | None = None) -> None:
        super().__init__()
        self.seen, self.vocabulary = {storage_of(tensor) for tensor in there}, vocabulary
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

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
