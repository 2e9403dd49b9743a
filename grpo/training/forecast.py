"""The forecast: what a run will hold in memory, told before it begins.

The run's own model, adapter, optimizer and longest microbatch are made of tensors without memory (torch's FakeTensorMode), and
what they would take is counted: there is no table of models, optimizers or layouts to keep up to date.
"""

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
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
from grpo.engines.protocol import Engine
from grpo.models.gradient_checkpointing import recomputing
from grpo.models.logprobs import Layout, completion_logprobs
from grpo.models.packing import microbatches
from grpo.models.policy import Pretrained
from grpo.objectives.batch import TokenBatch
from grpo.rollout.types import Plan
from grpo.system import memory
from grpo.system.errors import UserError

log = logging.getLogger(__name__)
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # `known` says it

FEWER_TOKENS = "optim.gradient_checkpointing=true or a lower optim.max_tokens_per_microbatch"
REMEDIES = {
    "weights": "model.dtype=bfloat16",
    "masters": "adapter=lora",
    "optimizer": "optim=adamw_8bit",
    "reference": "adapter=lora",
    "gradients": "adapter=lora",
    "buckets": "adapter=lora",
    "activations": FEWER_TOKENS,
    "logits": FEWER_TOKENS,
    "cache": "a lower rollout.prompts",
}


@dataclass(frozen=True)
class Part:
    """size: bytes; None where nobody can tell. phase: "update" or "rollout", where it is there in that one only. host: it is in
    the CPU's memory, whatever the device."""

    name: str
    size: int | None
    phase: str = ""
    host: bool = False


def forecast(
    make_module: Callable[[nn.Module], L.LightningModule],
    pretrained: Pretrained,
    plan: Plan,
    engine: Engine,
    prompt_tokens: int,
    trainer: L.Trainer,
) -> None:
    """Says it: a line for each memory, and a warning for one that is too small. prompt_tokens: of the longest prompt."""
    settings = trainer.precision, trainer.num_devices
    parts = known(partial(parts_of, make_module, pretrained, plan, engine, prompt_tokens, *settings))
    if parts is None:
        log.info("memory: no forecast for this model")
    device, cpu = trainer.strategy.root_device, torch.device("cpu")
    for place in dict.fromkeys([device, cpu]) if parts else ():
        here = [part for part in parts if part.size != 0 and (device == cpu or part.host == (place == cpu))]
        if not here:
            continue
        now, more = memory.held(place), memory.free(place) // (trainer.num_devices if place == cpu else 1)
        table = ", ".join(f"{part.name} {human(part.size)}" for part in [Part("so far", now), *here])
        phases = {phase: [part for part in here if part.phase in ("", phase)] for phase in ("update", "rollout")}
        most = {phase: now + sum(part.size or 0 for part in there) for phase, there in phases.items()}
        log.info("memory: %s in an update, %s in a rollout, of %s on %s: %s", human(most["update"]), human(most["rollout"]),
                 human(now + more), place, table)  # fmt: skip
        for phase, there in phases.items():
            if most[phase] > now + more:
                largest = sorted(there, key=lambda part: part.size or 0, reverse=True)[:3]
                remedies = dict.fromkeys(REMEDIES[part.name] for part in largest if part.size)
                log.warning("memory: the %s may not fit; what helps most: %s", phase, ", ".join(remedies))


def parts_of(
    make_module: Callable[[nn.Module], L.LightningModule],
    pretrained: Pretrained,
    plan: Plan,
    engine: Engine,
    prompt_tokens: int,
    precision: str = "32-true",
    devices: int = 1,
) -> list[Part]:
    """What one process will hold."""
    plan = replace(plan, prompts=math.ceil(plan.prompts / devices))
    with torch.device("meta"):
        module = make_module(pretrained.outline())
    imagine(module)
    policy, reference, optim = module.policy, module.reference, module.optim
    [optimizer], _ = module.configure_optimizers()
    own = [*policy.parameters(), *policy.buffers()]
    learned = [p for group in optimizer.param_groups for p in group["params"]]  # masters, where there are some
    for p in learned:
        p.grad = torch.zeros_like(p)
    gradients = [p.grad for p in learned]
    copies = reference.own() if reference else []
    there = [*own, *learned, *gradients, *copies]
    mixed = precision == "bf16-mixed"
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        passes = (
            known(partial(of_a_pass, module, plan, prompt_tokens, there, layout)) for layout in (optim.layout, "padded")
        )
        passing = next(filter(None, passes), {"activations": None, "logits": None})
    dtype = torch.bfloat16 if mixed else policy.dtype
    return [
        Part("weights", 0 if hasattr(engine, "shared_bytes") else held(own)),  # else they are in vLLM already
        Part("masters", held([*own, *learned]) - held(own), host=optim.offload),
        Part("optimizer", known(partial(of_a_step, optimizer)), host=optim.offload),
        Part("reference", held(copies)),
        Part("gradients", held(gradients), "update", optim.offload),
        Part("buckets", held(p for p in own if p.requires_grad) if devices > 1 else 0),  # of DistributedDataParallel
        *(Part(name, passing[name], "update") for name in ("activations", "logits")),
        Part(
            "cache",
            known(partial(of_the_cache, policy.config, dtype, plan, prompt_tokens, engine.max_cache_tokens)),
            "rollout",
        )
        if isinstance(engine, TransformersEngine)
        else Part("engine", None, "rollout"),
    ]


