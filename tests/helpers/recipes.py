"""The recipes of docs/hardware.md on the GPUs that they are for, by the forecast: PYTHONPATH=.:tests python -m helpers.recipes"""

import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from conftest import compose_config
from hydra.utils import instantiate
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.room import Room
from grpo.extras.preflight.forecast import Part, Sizes, forecast, in_phases
from grpo.models.policy import with_adapter
from grpo.system import memory
from grpo.training.trainer import best_on_gpu
from helpers.project import ROOT

SHAPES = {  # class, hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "Qwen/Qwen2.5-0.5B-Instruct": (Qwen2Config, 896, 4864, 24, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (Qwen2Config, 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": (Qwen2Config, 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen/Qwen3-0.6B-Base": (Qwen3Config, 1024, 3072, 28, 16, 8, 151936, True),
    "Qwen/Qwen3-1.7B": (Qwen3Config, 2048, 6144, 28, 16, 8, 151936, True),
    "meta-llama/Llama-3.1-8B-Instruct": (LlamaConfig, 4096, 14336, 32, 32, 8, 128256, False),
}
PROMPT = {"gsm8k": 256, "math": 512}  # tokens of the longest prompt
GB = 10**9


@dataclass(frozen=True)
class Recipe:
    """A row of the table. gpus, size: GPUs and the GB of each. name: the second column."""

    gpus: int
    size: int
    name: str
    command: tuple[str, ...]


def recipes() -> list[Recipe]:
    """Return the rows of the table."""
    found = []
    for line in (ROOT / "docs" / "hardware.md").read_text().splitlines():
        if "`python train.py experiment=" in line:
            size, name, *_ = [cell.strip() for cell in line.strip("|").split("|")]
            *gpus, size = re.findall(r"\d+", size)
            words = re.search(r"train.py ([^`]*)`", line)[1].split()
            found.append(Recipe(int(gpus[0]) if gpus else 1, int(size), name, tuple(words)))
    return found


def names_engine(recipe: Recipe) -> bool:
    """Return whether a recipe names the built-in engine."""
    return compose_config("output_dir=.", *recipe.command).engine._target_.endswith(TransformersEngine.__name__)


class Vllm:
    """Holds what vLLM would on a GPU, where it chooses itself."""

    apart = True

    def __init__(self, sleeps: bool | None) -> None:
        self.sleeps, self.lacks = sleeps, None

    def fit(self, room: Room) -> dict[str, int]:
        share, sleeps = room.share(self.sleeps)
        self.lacks = room.lacks(share)
        return {"rollout" if sleeps else "": round(share * room.total)}


@contextmanager
def pretended(size: int):
    """Let a GPU have this many bytes."""
    before = memory.total, memory.free, memory.held
    memory.total, memory.free, memory.held = lambda device: size, lambda device: size, lambda device: 0
    try:
        yield
    finally:
        memory.total, memory.free, memory.held = before


def parts_of(recipe: Recipe, vllm: bool) -> tuple[list[Part], bool, bool]:
    """Return the parts of memory of a recipe on its GPU, whether layers are recomputed, and whether vLLM has too little."""
    config = compose_config("output_dir=.", *recipe.command)
    kind, hidden, inner, layers, heads, kv, vocabulary, tied = SHAPES[config.model.path]
    shape = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    shape |= {"num_key_value_heads": kv, "vocab_size": vocabulary, "tie_word_embeddings": tied}
    shape |= {"head_dim": 128} if kind is Qwen3Config else {}
    with tempfile.TemporaryDirectory() as folder:
        kind(**shape, architectures=[kind.__name__.replace("Config", "ForCausalLM")]).save_pretrained(folder)
        config.model.path = folder
        plan, algorithm, optim, pretrained = map(instantiate, (config.rollout, config.algo, config.optim, config.model))

        def module(model) -> torch.nn.Module:
            policy = with_adapter(model, instantiate(config.adapter))
            return instantiate(config.module)(policy, algorithm, optim, 1.0, plan.num_rollouts, 0)

        engine = Vllm(config.engine.get("sleeps")) if vllm else TransformersEngine()
        precision = best_on_gpu((9, 0)) if config.trainer.precision == "auto" else config.trainer.precision
        sharded = {"share": None, "passes": precision} if recipe.gpus > 1 else {}
        strategy = SimpleNamespace(root_device=torch.device("cuda", 0), **sharded)
        trainer = SimpleNamespace(
            strategy=strategy, precision=precision, num_devices=recipe.gpus, world_size=recipe.gpus
        )
        sizes = Sizes(module, pretrained, plan, engine, lambda: PROMPT[config.task._target_.split(".")[1]])
        with pretended(recipe.size * GB):
            optim, parts = sizes.fitted(optim, trainer)
            parts = forecast(sizes, trainer, parts, shown=False) or sizes.of_trainer(trainer)
    return parts, bool(optim.gradient_checkpointing), bool(vllm and engine.lacks)


def peaks(parts: list[Part]) -> dict[str, int]:
    """Return the bytes of each phase on the GPU."""
    return in_phases([part for part in parts if not part.host])


def cell(recipe: Recipe, vllm: bool) -> str:
    """Return the two peaks in GB with an engine, and an r if layers are recomputed; a dash if the recipe names the other one."""
    if vllm and names_engine(recipe):
        return "-"
    parts, again, lacks = parts_of(recipe, vllm)
    numbers = ", ".join(f"{size / GB:.1f}" for size in peaks(parts).values())
    return numbers + " r" * again + ", too little for vLLM" * lacks


if __name__ == "__main__":
    for recipe in recipes():
        gpus = f"{recipe.gpus} x " * (recipe.gpus > 1)
        numbers = " | ".join(cell(recipe, vllm) for vllm in (False, True))
        command = f"`python train.py {' '.join(recipe.command)}`"
        print(f"| {gpus}{recipe.size} GB | {recipe.name} | {numbers} | {command} |", flush=True)
