"""Sizes: the bytes of the parts of a run's memory, and the choices that a run makes by them.

The run's own model, adapter, optimizer and longest microbatch are built from tensors without memory, and their bytes are counted.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.builtin.llama import is_packed
from grpo.engines.protocol import Engine
from grpo.engines.room import Room
from grpo.extras.forecast.imagined import (
    FlexOnPaper,
    activation_bytes,
    after_a_step,
    bytes_of,
    computing_as_on,
    imagined,
    in_a_layer,
    in_sampling,
    in_the_cache,
    known,
    optimizer_step_bytes,
    pinned,
    sizes_of,
    with_gradients,
)
from grpo.extras.forecast.limits import limit_of, takes_flex, to_fill
from grpo.extras.forecast.parts import Part, human, in_phases, largest_phase
from grpo.models import FOLLOWERS
from grpo.models.adapted import without_adapter
from grpo.models.gradient_checkpointing import recomputable
from grpo.models.pretrained import Pretrained
from grpo.rollout.types import Plan
from grpo.system import memory
from grpo.training.optimization import Optimization, learned_by
from grpo.training.trainer import MIXED, shards

log = logging.getLogger(__name__)

FEWER_TOKENS = "optim.gradient_checkpointing=true or a lower optim.max_tokens_per_microbatch"
OWN = ("", "update", "scoring", "host")  # see `UpdatePart.own`
FEWER_ROWS = "a lower rollout.prompts"
# of what a GPU holds, as torch's allocator keeps pieces of freed memory. tests/helpers/fake_gpu.py simulates it, 8192 tokens:
# 4.3 % above the tensors of 0.5B, 1.8 % above those of 7B with LoRA and recomputed layers, 9.2 % if its answers are full
RESERVE = 0.11
CONTEXT = 600_000_000  # of CUDA and its libraries: a margin, not measured


@dataclass(frozen=True)
class Sizes:
    """The settings on which memory depends.

    make_module: from a model. longest: returns the tokens of the longest prompt. choice: settings of `optim` in place of the
    module's own. fewest: with the fewest tokens at once that the settings leave open. flex: whether FlexAttention computes on a
    GPU.
    """

    make_module: Callable[[nn.Module], L.LightningModule]
    pretrained: Pretrained
    plan: Plan
    engine: Engine
    longest: Callable[[], int]
    choice: Mapping[str, Any] = field(default_factory=dict)
    fewest: bool = False
    flex: bool = True

    def parts(self, precision: str, ranks: int, sharded: bool = False, device: str = "cpu") -> list[Part] | None:
        """Return the parts of memory that one process will hold with such a device; None if they are unknown."""
        with computing_as_on(device):
            parts = known(self.counted, self.longest(), precision, ranks, sharded, device)
        memory.give_back()  # some optimizers compute with real tensors even here
        if parts and device == "cuda":
            held = in_phases([part for part in parts if not part.host])["update"]
            parts.append(Part("reserve", CONTEXT + round(RESERVE * held)))
        return parts

    def needed(self, precision: str, ranks: int, device: str = "cpu") -> int:
        """Return the most bytes that one of these ranks holds on its device without sharding, with the fewest tokens at once that
        the settings leave open; 0 if unknown."""
        parts = replace(self, fewest=True).parts(precision, ranks, device=device)
        return largest_phase([part for part in parts or () if not part.host])

    def of_trainer(self, trainer: L.Trainer) -> list[Part] | None:
        """Return the parts of memory that one process of this trainer will hold; None if they are unknown."""
        sharded = shards(trainer)
        precision = trainer.strategy.passes if sharded else trainer.precision
        device = trainer.strategy.root_device.type
        return replace(self, flex=takes_flex(trainer)).parts(precision, trainer.world_size, sharded, device)

    def again(self, trainer: L.Trainer, before: Sequence[Part]) -> Callable[[], str]:
        """Return a function that counts an update again, without the kernels that have failed meanwhile, and describes the
        difference, and whether the update fits what the device has now. before: the parts of the forecast."""
        limit, old = limit_of(trainer), [part for part in before if not part.host]

        @isolate_rng()
        @torch.enable_grad()
        def line() -> str:
            if (parts := self.of_trainer(trainer)) is None:
                return "unknown"
            counted = {part.name: part for part in parts if not part.host and part.name != "engine"}
            kept = [part for part in old if part.name not in counted]
            new = in_phases([*kept, *counted.values()])["update"]
            more, room = new - in_phases(old)["update"], limit - new
            fits = "which fits" if room >= 0 else f"{human(-room)} too much: lower optim.max_tokens_per_microbatch"
            return f"{human(more)} more, {human(new)} of {human(limit)}, {fits}"

        return line

    def fitted(self, optim: Optimization, trainer: L.Trainer) -> tuple[Optimization, list[Part] | None]:
        """Return these settings with the choices that they leave open, and the parts of memory with them, if choosing has counted
        these.

        The first choice with which an update fits the device is taken. On a GPU fewer tokens at once, down to a quarter, come
        before recomputed layers, which cost more.
        """
        choices = self.choices(optim, trainer.strategy.root_device.type)
        usable, parts, short = to_fill(self.engine, trainer), None, []
        for choice in choices if len(choices) > 1 else ():
            parts = replace(self, choice=choice).of_trainer(trainer)
            needed = in_phases([part for part in parts or () if not part.host])["update"]
            size, again = choice.values()
            if needed <= usable or choice == choices[-1]:
                words = size, str(again).lower(), human(needed), human(usable), "; not " * bool(short), ", ".join(short)
                line = (
                    "optim.max_tokens_per_microbatch=%d optim.gradient_checkpointing=%s: an update takes %s of %s%s%s"
                )
                log.info(line, *words)
                break
            short.append(f"{human(needed)} with {size} tokens at once{' and recomputed layers' * again}")
        return replace(optim, **choices[0] if parts is None else choice), parts

    def choices(self, optim: Optimization, device: str) -> list[dict[str, Any]]:
        """Return the choices that these settings leave open, the fastest first."""
        sizes, again = self.at_once(optim, device), [bool(optim.gradient_checkpointing)]
        if optim.gradient_checkpointing is None and recomputable(self.bare()):
            again.append(True)
        return [{"max_tokens_per_microbatch": size, "gradient_checkpointing": each} for each in again for size in sizes]

    def at_once(self, optim: Optimization, device: str) -> list[int]:
        """Return the tokens at once that these settings leave open, the most first."""
        sizes = [optim.tokens_at_once(device)]
        if optim.max_tokens_per_microbatch is None and device != "cpu":
            longest = self.longest() + self.plan.sampling.max_tokens  # a row is never cut
            sizes += [sizes[0] // n for n in (2, 4) if 2 * sizes[0] // n > longest]
        return sizes

    def outlined(self, pretrained: Pretrained, device: str) -> L.LightningModule:
        """Return the module without memory, with the choice, and for what that leaves open the default of a type of device, or
        the fewest tokens at once."""
        module = imagined(self.make_module, pretrained)
        size = self.at_once(module.optim, device)[-1] if self.fewest else module.optim.tokens_at_once(device)
        at_once = {"max_tokens_per_microbatch": size}
        module.optim = replace(module.optim, **at_once | self.choice)
        return module

    def bare(self) -> nn.Module:
        """Return the model without memory."""
        with torch.device("meta"):
            return self.pretrained.outline()

    def room(self, parts: Sequence[Part], total: int, usable: int, ranks: int) -> Room:
        """Return what these parts leave of a device for an engine. total: its bytes. usable: those to fill. ranks: that share a
        rollout."""
        policy, dtype = self.bare(), torch.bfloat16
        plan = replace(self.plan, prompts=math.ceil(self.plan.prompts / ranks))
        prompt, cache = self.longest(), partial(in_the_cache, policy.config, dtype)
        single = replace(plan, prompts=1, group_size=1)
        return Room(
            total=total,
            usable=usable,
            weights=sum(p.numel() for p in policy.parameters()) * dtype.itemsize,
            sequence=known(cache, single, prompt, math.inf) or 0,
            cache=known(cache, plan, prompt, math.inf) or 0,
            may_sleep=not plan.ahead,
            **in_phases([part for part in parts if not part.host]),
        )

    def in_16_bits(self, device: str) -> tuple[L.LightningModule, list[torch.Tensor]]:
        """Return the module in 16 bits, and its tensors and gradients."""
        module = self.outlined(replace(self.pretrained, dtype="bfloat16"), device)
        parameters = [*module.parameters()]
        gradients = with_gradients(p for p in parameters if p.requires_grad)
        return module, [*parameters, *module.buffers(), *gradients]

    def counted(
        self,
        prompt_tokens: int,
        precision: str = "32-true",
        devices: int = 1,
        sharded: bool = False,
        device: str = "cpu",
    ) -> list[Part]:
        """Return the parts of memory that one process will hold. sharded: each of the devices has a part of every parameter."""
        plan, engine = replace(self.plan, prompts=math.ceil(self.plan.prompts / devices)), self.engine
        module = self.outlined(self.pretrained, device)
        policy, optim = module.policy, module.optim
        [optimizer], _ = module.configure_optimizers()
        model = [*module.parameters(), *module.buffers()]  # also the critic's
        learned = learned_by(optimizer)  # the float32 masters, if there are any
        gradients = with_gradients(learned)
        copies = module.reference.own() if module.reference else []
        beside_it = getattr(module, "parts", {}).values()
        teacher = {phase: [x for part in beside_it for x in part.own(phase)] for phase in OWN}
        # versions of the trained weights that wait for their rollout, see `Chain`
        learns = bytes_of(p for p in policy.parameters() if p.requires_grad)
        trained = learns if plan.order == "exact" else 0
        held = [*model, *learned, *gradients, *copies, *(x for some in teacher.values() for x in some)]
        mixed = precision in MIXED
        # layers that are gathered in 16 bits, so autocast copies no weight
        low_shards = sharded and mixed and policy.dtype.itemsize == 4
        # what computes, and the tensors that exist before
        passes, beside = self.in_16_bits(device) if low_shards else (module, held)
        kernel = FlexOnPaper() if self.flex and device == "cuda" else None
        one_pass = partial(activation_bytes, passes, plan, prompt_tokens, beside, kernel)
        casts = partial(torch.autocast, "cpu", MIXED.get(precision), enabled=mixed and not low_shards)
        with casts():
            passing, scoring = known(one_pass, optim.layout) or known(one_pass, "padded") or (None, 0)
        optimizer_state = known(after_a_step, optimizer)
        stepping = known(optimizer_step_bytes, optimizer, held) or 0
        if not optim.offload:  # a step begins when the activations are gone
            stepping = max(0, stepping - (passing.total() if passing else 0))
        lora = "adapter=lora"
        in_engine = hasattr(engine, "shared_bytes")  # vLLM already holds the weights
        weights, masters = 0 if in_engine else bytes_of(model), bytes_of([*model, *learned]) - bytes_of(model)
        if sharded:
            weights, masters = bytes_of(p for p in model if not p.requires_grad) + bytes_of(learned), 0
        buckets = bytes_of(p for p in model if p.requires_grad) if devices > 1 and not sharded else 0
        of_parts = [model for part in getattr(passes, "parts", {}).values() for model in part.models()]
        learning = [model for model in of_parts if any(p.requires_grad for p in model.parameters())]
        bodies = [*dict.fromkeys([passes.policy, *learning])]
        gathered = sum(map(in_a_layer, bodies)) if sharded else 0  # layers that are whole while they compute
        of_device = devices if sharded else 1
        pixels = getattr(without_adapter(policy).get_decoder(), "pixel_bytes", lambda prompts: 0)
        parts = [
            Part("weights", weights // of_device, "" if policy.dtype.itemsize == 2 else "model.dtype=bfloat16"),
            Part("masters", masters, lora, host=optim.offload),
            Part("optimizer", optimizer_state and optimizer_state // of_device, "optim=adamw_8bit", host=optim.offload),
            Part("reference", bytes_of(copies) // of_device, lora),
            Part("copies", (plan.ahead + (plan.ahead > 1)) * trained, lora, host=plan.ahead < 2),
            *of_teacher(teacher, scoring, plan, device),
            Part("pixels", pixels(plan.prompts * plan.num_rollouts), "a lower max_pixels in model.pictures", host=True),
            Part("gradients", bytes_of(gradients) // of_device, lora, "passing", optim.offload),
            Part("step", stepping // of_device, "optim=adamw", "passing", optim.offload),
            Part("buckets", buckets, lora),  # of gradients, in DistributedDataParallel
            Part("gathered", gathered, "", "update"),
            *(Part(name, passing and passing[name], FEWER_TOKENS, "passing") for name in ("activations", "logits")),
        ]
        if not isinstance(engine, TransformersEngine):
            return [*parts, Part("engine", None, phase="rollout")]
        dtype = MIXED.get(precision, policy.dtype)
        with casts():
            sampling = known(in_sampling, passes.policy, dtype, plan, prompt_tokens, beside)
            states = known(states_carried, passes.policy)
        cache = known(in_the_cache, policy.config, dtype, plan, prompt_tokens, engine.max_cache_tokens, states)
        whole = bytes_of(passes.policy.parameters()) if sharded else 0
        rest = {"cache": cache, "sampling": sampling, "whole policy": whole}
        rest["packed matrices"] = packed(policy) if device == "cpu" else 0
        parts.append(Part("engine's copy", learns if getattr(engine, "apart", False) else 0, lora))
        return [*parts, *(Part(name, size, FEWER_ROWS, "rollout") for name, size in rest.items())]


def packed(policy: nn.Module) -> int:
    """Return the bytes of the copies with which the built-in engine samples from a large Llama on a CPU."""
    return bytes_of(m.weight for m in policy.modules() if type(m) is nn.Linear) if is_packed(policy) else 0


def states_carried(policy: nn.Module) -> tuple[int, int] | None:
    """Return the bytes of a sequence's states and of a token's keys and values, if the built-in engine's cache has states."""
    cache = next(filter(None, [follow(policy) for follow in FOLLOWERS]), None)
    return cache and cache.carried(policy)


def of_teacher(own: Mapping[str, Sequence[Tensor]], scoring: int, plan: Plan, device: str) -> list[Part]:
    """Return the parts of a teacher. own: its tensors, by phase. scoring: the bytes of its pass beside them.

    One that is offloaded is on a GPU while it scores, before there are gradients. The host's memory has its weights, pinned, and
    the states of a rollout's tokens if its head stays on the GPU to read them.
    """
    dtype, (always, head, visit, host) = "teacher.model.dtype=bfloat16", own.values()
    if device != "cuda":
        return [Part("teacher", bytes_of([*always, *head, *host]), dtype)]
    states = [plan.prompts * plan.group_size * plan.sampling.max_tokens * x[0].nbytes for x in head if x.ndim == 2]
    return [
        Part("teacher", bytes_of(always), dtype),
        Part("teacher's head", bytes_of(head), dtype, "update"),
        Part("teacher's visit", bytes_of(visit) + scoring if visit else 0, dtype, "scoring"),
        Part("pinned teacher", sum(map(pinned, [*sizes_of(host), *states])), dtype, host=True),
    ]
