"""Rows: their fields, the hashes that name them, and sequences that make rows, pick some of them or spread over them.

Knows nothing of files, which `dataset` reads.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.env.types import Example, Split


def at(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a field in one: `reward_model.ground_truth`. None if there is none."""
    if name in row or "." not in name:
        return row.get(name)
    column, _, rest = name.partition(".")
    inner = row.get(column)
    return at(inner, rest) if isinstance(inner, Mapping) else None


def head(name: str, columns: Iterable[str] = ()) -> str:
    """Return the column of a dotted name: its first part, or the whole name if that is one of the columns."""
    return name if name in columns else name.partition(".")[0]


def brief(value: Any) -> str:
    """Return a text for a value that JSON cannot hold: that of bytes, as of a picture, has 16 digits of their SHA-256."""
    return f"<{hashlib.sha256(value).hexdigest()[:16]}>" if isinstance(value, bytes) else str(value)


def key_of(question: Any) -> int:
    """Return a hash of a question, the same for equal questions, of 64 bits: a million of them take little memory."""
    # not hash(): Python's hash of a text differs from process to process
    text = question if isinstance(question, str) else json.dumps(question, sort_keys=True, default=brief)
    return int.from_bytes(hashlib.sha256(" ".join(text.split()).encode()).digest()[:8], "big")


def point_of(question: Any) -> float:
    """Return the point between 0 and 1 at which a question's hash lies."""
    return key_of(question) / 2**64


def side(question: Any, held_out: Mapping[str, float]) -> Split:
    """Return the split that a question belongs to. A stable hash of its text decides, whatever other rows there are.

    held_out: the shares of validation and test; train has the rest.
    """
    place = point_of(question)
    for split in ("test", "validation"):
        if place < (share := held_out.get(split, 0.0)):
            return split
        place -= share
    return "train"


def fingerprint(example: Example) -> str:
    """Return 12 hex digits that an example has in every run: a hash of its columns, in any order."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(name): plain(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted(json.dumps(plain(item), sort_keys=True) for item in value)
        if value is None or isinstance(value, (str, int, float)):
            return value
        if hasattr(value, "__dict__"):  # its repr may contain its address
            return plain(vars(value))
        return brief(value)

    return hashlib.sha256(json.dumps(plain(example), sort_keys=True).encode()).hexdigest()[:12]


def fingerprint_of_all(examples: Sequence[Example], looks: int = 1000) -> str:
    """Return the fingerprint of a split, from its size and at most `looks` of its examples, spread evenly."""
    seen = [fingerprint(example) for example in spread(examples, looks)]
    return fingerprint({"rows": len(examples), "examples": seen})


@dataclass(frozen=True)
class Made(Sequence):
    """Rows that are made when they are read, each from its index alone. digest: that of the file behind them, if there is one."""

    size: int
    make: Callable[[int], Example]
    digest: str = ""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        place = range(self.size)[index]  # supports negative indices, and raises IndexError at the end
        return [self.make(i) for i in place] if isinstance(place, range) else self.make(place)


def picked(rows: Sequence[Example], places: Sequence[int]) -> Sequence[Example]:
    """Return the rows at these places."""
    return Made(len(places), lambda i: rows[places[i]], getattr(rows, "digest", ""))


def rows_where(test: Callable[[Example], bool], rows: Sequence[Example], columns: Sequence[str]) -> Sequence[Example]:
    """Return the rows that pass the test. columns: those that the test may read; the rows have at least one of them."""
    narrow = rows
    if not isinstance(rows, list):
        narrow = rows.select_columns([name for name in rows.column_names if name in columns])
    return picked(rows, [i for i, row in enumerate(narrow) if test(row)])


def spread(examples: Sequence[Example], most: int) -> list[Example]:
    """Return at most `most` of the examples, spread evenly over all of them."""
    places = range(0, len(examples), math.ceil(len(examples) / most) or 1) if most else ()
    return [examples[i] for i in places]
