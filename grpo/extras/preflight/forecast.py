"""The memory forecast: the bytes that a run will hold, logged before it starts, and what they leave for the engine.

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
from torch import nn

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Engine
from grpo.engines.room import Room
from grpo.extras.preflight.imagined import (
    activation_bytes,
    after_a_step,
    bytes_of,
    head_as_on,
    imagined,
    in_a_layer,
    in_sampling,
    in_the_cache,
    known,
    optimizer_step_bytes,
    with_gradients,
)
from grpo.extras.preflight.limits import CPU, host_limit, limit_of, to_fill
from grpo.models.gradient_checkpointing import recomputable
from grpo.models.pretrained import Pretrained
from grpo.rollout.types import Plan
from grpo.system import memory
from grpo.training.optimization import Optimization, learned_by
from grpo.training.trainer import MIXED, shards

log = logging.getLogger(__name__)

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
# of what a GPU holds, as torch's allocator keeps pieces of freed memory. tests/helpers/fake_gpu.py simulates it, 8192 tokens:
# 4.3 % above the tensors of 0.5B, 1.8 % above those of 7B with LoRA and recomputed layers, 9.2 % if its answers are full
RESERVE = 0.11
CONTEXT = 600_000_000  # of CUDA and its libraries: a margin, not measured


@dataclass(frozen=True)
class Sizes:
    """The settings on which memory depends. make_module: from a model. longest: returns the tokens of the longest prompt. choice:
    settings of `optim` in place of the module's own."""

    make_module: Callable[[nn.Module], L.LightningModule]
    pretrained: Pretrained
    plan: Plan
    engine: Engine
    longest: Callable[[], int]
    choice: Mapping[str, Any] = field(default_factory=dict)

    def parts(self, precision: str, ranks: int, sharded: bool = False, device: str = "cpu") -> list[Part] | None:
        """Return the parts of memory that one process will hold with such a device; None if they are unknown."""
        with head_as_on(device):
            parts = known(self.counted, self.longest(), precision, ranks, sharded, device)
        memory.give_back()  # some optimizers compute with real tensors even here
        if parts and device == "cuda":
            held = sum(part.size or 0 for part in parts if not part.host and part.phase != "rollout")
            parts.append(Part("reserve", CONTEXT + round(RESERVE * held)))
        return parts

    def needed(self, precision: str, ranks: int, device: str = "cpu") -> int:
        """Return the most bytes that one of these ranks holds on its device without sharding, with the fewest tokens at once that
        the settings leave open; 0 if unknown."""
        if (module := known(imagined, self.make_module, self.pretrained)) is None:
            return 0
        size = min(each["max_tokens_per_microbatch"] for each in self.choices(module.optim, device))
        parts = replace(self, choice={"max_tokens_per_microbatch": size}).parts(precision, ranks, device=device)
        return largest_phase([part for part in parts or () if not part.host])

    def of_trainer(self, trainer: L.Trainer) -> list[Part] | None:
        """Return the parts of memory that one process of this trainer will hold; None if they are unknown."""
        sharded = shards(trainer)
        precision = trainer.strategy.passes if sharded else trainer.precision
        return self.parts(precision, trainer.world_size, sharded, trainer.strategy.root_device.type)

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
        sizes, again = [optim.tokens_at_once(device)], [bool(optim.gradient_checkpointing)]
        if optim.max_tokens_per_microbatch is None and device != "cpu":
            longest = self.longest() + self.plan.sampling.max_tokens  # a row is never cut
            sizes += [sizes[0] // n for n in (2, 4) if 2 * sizes[0] // n > longest]
        if optim.gradient_checkpointing is None and recomputable(self.bare()):
            again.append(True)
        return [{"max_tokens_per_microbatch": size, "gradient_checkpointing": each} for each in again for size in sizes]

    def outlined(self, pretrained: Pretrained, device: str) -> L.LightningModule:
        """Return the module without memory, with the choice, and the default of a type of device for what that leaves open."""
        module = imagined(self.make_module, pretrained)
        at_once = {"max_tokens_per_microbatch": module.optim.tokens_at_once(device)}
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
        teacher = [tensor for part in getattr(module, "parts", {}).values() for tensor in part.own()]
        # versions of the trained weights that wait for their rollout, see `Chain`
        trained = bytes_of(p for p in policy.parameters() if p.requires_grad) if plan.order == "exact" else 0
        held = [*model, *learned, *gradients, *copies, *teacher]
        mixed = precision in MIXED
        # layers that are gathered in 16 bits, so autocast copies no weight
        low_shards = sharded and mixed and policy.dtype.itemsize == 4
        # what computes, and the tensors that exist before
        passes, beside = self.in_16_bits(device) if low_shards else (module, held)
        one_pass = partial(activation_bytes, passes, plan, prompt_tokens, beside)
        casts = partial(torch.autocast, "cpu", MIXED.get(precision), enabled=mixed and not low_shards)
        with casts():
            passing = known(one_pass, optim.layout) or known(one_pass, "padded")
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
        parts = [
            Part("weights", weights // of_device, "" if policy.dtype.itemsize == 2 else "model.dtype=bfloat16"),
            Part("masters", masters, lora, host=optim.offload),
            Part("optimizer", optimizer_state and optimizer_state // of_device, "optim=adamw_8bit", host=optim.offload),
            Part("reference", bytes_of(copies) // of_device, lora),
            Part("copies", (plan.ahead + (plan.ahead > 1)) * trained, lora, host=plan.ahead < 2),
            Part("teacher", bytes_of(teacher), "teacher.model.dtype=bfloat16"),
            Part("gradients", bytes_of(gradients) // of_device, lora, "update", optim.offload),
            Part("step", stepping // of_device, "optim=adamw", "update", optim.offload),
            Part("buckets", buckets, lora),  # of gradients, in DistributedDataParallel
            Part("gathered", gathered, "", "update"),
            *(Part(name, passing and passing[name], FEWER_TOKENS, "update") for name in ("activations", "logits")),
        ]
        if not isinstance(engine, TransformersEngine):
            return [*parts, Part("engine", None, phase="rollout")]
        dtype = MIXED.get(precision, policy.dtype)
        with casts():
            sampling = known(in_sampling, passes.policy, dtype, plan, prompt_tokens, beside)
        cache = known(in_the_cache, policy.config, dtype, plan, prompt_tokens, engine.max_cache_tokens)
        whole = bytes_of(passes.policy.parameters()) if sharded else 0
        rest = {"cache": cache, "sampling": sampling, "whole policy": whole}
        return [*parts, *(Part(name, size, FEWER_ROWS, "rollout") for name, size in rest.items())]


def largest_phase(parts: Sequence[Part]) -> int:
    """Return the most bytes that these parts take in a phase; unknown ones count as 0."""
    return max(in_phases(parts).values())


def in_phases(parts: Sequence[Part]) -> dict[str, int]:
    """Return the bytes of these parts in each of PHASES; unknown ones count as 0."""
    return {phase: sum(part.size or 0 for part in parts if part.phase in ("", phase)) for phase in PHASES}


def forecast(sizes: Sizes, trainer: L.Trainer, parts: list[Part] | None = None, shown: bool = True) -> list[Part]:
    """Log one line per memory (device, CPU), and a warning if it may be too small. Returns the parts; none if unknown.

    An engine that may choose how much it takes (`fit`) is given what the run leaves. parts: if they have been counted. shown:
    whether to log.
    """
    device, card = trainer.strategy.root_device, getattr(trainer, "card", None)
    fit = getattr(sizes.engine, "fit", None) if device.type == "cuda" else None
    parts = parts or (sizes.of_trainer(trainer) if shown or fit else [])
    of_engine, fits = {}, True
    if parts and fit:
        total, limit = card.size if card else memory.total(device), to_fill(sizes.engine, trainer)
        room = sizes.room(parts, total, limit, trainer.world_size)
        of_engine = fit(room)
        fits = not room.lacks(sum(of_engine.values()) / total)
        lower = "a lower engine.args.gpu_memory_utilization"
        parts = [part for part in parts if part.name != "engine"]
        parts += [Part("engine", size, lower, phase) for phase, size in of_engine.items()]
        if shown:
            log.info("engine: %s", words_of_engine(room, of_engine))
    if not shown:
        return parts or []
    if parts is None:
        log.info("memory: no forecast for this model")
        return []
    parts += [LATER] if device == CPU else []
    so_far = 0 if card else max(0, memory.held(device) - sum(of_engine.values()))
    for place in dict.fromkeys([device, CPU]):
        held = [part for part in parts if part.size != 0 and (device == CPU or part.host == (place == CPU))]
        if not held:
            continue
        now, limit = (so_far, limit_of(trainer)) if place == device else host_limit(trainer)
        most = {phase: now + size for phase, size in in_phases(held).items()}
        table = ", ".join(f"{part.name} {human(part.size)}" for part in [Part("so far", now), *held])
        name = card.name if card and place == device else place
        log.info(
            "memory: %s in an update, %s in a rollout, of %s on %s: %s",
            *map(human, [*most.values(), limit]),
            name,
            table,
        )
        for phase, size in most.items() if limit is not None else ():
            if size > limit:
                fits = False
                remediable = [part for part in held if part.phase in ("", phase) and part.size and part.remedy]
                largest = sorted(remediable, key=lambda part: part.size, reverse=True)[:3]
                remedies = dict.fromkeys(part.remedy for part in largest)
                log.warning("memory: the %s may not fit; what helps most: %s", phase, ", ".join(remedies))
    if card:
        log.info("%s: the run %s", card.name, "fits" if fits else "does not fit")
    return [Part("so far", so_far), *parts]


def words_of_engine(room: Room, taken: Mapping[str, int]) -> str:
    """Describe the part of a device that an engine takes, and why. taken: bytes by phase, as `fit` returns them."""
    size, left = sum(taken.values()), human(max(0, room.usable - room.update))
    when = "; it sleeps during" if "rollout" in taken else ", also during"
    return f"{100 * size / room.total:.0f}% of the GPU, {human(size)}{when} an update, which leaves {left}"


def human(size: int | None) -> str:
    """Return a number of bytes as text, in MB or GB."""
    if size is None:
        return "unknown"
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"
