"""Nested settings by dotted key."""

from collections.abc import Mapping
from typing import Any


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    values: dict[str, Any] = {}
    for name, value in node.items():
        key = f"{prefix}{name}"
        values |= flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return values
