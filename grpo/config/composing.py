"""Composes the configuration of a command line from conf/ without running anything."""

import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from grpo.config.hydra_speed import REPLACED, hasten
from grpo.config.moved import new_name
from grpo.system.ranges import flat
from grpo.system.root import ROOT

hasten(REPLACED)

CONF = ROOT / "conf"


def composed(config_name: str, overrides: Sequence[str], return_hydra_config: bool = False) -> DictConfig:
    """Return the configuration of a command line. overrides: its arguments. return_hydra_config: include the node `hydra`."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(config_name, overrides=list(overrides), return_hydra_config=return_hydra_config)
        return with_new_names(config)


def with_new_names(config: DictConfig) -> DictConfig:
    """Replace the old names of what has moved, so that an object has one name for those who compare names."""
    for key, value in flat(OmegaConf.to_container(config, resolve=False)).items():
        if isinstance(value, str) and (new := new_name(value)) != value:
            OmegaConf.update(config, key, new)
    return config


def options(group: str) -> list[str]:
    """Return the options of a group. `base` is not an option: it has the values that the options share."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml") if file.stem != "base")


def literal(value: Any) -> str:
    """Return a value in Hydra's grammar. A Path is quoted only if it must be."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, Mapping):
        pairs = [(re.sub(r"([^\w./$%*@?|+-])", r"\\\1", str(name)), literal(inner)) for name, inner in value.items()]
        return f"{{{','.join(f'{name}:{inner}' for name, inner in pairs)}}}"
    if isinstance(value, PathLike) and re.fullmatch(r"[\w.-]*/[\w./-]+", str(value), re.ASCII):
        return str(value)
    if isinstance(value, str | PathLike):
        return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(value)) + "'"
    return "null" if value is None else str(value).lower()
