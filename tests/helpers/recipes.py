"""The recipes of docs/hardware.md on the GPUs that they are for, by the forecast.

PYTHONPATH=.:tests python -m helpers.recipes [MOST]       # prints the table again, up to GPUs of MOST GB
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
from conftest import compose_config
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, Qwen2_5_VLConfig, Qwen2_5_VLTextConfig, Qwen2Config, Qwen3Config

from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Engine
from grpo.engines.room import Room
from grpo.extras.devices.strategy import Strategy
from grpo.extras.forecast.cards import VLLMOnPaper, trainer_on
from grpo.extras.forecast.forecast import forecast
from grpo.extras.forecast.parts import Part, in_phases
from grpo.extras.forecast.sizes import Sizes
from grpo.extras.images.door import sight_of
from grpo.models.policy import with_adapter
from grpo.models.pretrained import Pretrained
from grpo.rollout.types import Plan
from grpo.training.optimization import Optimization
from helpers.models import TOY
from helpers.project import ROOT
from helpers.seeing import TEMPLATE, TOKENS, plain

SHAPES = {  # class, hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "Qwen/Qwen2.5-0.5B-Instruct": (Qwen2Config, 896, 4864, 24, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (Qwen2Config, 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": (Qwen2Config, 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen/Qwen2.5-VL-3B-Instruct": (Qwen2_5_VLTextConfig, 2048, 11008, 36, 16, 2, 151936, True),
    "Qwen/Qwen3-0.6B-Base": (Qwen3Config, 1024, 3072, 28, 16, 8, 151936, True),
    "Qwen/Qwen3-1.7B": (Qwen3Config, 2048, 6144, 28, 16, 8, 151936, True),
    "meta-llama/Llama-3.1-8B-Instruct": (LlamaConfig, 4096, 14336, 32, 32, 8, 128256, False),
}
TOWERS = {  # what reads the pictures of a Qwen2.5-VL: hidden, intermediate, layers, heads
    "Qwen/Qwen2.5-VL-3B-Instruct": (1280, 3420, 32, 16),
}
PROMPT = {"gsm8k": 256, "math": 512, "jsonl": 1536}  # tokens of the longest prompt, of a picture among them
GB = 10**9


@dataclass(frozen=True)
class Recipe:
    """A row of the table. gpus, size: GPUs and the GB of each. name: the second column. cells: the two columns of numbers."""

    gpus: int
    size: int
    name: str
    command: tuple[str, ...]
    cells: tuple[str, str]


def recipes() -> list[Recipe]:
    """Return the rows of the table."""
    found = []
    for line in (ROOT / "docs" / "hardware.md").read_text().splitlines():
        if "`python train.py experiment=" in line:
            size, name, *cells, _ = [cell.strip() for cell in line.strip("|").split("|")]
            *gpus, size = re.findall(r"\d+", size)
            words = re.search(r"train.py ([^`]*)`", line)[1].split()
            found.append(Recipe(int(gpus[0]) if gpus else 1, int(size), name, tuple(words), tuple(cells)))
    return found


def names_engine(recipe: Recipe) -> bool:
    """Return whether a recipe names the built-in engine."""
    return compose_config("output_dir=.", *recipe.command).engine._target_.endswith(TransformersEngine.__name__)


class Noted(VLLMOnPaper):
    """Knows whether it has too little."""

    lacks = False

    def fit(self, room: Room) -> dict[str, int]:
        taken = super().fit(room)
        self.lacks = room.lacks(sum(taken.values()) / room.total)
        return taken


DECIDED: dict[Recipe, Optimization] = {}  # the settings of a recipe, which do not depend on its engine


@dataclass(frozen=True)
class Chosen:
    """The choices of a recipe on its GPU. parts: of memory. again: whether layers are recomputed. size: tokens at once.
    lacks: whether vLLM has too little."""

    parts: list[Part]
    again: bool
    size: int
    lacks: bool


@dataclass(frozen=True)
class Run:
    """The parts of a recipe's run. make: the module, from a model and settings of the optimization. prompt: tokens at most."""

    config: DictConfig
    plan: Plan
    optim: Optimization
    pretrained: Pretrained
    make: Callable[[nn.Module, Optimization], L.LightningModule]
    prompt: int

    def sizes(self, engine: Engine) -> Sizes:
        """Return what its memory depends on."""
        return Sizes(
            lambda model: self.make(model, self.optim), self.pretrained, self.plan, engine, lambda: self.prompt
        )


