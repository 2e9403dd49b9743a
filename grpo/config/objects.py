"""Objects of a Python program that take the place of what a configuration would build."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from grpo.system.errors import UserError

if TYPE_CHECKING:  # `import grpo` needs no torch
    from grpo.models.pretrained import Pretrained

OBJECTS: dict[str, Any] = {}  # those of the present call, by key


def placed(config: DictConfig, objects: Mapping[str, Any], new: Mapping[str, Any] | None = None) -> DictConfig:
    """Return the configuration with a node for each object. new: those that have no node yet; None for all."""
    OBJECTS.clear()
    OBJECTS.update(objects)
    for key, value in (objects if new is None else new).items():
        if key == "model":
            config.model._target_ = f"{__name__}.model_given"
        elif key != "tokenizer":
            kind = value if hasattr(value, "__qualname__") else type(value)
            node = {"_target_": f"{__name__}.given", "key": key, "type": f"{kind.__module__}.{kind.__qualname__}"}
            OmegaConf.update(config, key, node, merge=False, force_add=True)
    return config


def given(key: str, type: str) -> Any:
    """Return the object that `grpo.train` or `grpo.evaluate` was given. Raises UserError in another program, which lacks it."""
    if key not in OBJECTS:
        raise UserError(f"{key} was an object of a Python program ({type}): give it again to train or evaluate")
    return OBJECTS[key]


def model_given(path: str, **settings: Any) -> "Pretrained":
    """Return the model that a call was given; where there is none, or for another path, the model in that folder."""
    from grpo.config.in_memory import InMemory  # imports torch
    from grpo.models.pretrained import Pretrained

    model = OBJECTS.get("model")
    if model is None or model.name_or_path != path:
        return Pretrained(path, **settings)
    return InMemory(path, **settings, given=model, given_tokenizer=OBJECTS["tokenizer"])
