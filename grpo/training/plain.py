"""Plain data: values as JSON and tensors. Unlike a pickle, they run no code when they are read.

A value that JSON lacks becomes a dictionary with a key that begins with $: $tuple, $set, $bytes, $items (a dictionary whose keys
are not all texts), $tensor, $array, $file and $picture (the name of a tensor), $is (a record: one of the dataclasses below).
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import sha256
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from grpo.env.pictures import Picture
from grpo.objectives.batch import TokenBatch
from grpo.rollout.rollouts import Rollout
from grpo.rollout.types import Plan
from grpo.system.distributed import local

# Files keep a rollout that was played ahead, its plan, and the rows of a skipped update. These, and the dataclasses that
# their fields may hold, are all that a file may name.
ROOTS = (Plan, Rollout, TokenBatch)
SHORT = 1000  # bytes that stay among the JSON data; more, as of a picture, are kept once
NUMBERS = {bool: {bool}, int: {int, bool}, float: {float, int, bool}}  # what JSON may have of each


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

    def add_bytes(self, data: bytes) -> str:
        """Add bytes, once, as a tensor, and return its name."""
        name = f"file.{sha256(data).hexdigest()}"
        if name not in self:
            self[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return name


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
    if isinstance(value, Picture):
        return {"$picture": tensors.add_bytes(value.data)}
    if isinstance(value, bytes) and len(value) > SHORT:
        return {"$file": tensors.add_bytes(value)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Sequence | set | frozenset):
        inside = [to_plain(element, tensors, below(path, i)) for i, element in enumerate(value)]
        kind = "$tuple" if isinstance(value, tuple) else "$set"
        return {kind: inside} if isinstance(value, tuple | set | frozenset) else inside
    if isinstance(value, Mapping):
        inside = {key: to_plain(element, tensors, below(path, key)) for key, element in value.items()}
        if all(isinstance(key, str) and key[:1] != "$" for key in inside):
            return inside
        return {"$items": [[to_plain(key, tensors, path), element] for key, element in inside.items()]}
    if kinds_kept().get(name_of(kind := type(value))) is kind:
        inside = {f.name: to_plain(getattr(value, f.name), tensors, f"{path}.{f.name}") for f in fields(value)}
        return {"$is": name_of(kind), **inside}
    raise TypeError(f"{path} is a {kind.__name__}, not a number, text, list, dictionary or tensor")


def below(path: str, key: Any) -> str:
    """Return the place of an element."""
    return f"{path}.{key}" if path else str(key)


def from_plain(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `to_plain` was given. Other data raise KeyError, ValueError, TypeError or AttributeError.

    Nothing is imported or called that the data choose, but a record's own constructor, with fields of the right types.
    """
    if isinstance(plain, list):
        return [from_plain(element, tensors) for element in plain]
    if not isinstance(plain, dict):
        return plain
    inside = {key: element if key == "$is" else from_plain(element, tensors) for key, element in plain.items()}
    if "$is" in inside:
        return rebuilt(inside.pop("$is"), inside)
    made = {
        "$tensor": lambda name: tensors[name],
        "$array": lambda name: tensors[name].numpy(),
        "$file": lambda name: tensors[name].numpy().tobytes(),
        "$picture": lambda name: Picture(tensors[name].numpy().tobytes()),
        "$bytes": base64.b64decode,
        "$tuple": tuple,
        "$set": set,
        "$items": dict,
    }
    kind, content = next(iter(inside.items()), ("", None))
    return made[kind](content) if kind in made else inside


@cache
def kinds_kept() -> dict[str, type]:
    """Return the dataclasses that a file may name: ROOTS, and those in the annotations of their fields."""
    kinds: dict[str, type] = {}
    new = [*ROOTS]
    while new:
        kind = new.pop()
        if is_dataclass(kind) and name_of(kind) not in kinds:
            kinds[name_of(kind)] = kind
            new += get_type_hints(kind).values()
        new += [part for part in get_args(kind) if part is not ...]
    return kinds


def name_of(kind: type) -> str:
    """Return the dotted path of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def rebuilt(name: str, values: dict[str, Any]) -> Any:
    """Return a record with these fields; the others have their defaults. Raises ValueError for another name, or a wrong type."""
    if not isinstance(name, str) or (kind := kinds_kept().get(name)) is None:
        raise ValueError(f"{name!r} is no record of a checkpoint")
    kinds = get_type_hints(kind)
    if wrong := [field for field, value in values.items() if field in kinds and not fits(kinds[field], value)]:
        raise ValueError(f"{name}.{wrong[0]} has a value of another type")
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})


def fits(kind: Any, value: Any) -> bool:
    """Return whether plain data, or records, fit an annotation. A list stands for any sequence, and nothing for a function."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Any:
        return True
    if origin is Annotated:
        return fits(inner[0], value)
    if origin in (Union, UnionType):
        return any(fits(option, value) for option in inner)
    if origin is Literal:
        return isinstance(value, str | int | None) and value in inner
    if origin in NUMBERS:
        return type(value) in NUMBERS[origin]
    if not isinstance(origin, type):
        return False
    if issubclass(origin, str | bytes) or not issubclass(origin, Sequence | Mapping):
        return isinstance(value, origin)
    if issubclass(origin, Mapping):
        of_key, of_value = inner or (Any, Any)
        return isinstance(value, dict) and all(fits(of_key, k) and fits(of_value, v) for k, v in value.items())
    if not isinstance(value, list | tuple) or not inner:
        return isinstance(value, list | tuple) and not value
    if (kind_inside := inner[0]) in NUMBERS:  # token ids, of which there may be millions
        return set(map(type, value)) <= NUMBERS[kind_inside]
    return all(fits(kind_inside, element) for element in value)
