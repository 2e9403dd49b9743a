"""Plain data: values as JSON and tensors. Unlike a pickle, they run no code when they are read.

A value that JSON lacks becomes a dictionary with a key that begins with $: $tuple, $set, $bytes, $items (a dictionary whose keys
are not all texts), $tensor and $array (the name of a tensor), $is (a dataclass of this project).
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo.system.distributed import local


class Tensors(dict[str, Tensor]):
    """Tensors by name, for a file that has neither strides nor shared storage."""

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[tuple, str] = {}  # the names of those that are there
        self.storages: set[int] = set()

    def add(self, tensor: Tensor, name: str) -> str:
        """Add a tensor, and return its name: the earlier one if it is there already, as tied weights are."""
        here = local(tensor)
        storage = here.untyped_storage().data_ptr() if here.numel() else id(tensor)
        view = storage, here.storage_offset(), here.shape, here.stride(), here.dtype
        if view not in self.views:
            copied = storage in self.storages
            self[name] = tensor.clone(memory_format=torch.contiguous_format) if copied else tensor.contiguous()
            self.views[view] = name
            self.storages.add(storage)
        return self.views[view]


def to_plain(value: Any, tensors: Tensors, path: str = "") -> Any:
    """Return a value as JSON data, and add its tensors to `tensors`. path: its place, which names them.

    Raises TypeError for an object that is no plain data.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {"$tensor": tensors.add(value.detach(), path)}
    if isinstance(value, np.ndarray):
        return {"$array": tensors.add(torch.from_numpy(value), path)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Sequence | set | frozenset):
        inside = [to_plain(each, tensors, f"{path}.{i}" if path else str(i)) for i, each in enumerate(value)]
        kind = "$tuple" if isinstance(value, tuple) else "$set"
        return {kind: inside} if isinstance(value, tuple | set | frozenset) else inside
    if isinstance(value, Mapping):
        inside = {key: to_plain(each, tensors, f"{path}.{key}" if path else str(key)) for key, each in value.items()}
        if all(isinstance(key, str) and key[:1] != "$" for key in inside):
            return inside
        return {"$items": [[to_plain(key, tensors, path), each] for key, each in inside.items()]}
    if is_dataclass(kind := type(value)) and kind.__module__.startswith("grpo."):
        inside = {f.name: to_plain(getattr(value, f.name), tensors, f"{path}.{f.name}") for f in fields(value)}
        return {"$is": f"{kind.__module__}.{kind.__qualname__}", **inside}
    raise TypeError(f"{path} is a {kind.__name__}, not a number, text, list, dictionary or tensor")


def from_plain(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `to_plain` was given. Other data raise KeyError, ValueError, TypeError or AttributeError."""
    if isinstance(plain, list):
        return [from_plain(each, tensors) for each in plain]
    if not isinstance(plain, dict):
        return plain
    inside = {key: each if key == "$is" else from_plain(each, tensors) for key, each in plain.items()}
    if "$is" in inside:
        kind = dataclass_named(inside.pop("$is"))
        return kind(**{name: inside[name] for name in kind.__dataclass_fields__ if name in inside})
    made = {
        "$tensor": lambda name: tensors[name],
        "$array": lambda name: tensors[name].numpy(),
        "$bytes": base64.b64decode,
        "$tuple": tuple,
        "$set": set,
        "$items": dict,
    }
    kind, content = next(iter(inside.items()), ("", None))
    return made[kind](content) if kind in made else inside


def dataclass_named(name: str) -> type:
    """Return a dataclass of this project. Raises ValueError for any other name."""
    module, _, kind = name.rpartition(".")
    if module.startswith("grpo.") and is_dataclass(found := getattr(import_module(module), kind)):
        return found
    raise ValueError(f"{name} is no dataclass of this project")
