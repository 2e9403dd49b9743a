"""Composes the configuration of a command line from conf/ without running anything."""

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

CONF = Path(__file__).parents[2] / "conf"


def composed(config_name: str, overrides: Sequence[str], return_hydra_config: bool = False) -> DictConfig:
    """Return the configuration of a command line. overrides: its arguments. return_hydra_config: include the node `hydra`."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(config_name, overrides=list(overrides), return_hydra_config=return_hydra_config)


def options(group: str) -> list[str]:
    """Return the options of a group. `base` is not an option: it has the values that the options share."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml") if file.stem != "base")
