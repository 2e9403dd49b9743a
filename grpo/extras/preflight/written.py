"""Reads right answers from the text of a file by other means than `tables` does, to check what `tables` has read."""

import csv
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from grpo.data.rows import at, head, key_of

WORDS = partial(json.loads, parse_int=str, parse_float=str, parse_constant=str)  # numbers stay as they are written


def texts_only(value: Any) -> Any:
    """Return a value whose numbers are left out, because they may have been read wrongly."""
    if isinstance(value, Mapping):
        return {name: texts_only(item) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [texts_only(item) for item in value]
    return value if isinstance(value, str) and exact_number(value) is None else "#"


def exact_number(value: Any) -> Decimal | None:
    """Return the exact number that a value, or its text, is; None if it is none."""
    try:
        return Decimal(str(value))
    except ArithmeticError:
        return None


def golds_in(file: Path, question: str, gold: str, wanted: Collection[Any]) -> dict[int, list[Any]]:
    """Return the right answers that the file has for the wanted questions, by the hash of a question, which may have several.

    question, gold: names of columns, or dotted names of fields. A number comes as its text. Floats of 16 bits are left out,
    because Arrow writes them with digits that they do not have.
    """
    keys = {key_of(texts_only(value)) for value in wanted}
    golds: dict[int, list[Any]] = {}
    for value, answer in pairs(file, question, gold):
        key = key_of(texts_only(value))
        if key in keys:
            golds.setdefault(key, []).append(answer)
    return golds


def pairs(file: Path, question: str, gold: str) -> Iterator[tuple[Any, Any]]:
    """Yield the question and the right answer of every row."""
    if file.suffix == ".parquet":
        yield from of_parquet(file, question, gold)
        return
    with file.open(encoding="utf-8-sig", newline="\n" if file.suffix == ".jsonl" else "") as text:
        rows: Iterable[Mapping[str, Any]]
        if file.suffix == ".csv":
            first = next(filter(str.strip, text), "")
            text.seek(0)
            rows = csv.DictReader(text, delimiter=";" if ";" in first and "," not in first else ",")
        elif file.suffix == ".jsonl":
            rows = map(WORDS, filter(str.strip, text))
        else:
            whole = text.read()
            try:
                rows = WORDS(whole)
            except json.JSONDecodeError:  # an object a line
                rows = map(WORDS, filter(str.strip, whole.split("\n")))
            rows = [rows] if isinstance(rows, Mapping) else rows
        yield from ((at(row, question), at(row, gold)) for row in rows)


def of_parquet(file: Path, question: str, gold: str) -> Iterator[tuple[Any, Any]]:
    """Yield the same as `pairs` from a Parquet file, batch by batch."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    import pyarrow.types as types

    table = pq.ParquetFile(file)
    columns = table.schema_arrow.names
    for batch in table.iter_batches(columns=[head(question, columns), head(gold, columns)]):

        def column(name: str, batch: Any = batch) -> Any:
            """Return the values of a column, numbers as Arrow writes them."""
            if name in columns:
                values = batch.column(name)
            else:
                top, *inner = name.split(".")
                values = pc.struct_field(batch.column(top), inner)
            kind = values.type
            if types.is_float16(kind):
                return []
            as_text = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
            return values.cast("string").to_pylist() if as_text else values.to_pylist()

        yield from zip(column(question), column(gold), strict=False)


def agrees(read: Any, text: Any) -> bool:
    """Return whether what was read is what a file says. text: as `golds_in` gives it."""
    if isinstance(text, (list, tuple)) and len(text) == 1 and not isinstance(read, (list, tuple)):
        return agrees(read, text[0])
    text = text.decode(errors="replace") if isinstance(text, bytes) and not isinstance(read, bytes) else text
    if isinstance(read, Mapping) and isinstance(text, Mapping):
        return all(agrees(read.get(name), text.get(name)) for name in {*read, *text})
    if read == text:
        return True
    if isinstance(read, (list, tuple)) and isinstance(text, (list, tuple)):
        return len(read) == len(text) and all(map(agrees, read, text))
    if isinstance(read, str) or text is None or isinstance(read, bool) or read is None:
        return str(read) == str(text) or (read is None and text == "")
    exact = exact_number(text)
    with_17_digits = isinstance(read, float) and exact_number(f"{read:.17g}")
    return exact is not None and exact in (exact_number(read), with_17_digits)