@contextmanager
def run_of(command: Sequence[str]) -> Iterator[Run]:
    """Yield the run of a command. In this `with` there is a folder with the configuration of its model, without weights."""
    config = compose_config("output_dir=.", *command)
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
        if tower := TOWERS.get(config.model.path):
            seeing(folder, shape, tower)
        else:
            kind(**shape, architectures=[kind.__name__.replace("Config", "ForCausalLM")]).save_pretrained(folder)
        config.model.path = folder
        plan, algorithm, optim, pretrained = map(instantiate, (config.rollout, config.algo, config.optim, config.model))

        def make(model: nn.Module, optim: Optimization) -> L.LightningModule:
            policy = with_adapter(model, instantiate(config.adapter))
            return instantiate(config.module)(policy, algorithm, optim, 1.0, plan.num_rollouts, 0)

        if tower:  # 1,280 places
            sight = sight_of(pretrained)
            sight.expanded([sight.placeholder], [plain(1000, 1000, (9, 9, 9))])
        yield Run(config, plan, optim, pretrained, make, PROMPT[config.task._target_.split(".")[1]])


def seeing(folder: str, text: Mapping[str, Any], tower: Sequence[int]) -> None:
    """Write the configuration of a model that sees, the test's tokenizer, and the settings of its processor, into a folder."""
    names = "hidden_size", "intermediate_size", "depth", "num_heads"
    vision = dict(zip(names, tower, strict=True)) | {"out_hidden_size": text["hidden_size"]}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
    special = with_tokenizer(folder, "<|vision_start|><|image_pad|><|vision_end|>")
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    config = Qwen2_5_VLConfig(text_config={**text, **rope}, vision_config=vision, **special, **tied)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(folder)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    Path(folder, "preprocessor_config.json").write_text(json.dumps(settings))
    Path(folder, "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))


def with_tokenizer(folder: str, shown: str) -> dict[str, int]:
    """Write the tests' tokenizer into a folder, with the tokens of pictures. Returns their ids, by the keys of a config.json."""
    tokenizer = AutoTokenizer.from_pretrained(TOY)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = TEMPLATE.replace("PICTURE", shown)
    tokenizer.save_pretrained(folder)
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
    }
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def chosen(recipe: Recipe, vllm: bool) -> Chosen:
    """Return what `python train.py ... debug=forecast device=...` finds for a recipe, with vLLM or the built-in engine."""
    with run_of(recipe.command) as run:
        engine = Noted(run.config.engine.get("sleeps")) if vllm else TransformersEngine()
        strategy = Strategy("fsdp2") if recipe.gpus > 1 else None
        precision, card = run.config.trainer.precision, "t4" if "T4" in recipe.name else f"{recipe.size}GB"
        trainer, parts = trainer_on(card, precision, recipe.gpus, strategy=strategy), None
        if recipe not in DECIDED:
            DECIDED[recipe], parts = run.sizes(engine).fitted(run.optim, trainer)
        optim = DECIDED[recipe]
        sizes = replace(run, optim=optim).sizes(engine)
        parts = forecast(sizes, trainer, parts, shown=False) or parts or sizes.of_trainer(trainer)
    return Chosen(parts, optim.gradient_checkpointing, optim.max_tokens_per_microbatch, vllm and engine.lacks)


def peaks(parts: list[Part]) -> dict[str, int]:
    """Return the bytes of each phase on the GPU."""
    return in_phases([part for part in parts if not part.host])


def cell(recipe: Recipe, vllm: bool) -> str:
    """Return the two peaks in GB with an engine, the tokens at once if they are not the default of a GPU, and an r if layers are
    recomputed; a dash if the recipe names the other engine."""
    if vllm and names_engine(recipe):
        return "-"
    found = chosen(recipe, vllm)
    numbers = ", ".join(f"{size / GB:.1f}" for size in peaks(found.parts).values())
    return (
        numbers
        + f" {found.size // 1024}k" * (found.size != 8192)
        + " r" * found.again
        + ", too little for vLLM" * found.lacks
    )


if __name__ == "__main__":
    most = float(sys.argv[1]) if len(sys.argv) > 1 else float("inf")
    for recipe in (recipe for recipe in recipes() if recipe.size * recipe.gpus <= most):
        gpus = f"{recipe.gpus} x " * (recipe.gpus > 1)
        numbers = " | ".join(cell(recipe, vllm) for vllm in (False, True))
        command = f"`python train.py {' '.join(recipe.command)}`"
        print(f"| {gpus}{recipe.size} GB | {recipe.name} | {numbers} | {command} |", flush=True)