def human(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def known(measure: Callable[[], Any]) -> Any:
    """None where a model or an optimizer does what tensors without memory cannot, as to look at a value."""
    try:
        return measure()
    except UserError:
        raise
    except Exception as error:  # whatever a model of others raises
        log.debug("forecast: %s", error)
        return None


def imagine(module: nn.Module) -> None:
    """Its parameters and buffers, on meta, become tensors of the CPU without memory: kernels then choose as with real ones."""
    imagined: dict[Tensor, Tensor] = {}  # tied ones stay tied
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in module.modules():
            for name, p in part._parameters.items():
                if p is not None and p not in imagined:
                    imagined[p] = nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad)
                part._parameters[name] = p if p is None else imagined[p]
            part._buffers |= {
                name: x if x is None else torch.empty_like(x, device="cpu") for name, x in part._buffers.items()
            }


def of_a_step(optimizer: Optimizer) -> int:
    """What the optimizer keeps after its first step."""
    optimizer.step()
    return held(tensor for state in optimizer.state.values() for tensor in state.values())


def of_a_pass(
    module: L.LightningModule, plan: Plan, prompt_tokens: int, there: Iterable[Tensor], layout: Layout
) -> Counter[str]:
    """What the longest microbatch takes, forward and backward, when most of it is there. there: what there is before it."""
    policy, optim, algorithm = module.policy, module.optim, module.algorithm
    batch = minibatch(plan, prompt_tokens, plan.prompts * plan.group_size // algorithm.num_minibatches)
    batch = batch.rows(microbatches(batch, layout, optim.max_tokens_per_microbatch)[0])
    live = Live(there, policy.config.get_text_config().vocab_size)
    with live, recomputing(policy, optim.gradient_checkpointing):
        logprobs, entropy = completion_logprobs(policy, batch, module.temperature, algorithm.entropy.active, layout)
        (logprobs + entropy).sum().backward()
    return live.most


def minibatch(plan: Plan, prompt_tokens: int, rows: int) -> TokenBatch:
    """Groups of rows that are all as long as can be."""
    width = plan.sampling.max_tokens
    group = torch.arange(rows) // plan.group_size
    ids = group[:, None].expand(rows, prompt_tokens + width)  # a prompt of its own for each group
    real = torch.ones(rows, prompt_tokens + width, dtype=torch.int64)
    return TokenBatch(
        ids, real, torch.ones(rows, width, dtype=torch.bool), torch.zeros(rows, width), torch.arange(rows)
    )


def of_the_cache(config: PretrainedConfig, dtype: torch.dtype, plan: Plan, prompt_tokens: int, bound: int) -> int:
    """Keys and values of a rollout in the built-in engine, which keeps a prompt's once for all of its samples. bound: tokens."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = plan.prompts * (prompt_tokens + plan.group_size * plan.sampling.max_tokens)
    return 2 * config.num_hidden_layers * heads * width * dtype.itemsize * min(tokens, bound)


def held(tensors: Iterable[Any]) -> int:
    """Bytes, each storage once."""
    return sum({storage(t): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}.values())


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is active, as long as they are there; `most` is the highest count.

    there: tensors from before, which do not count. Logits are told by the last dimension.
    """

    def __init__(self, there: Iterable[Tensor], vocabulary: int) -> None:
        super().__init__()
        self.seen, self.vocabulary = {storage(tensor) for tensor in there}, vocabulary
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := storage(tensor)) not in self.seen:
                place = tensor.untyped_storage()
                name = "logits" if tensor.ndim and tensor.shape[-1] == self.vocabulary else "activations"
                self.seen.add(key)
                self.now[name] += place.nbytes()
                weakref.finalize(place, self.forget, key, name, place.nbytes())
        if self.now.total() > self.most.total():
            self.most = self.now.copy()
        return result

    def forget(self, key: int, name: str, size: int) -> None:
        self.seen.discard(key)
        self.now[name] -= size
