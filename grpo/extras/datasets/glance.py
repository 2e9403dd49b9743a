"""Looks for columns in a file of rows without reading its rows, which takes a library and its seconds."""

import csv
import json
import mmap
from collections.abc import Callable
from pathlib import Path

from grpo.extras.datasets.json_files import lines_of, whole_file


def not_blank(record: list[str]) -> bool:
    """Return whether a record of a CSV file is one that pandas reads: it passes over lines of nothing but spaces."""
    return len(record) > 1 or "".join(record).strip() != ""


def separator(file: Path) -> str:
    """Return what is between the columns of a CSV file: a semicolon, as spreadsheets write it in many languages, if the first
    line has one and no comma, else a comma."""
    with file.open(newline="", encoding="utf-8-sig") as lines:
        first = next(filter(str.strip, lines), "")
    return ";" if ";" in first and "," not in first else ","


def columns_in(file: Path) -> tuple[list[str], Callable[[str], bool]]:
    """Return the columns of the first row, and a function that tells whether any row may have a column of this name.

    Raises whatever a parser raises for a damaged file.
    """
    if file.suffix == ".parquet":
        from pyarrow.parquet import read_schema

        names = read_schema(file).names
        return names, names.__contains__
    if file.suffix == ".csv":
        with file.open(newline="", encoding="utf-8-sig") as lines:
            names = next(filter(not_blank, csv.reader(lines, delimiter=separator(file))), [])
        return names, names.__contains__
    rows = whole_file(file) if file.suffix == ".json" else None
    first = rows[0] if rows else next(row for _, row in lines_of(file))

    def may_have(name: str) -> bool:
        spellings = {json.dumps(name), json.dumps(name, ensure_ascii=False)}
        with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return any(text.find(spelling.encode()) >= 0 for spelling in spellings) or text.find(b"\\u") >= 0

    return list(first), may_have
