"""Measure updates: `GRPOModule.training_step` in the Trainer's precision, with AdamW on float32 masters."""

from collections.abc import Callable
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from torch._dynamo import utils as compiler

from grpo.config.composing import composed
from grpo.engines.builtin.engine import TransformersEngine
from grpo.extras.forecast.parts import at_peak
from grpo.extras.forecast.sizes import Sizes
from grpo.extras.kernels.callback import KernelsCallback
from grpo.models.policy import with_adapter
from grpo.objectives.batch import Scores, TokenBatch
from grpo.training.batch import RolloutBatch
from on_gpu.device import CUDA, DEVICE, DTYPE, NO_GPU, clock, peaks, precision, share_of_peak, waits
from on_gpu.models import SHAPES, Shape, needed_flops, rule_of_thumb

VARIANTS = {  # settings of train.py
    "shared_prompt": [],
    "recompute": ["optim.gradient_checkpointing=true"],
    "no_liger": ["model.kernels=none"],
    "packed": ["optim.layout=packed"],
    "padded": ["optim.layout=padded"],
}
CACHE = 1 << 18  # tokens of the built-in engine's cache, so that no sample waits
Note = Callable[..., None]  # keeps measured values, by name
Step = Callable[[TokenBatch], None]  # makes an update


def update(name: str, variant: str, note: Note, overrides: list[str]) -> None:
    """Measure an update, then where its time goes."""
    shape = SHAPES[name]
    with TemporaryDirectory() as folder:
        shape.config.save_pretrained(folder)
        config = settings(shape, folder, [*VARIANTS[variant], *overrides])
        step, module, kernels = ours(shape, config)
        seconds = measure(shape, step, module.policy, note)
        used = [kernels[part].split()[0] for part in ("layout", "attention", "head", "layers")]
        note(kernel="/".join(used), kernels=kernels, at_once=module.at_once.most)
        if variant == "shared_prompt":
            note(**profile(partial(step, shape.batch(1 + shape.steps).to(DEVICE)), seconds))


def settings(shape: Shape, folder: str, overrides: list[str]) -> DictConfig:
    """Return the configuration of a run on this shape. folder: has the model's config.json."""
    sizes = [f"rollout.prompts={shape.prompts}", f"rollout.group_size={shape.group}", f"max_tokens={shape.answer}"]
    model = ["~recipe", "model=path", f"model.path={folder}", f"model.dtype={DTYPE}"]
    return composed(
        "train", [f"output_dir={folder}", "engine=transformers", *model, *sizes, *shape.overrides, *overrides]
    )


def made(config: DictConfig, model: nn.Module):
    """Return the LightningModule of a run, as train.py makes it."""
    plan, algorithm, optim = map(instantiate, (config.rollout, config.algo, config.optim))
    policy = with_adapter(model, instantiate(config.adapter))
    make = instantiate(config.module)
    return make(policy, algorithm, optim, plan.sampling.temperature, plan.num_rollouts, config.seed)


def random_model(config: DictConfig) -> nn.Module:
    """Return the model with random weights, on the device."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return instantiate(config.model).outline()


def ours(shape: Shape, config: DictConfig) -> tuple[Step, nn.Module, dict[str, str]]:
    """Return our step, the module that makes it, and its kernels, which are chosen in the first step."""
    module = made(config, random_model(config)).to(DEVICE)
    optimizers, schedules = module.configure_optimizers()
    # stands in for the Trainer, which only returns these
    module.optimizers, module.lr_schedulers = lambda: optimizers[0], lambda: schedules[0]
    module.manual_backward = lambda loss: loss.backward()
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(forward_context=precision))
    kernels = KernelsCallback(config.model.kernels)
    rewards = torch.rand(shape.prompts, shape.group, generator=torch.Generator().manual_seed(0))

    def step(batch: TokenBatch) -> None:
        if not kernels.found:
            kernels.on_train_start(trainer, module)
        lengths = torch.full(rewards.shape, float(shape.answer))  # only metrics and other algorithms read them
        scores = Scores(rewards, {}, lengths, lengths, torch.zeros(rewards.shape, dtype=torch.bool))
        with precision():
            module.training_step(RolloutBatch(0, tokens=batch, scores=scores), 0)

    return step, module, kernels.found


def measure(shape: Shape, step: Step, policy: nn.Module, note: Note) -> float:
    """Time steps. The first one compiles and creates the optimizer's state, in the second one waits are counted. Returns the
    seconds of the last."""
    batches = [shape.batch(turn).to(DEVICE) for turn in range(2 + shape.steps)]
    begun = clock()
    step(batches[0])
    first = clock() - begun
    found: dict = {}
    with waits(found):
        step(batches[1])
    seconds = []
    with peaks(found):
        for batch in batches[2:]:
            begun = clock()
            step(batch)
            seconds.append(clock() - begun)
    groups = [group for turn in range(2, 2 + shape.steps) for group in shape.groups(turn)]
    tokens = sum(int(batch.attention_mask.sum()) for batch in batches[2:])
    sizes = [p.numel() for p in policy.parameters()]
    learned = sum(p.numel() for p in policy.parameters() if p.requires_grad) if shape.lora else 0
    thumb = rule_of_thumb(sum(sizes) - learned, tokens, learned)
    note(
        **found,
        tokens_per_s=tokens / sum(seconds),
        step_s=median(seconds),
        steps=seconds,
        mfu=share_of_peak(needed_flops(shape.config, groups, learned) / sum(seconds)),
        mfu_6n=share_of_peak(thumb / sum(seconds)),
        warm_up_s=max(0.0, first - median(seconds)),
        compile_s=compiler.calculate_time_spent()["total_wall_time"],
        graphs=compiler.counters["stats"]["unique_graphs"],
        mean_answer=sum(sum(answers) for _, answers in groups) / (len(groups) * shape.group),
    )
    return seconds[-1]


def profile(step: Callable[[], None], seconds: float) -> dict:
    """Return the share of a step's seconds in which the device computes, and the seconds of its longest kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * CUDA]) as seen:
        step()
        clock()
    mine = DeviceType.CUDA if CUDA else DeviceType.CPU
    kernels = {
        event.key[:80]: (event.self_device_time_total if CUDA else event.self_cpu_time_total) / 1e6
        for event in seen.key_averages()
        if event.device_type == mine and not getattr(event, "is_user_annotation", False)
    }
    longest = sorted(kernels, key=kernels.get, reverse=True)[:15]
    busy = sum(kernels.values()) / seconds if CUDA else NO_GPU
    return {"busy": busy, "longest": {name: kernels[name] for name in longest}}


def forecast(name: str, variant: str, note: Note, overrides: list[str]) -> None:
    """Note the GB that the memory forecast names, of a variant of the update, or of a rollout with the built-in engine."""
    shape, phase = SHAPES[name], "rollout" if variant == "builtin" else "update"
    with TemporaryDirectory() as folder:
        shape.config.save_pretrained(folder)
        config = settings(shape, folder, [*VARIANTS.get(variant, ()), *overrides])
        plan, pretrained = instantiate(config.rollout), instantiate(config.model)
        sizes = Sizes(partial(made, config), pretrained, plan, TransformersEngine(CACHE), lambda: shape.prompt)
        parts = sizes.parts("bf16-mixed" if CUDA else "32-true", 1, device=DEVICE.type)
    held = [part.size for part in at_peak([part for part in parts or () if not part.host], phase)]
    note(forecast_gb=sum(held) / 1e9 if held and None not in held else None)
