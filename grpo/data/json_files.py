"""Checks that a JSON file holds objects: Arrow's reader crashes on other values, and names no line."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from grpo.system.errors import UserError


def check_objects(file: Path, most: int | None = None) -> None:
    """Raises ValueError with the line or row that is no JSON object. most: lines of a jsonl file to check; None for all."""
    found = None
    for found, value in _values(file, most):
        if not isinstance(value, dict):
            needed = 'every row must be an object, such as {"question": "1 + 1?"}'
            raise UserError(f"the dataset file {file}, {found}, is {json.dumps(value)[:40]}: {needed}")
    if not found:
        raise UserError(f"the dataset file {file} is empty")


def _values(file: Path, most: int | None) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8-sig", newline="\n") as lines:
        if file.suffix == ".json":  # one list or object, or lines as in a jsonl file
            try:
                whole = json.load(lines)
                rows = whole if isinstance(whole, list) else [whole]
                return (yield from ((f"row {number}", row) for number, row in enumerate(rows, 1)))
            except json.JSONDecodeError as error:
                if error.msg != "Extra data":
                    raise
            lines.seek(0)
        for number, line in enumerate(islice(lines, most), 1):
            try:
                if line.strip():
                    yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error.msg}, at character {error.pos + 1}") from None
