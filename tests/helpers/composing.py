"""Compositions of tests in half the time: a file of conf/ is read once, and the parents of nodes are set once, at the end.

`tests/config/test_hydra_speed.py` compares the results with those of Hydra alone.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from omegaconf.base import Box

CONF = str(Path(__file__).parents[2] / "conf")


def kept(load: Callable[..., Any]) -> Callable[..., Any]:
    """A file of conf/ that has not changed since is not read again."""
    read: dict[tuple[str, int], bytes] = {}

    def loaded(self: Any, config_path: str) -> Any:
        file = Path(self.path, self._normalize_file_name(config_path))
        if self.path != CONF or not file.exists():
            return load(self, config_path)
        key = str(file), file.stat().st_mtime_ns
        if key not in read:
            read[key] = pickle.dumps(load(self, config_path))
        return pickle.loads(read[key])

    return loaded


def parents_once(compose: Callable[..., DictConfig]) -> Callable[..., DictConfig]:
    def composed(*given: Any, **named: Any) -> DictConfig:
        each, Box._re_parent = Box._re_parent, lambda self: None
        try:
            config = compose(*given, **named)
        finally:
            Box._re_parent = each
        config._re_parent()
        return config

    return composed


REPLACED = {
    "hydra._internal.core_plugins.file_config_source:FileConfigSource.load_config": kept,
    "hydra._internal.config_loader_impl:ConfigLoaderImpl._compose_config_from_defaults_list": parents_once,
}
