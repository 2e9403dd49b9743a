"""Reads JSON files with their numbers as they are written, not rounded, and checks that every row is an object."""

import json
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from grpo.system.errors import UserError

DIGITS = 4000  # of an integer: Python refuses to read a few more than these


def whole(text: str) -> int | str:
    """Return an integer of any size, or its text if it is too long for Python."""
    return int(text) if len(text) <= DIGITS else text


def fraction(text: str) -> float | str:
    """Return a number as a float if that prints as the same number, with at most 17 digits; else the text itself."""
    value = float(text)
    if repr(value) == text or (len(text) <= 15 and "e" not in text.lower()):  # a float has 15 digits at least
        return value
    try:
        same = Decimal(text) in (Decimal(repr(value)), Decimal(f"{value:.17g}"))
    except ArithmeticError:  # an exponent that Decimal does not take
        same = False
    return value if same else text


DECODER = json.JSONDecoder(parse_int=whole, parse_float=fraction)


def value_of(text: str) -> Any:
    """Return the value of a JSON text. Halves of characters, which UTF-8 cannot encode, become question marks."""
    value = DECODER.decode(text)
    if "\\ud" in text or "\\uD" in text:
        value = DECODER.decode(json.dumps(value, ensure_ascii=False).encode(errors="replace").decode())
    return value


def lines_of(file: Path, most: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a file with a JSON object a line, each with the number of its line. most: lines to read; None for all.

    Raises ValueError or UserError for a line that is none; both name the line.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(islice(lines, most), 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, objects(file, f"line {number}", value_of(text))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error.msg}, at character {error.pos + 1}") from None
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number}: {error}: save it as UTF-8") from None
            except RecursionError as error:
                raise ValueError(f"{error}, in line {number}") from None


def whole_file(file: Path) -> list[dict[str, Any]] | None:
    """Return the rows of a file with one JSON list, or with one object; None if it has more, as one a line."""
    try:
        content = value_of(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return None
    rows = content if isinstance(content, list) else [content]
    return [objects(file, f"row {number}", row) for number, row in enumerate(rows, 1)]


def objects(file: Path, where: str, value: Any) -> dict[str, Any]:
    """Return a row. Raises UserError if it is no object."""
    if not isinstance(value, dict):
        needed = 'every row must be an object, such as {"question": "1 + 1?"}'
        raise UserError(f"the dataset file {file}, {where}, is {json.dumps(value)[:40]}: {needed}")
    return value
