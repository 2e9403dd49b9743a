"""The forecast for a card that is not here. Door: `device=rtx4090`, or `device=24GB`, with `debug=forecast`.

Trainer and engine are stand-ins that know what the card has. Settings, parts of memory and limits are those of a run.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

from grpo.engines.vllm.engine import VLLMEngine
from grpo.engines.vllm.settings import GPU_SHARE
from grpo.extras.forecast.limits import FLEX_FROM
from grpo.system import memory
from grpo.system.errors import UserError
from grpo.training.trainer import BFLOAT16, best_on_gpu

log = logging.getLogger(__name__)

GB = 10**9
CARDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Card:
    """A GPU. size: its bytes. capability: its compute capability; None: unknown, and taken for one with bfloat16."""

    name: str
    size: int
    capability: tuple[int, int] | None = None


def letters_of(name: str) -> str:
    """Return the letters and digits of a card's name, without those of its maker, its series and the unit GB."""
    return re.sub(r"nvidia|geforce|tesla|rtx|gb$|[^a-z0-9]", "", name.lower())


def card_named(name: str) -> Card:
    """Return the card with this name, as RTX 4090 or rtx4090, or one of a size, as 24GB. Raises UserError."""
    for known, (size, capability) in CARDS.items():
        if letters_of(known) == letters_of(name):
            return Card(known, round(size * GB), tuple(capability))
    if (size := re.fullmatch(r"(\d+(?:\.\d+)?) ?gb", name.strip().lower())) and float(size[1]) > 0:
        return Card(f"a GPU of {size[1]} GB", round(float(size[1]) * GB))
    listed = ", ".join(known.lower().replace("rtx ", "rtx").replace(" ", "-") for known in CARDS)
    raise UserError(f"device={name} is no card that the forecast knows: give one of {listed}, or its memory, as 24GB")


def on_paper(config: DictConfig) -> None:
    """Let a configuration have the stand-ins of a trainer on the card `device`, and of vLLM there. Raises UserError."""
    card_named(config.device)
    if config.forecast != "only":
        line = f"device={config.device} describes a card for a forecast: add debug=forecast"
        raise UserError(f"{line}, or leave device out: a run takes the GPU that is here")
    *_, kind = str(OmegaConf.select(config, "engine._target_")).split(".")
    with open_dict(config):
        config.trainer._target_, config.trainer.card = f"{__name__}.{trainer_on.__name__}", config.device
        if kind in STAND_INS:
            names = {"sleeps": "sleeps", "share": "args.gpu_memory_utilization", "cache": "args.kv_cache_memory_bytes"}
            given = {name: OmegaConf.select(config, f"engine.{key}") for name, key in names.items()}
            config.engine = {"_target_": f"{__name__}.{STAND_INS[kind]}", **given}


def trainer_on(
    card: str,
    precision: str = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    strategy: Any = None,
    needs: Callable[[str, int, str], int] = lambda precision, ranks, device: 0,
    **_: Any,
) -> SimpleNamespace:
    """Return what the forecast reads of a Trainer on such cards, and log what follows from the card alone. The arguments are
    those of `make_trainer`."""
    found, ranks = card_named(card), devices * num_nodes
    capability = found.capability or BFLOAT16
    if precision == "auto":
        precision = best_on_gpu(capability)
    numbers = "unknown, taken for 8.0 or newer" if found.capability is None else "{}.{}".format(*capability)
    has = "has" if capability >= BFLOAT16 else "lacks"
    log.info("%s: %.1f GB, compute capability %s", found.name, found.size / GB, numbers)
    log.info("trainer.precision=%s: the card %s bfloat16, which needs compute capability 8.0", precision, has)
    if capability < FLEX_FROM:
        log.info(
            "attention: sdpa, since FlexAttention's kernels want more shared memory than this card has; head: compiled"
        )
    else:
        log.info("attention: FlexAttention, head: compiled; the run tries both, and says so if one fails")
    sharded = False
    if ranks > 1 and hasattr(strategy, "chosen"):
        wanted = partial(needs, precision, ranks, "cuda")
        sharded = strategy.chosen(wanted, memory.with_slack(found.size)).kind == "fsdp2"
    of_shards = {"share": None, "passes": precision} if sharded else {}
    of_lightning = "32-true" if sharded or precision == "16-true" else precision
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0), **of_shards)
    return SimpleNamespace(card=found, strategy=strategy, precision=of_lightning, num_devices=devices, world_size=ranks)


class VLLMOnPaper(VLLMEngine):
    """Stands for vLLM where it is not: it only chooses what it takes. share: of the GPU; cache: bytes of its KV cache; None for
    both: what the run leaves."""

    def __init__(self, sleeps: bool | None = None, share: float | None = None, cache: int | None = None) -> None:
        self.sleeps, self._given_sleeps, self._fits = bool(sleeps), sleeps, share is None and cache is None
        self._new = partial(dict, gpu_memory_utilization=share or GPU_SHARE, kv_cache_memory_bytes=cache)
        self.version = None


class SharedOnPaper(VLLMOnPaper):
    """The same for vLLM with the policy's own weights."""

    apart = False
    shared_bytes = 0


STAND_INS = {"auto_engine": "VLLMOnPaper", "VLLMEngine": "VLLMOnPaper", "VLLMSharedEngine": "SharedOnPaper"}
