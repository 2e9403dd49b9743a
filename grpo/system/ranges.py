"""The types and ranges of settings, written as annotations, and the check of a value against its annotation.

    def engine(concurrency: Count = 256, timeout: Seconds = 600.0, sync: Literal["disk", "lora"] = "disk"): ...

Values are not converted: "3", 3.0 and true are not integers. NaN and infinity are not numbers.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from grpo.system.errors import UserError

T = TypeVar("T", bound=Callable)


@dataclass(frozen=True)
class Range:
    """The numbers from low to high. above, below: without low, without high. why: the end of the error message."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    why: str = ""

    def __contains__(self, value: float) -> bool:
        over = value > self.low if self.above else value >= self.low
        return over and (value < self.high if self.below else value <= self.high)

    def words(self, least: str, above: str, most: str, below: str) -> str:
        """Return the bounds, each after its word."""
        low = f"{above if self.above else least} {self.low}" if self.low > -math.inf else ""
        high = f"{below if self.below else most} {self.high}" if self.high < math.inf else ""
        return " and ".join(filter(None, (low, high))) if self.low < self.high else str(self.low)


class Node:
    """The annotation of a part that is built by its own `_target_`."""


class FunctionName:
    """The annotation of a function, or of its name: FILE.py:NAME, or a dotted path."""


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Port = Annotated[int, Range(0, 65535)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Seconds = Annotated[float, Range(0, 10**9, above=True)]
Share = Annotated[float, Range(0, 1)]
SomeShare = Annotated[float, Range(0, 1, above=True)]
ShareBelow1 = Annotated[float, Range(0, 1, below=True)]

LISTS, MAPPINGS = (list, tuple, Sequence, Iterable), (dict, Mapping)
NOUNS = {
    bool: "true or false", int: "an integer", float: "a number", str: "a text", NoneType: "null", Any: "a value",
    Node: "a mapping with a _target_", Callable: "a mapping with a _target_",
    FunctionName: "a function of yours, FILE.py:NAME or a dotted path",
}  # fmt: skip


def is_node(value: Any) -> bool:
    """Return whether a value of the configuration is built by a `_target_` of its own."""
    return isinstance(value, Mapping) and "_target_" in value


def is_list(value: Any) -> bool:
    """Return whether a value is a list, a tuple or the like; a text is not."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def members(kind: Any) -> tuple:
    """Return the parts of a union; another annotation alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def accepts(kind: Any, value: Any) -> bool:
    """Return whether a value fits an annotation. Classes other than those of YAML, and nodes, always fit."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if is_node(value) or origin is Node:
        return is_node(value)
    if origin is Annotated:
        bounds = [part for part in inner[1:] if isinstance(part, Range)]
        return accepts(inner[0], value) and all(value in part for part in bounds)
    if origin in (Union, UnionType):
        return any(accepts(member, value) for member in inner)
    if origin is Literal:
        # in Python True == 1
        return any(type(value) is type(word) and value == word for word in inner)
    if origin is FunctionName:
        named = isinstance(value, str) and re.search(r"\.py:\w+$|^[^\W\d]\w*(\.\w+)+$", value)
        return callable(value) or bool(named)
    if origin is Callable:
        return callable(value)
    if origin in (int, float):
        real = isinstance(value, Integral if origin is int else Real) and not isinstance(value, bool)
        return real and math.isfinite(value)
    if origin in (bool, str, NoneType):
        return isinstance(value, (str, PathLike) if origin is str else origin)
    if origin in LISTS:
        if not is_list(value) or not inner:
            return is_list(value)
        fixed = origin is tuple and ... not in inner
        kinds = inner if fixed else inner[:1] * len(value)
        return len(kinds) == len(value) and all(map(accepts, kinds, value))
    if origin in MAPPINGS:
        if not isinstance(value, Mapping):
            return False
        kinds = inner * len(value)  # key, value, key, value, ...
        return all(map(accepts, kinds, chain(*value.items())))
    return True


def spelled(kind: Any) -> str:
    """Return an annotation in words, for `must be ...`."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        bounds = next((part for part in inner if isinstance(part, Range)), Range())
        text = bounds.words("of at least", "above", "at most", "below")
        return (text if bounds.low == bounds.high else f"{spelled(inner[0])} {text}".strip()) + bounds.why
    if origin in (Union, UnionType):
        several = " or ".join(dict.fromkeys(spelled(member) for member in inner if member is not NoneType))
        return f"{several}, or null" if NoneType in inner else several
    if origin is Literal:
        return f"{'one of ' if len(inner) > 1 else ''}{', '.join(map(as_yaml, inner))}"
    if origin is tuple and inner and ... not in inner:
        return f"a list of {len(inner)}, each {spelled(inner[0])}"
    if origin in LISTS or origin in MAPPINGS:
        noun, parts = ("a list", ("item",)) if origin in LISTS else ("a mapping", ("key", "value"))
        typed = zip(parts, inner, strict=False)
        limits = [f"each {part} {spelled(annotation)}" for part, annotation in typed if annotation not in (Any, str)]
        return ", ".join([noun, *limits])
    return NOUNS.get(origin, "a value")


def as_yaml(value: Any) -> str:
    """Return a value in one line, as YAML writes it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_yaml(item)}' for key, item in value.items())}}}"
    if is_list(value):
        return f"[{', '.join(map(as_yaml, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), " ".join(str(value).split()))


def require(key: str, value: Any, kind: Any) -> None:
    """Raises UserError if a value does not fit its annotation. key: its dotted key."""
    if not accepts(kind, value):
        only_words = all(get_origin(member) is Literal for member in members(kind) if member is not NoneType)
        line = f"{'is not' if only_words else 'must be'} {spelled(kind)}"
        if isinstance(value, Real) and accepts(kind, str(value)):
            line += f"; as a text: {key}=\"'{value}'\""
        raise UserError(f"{key}={as_yaml(value)[:200]} {line}")


def enforced(prefix: str) -> Callable[[T], T]:
    """Decorate a function, or a class, so that each call checks its arguments by their annotations. prefix: of their keys."""

    def decorate(called: T) -> T:
        function = called.__init__ if isinstance(called, type) else called
        kinds, signature = function.__annotations__, inspect.signature(function)

        @wraps(function)
        def call(*args, **kwargs):
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                require(f"{prefix}.{name}".lstrip("."), value, kinds.get(name, Any))
            return function(*args, **kwargs)

        if not isinstance(called, type):
            return call
        called.__init__ = call
        return called

    return decorate


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    values: dict[str, Any] = {}
    for name, value in node.items():
        key = f"{prefix}{name}"
        values |= flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return values
