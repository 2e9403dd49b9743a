"""Rows of a local file as the file has them: numbers are not rounded, texts stay texts, types are those of the whole file.

`datasets` keeps the rows on disk: a JSON file as its lines, a CSV file as texts. They become values when a row is read.
"""

import csv
import glob
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo.extras.datasets.glance import not_blank, separator
from grpo.extras.datasets.json_files import lines_of, value_of, whole_file
from grpo.extras.datasets.pictures import unread
from grpo.system.errors import UserError

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
MISSING = {"", "na", "n/a", "nan", "none", "null"}  # in a column of a CSV file that is said to hold numbers
LOOKS = 1000  # lines of a stream whose columns are looked at

Make = Callable[[dict[str, Any]], dict[str, Any]]  # from a row of the table to a row of the file


@dataclass(frozen=True, eq=False)
class TableRows(Sequence):
    """Rows of a table of `datasets`; every row has every column, and None where the file has nothing.

    file: where they are, None for the hub; digest: of its bytes. lines: the line of each row of a JSON file; None if row i is in
    line i + 1. by_line: the table holds lines, whose columns cannot be picked before they are read.
    """

    table: Any  # a stream may be a function that starts it
    make: Make
    column_names: tuple[str, ...]
    file: Path | None = None
    digest: str = ""
    lines: Sequence[int] | None = None
    by_line: bool = False

    @property
    def at_once(self) -> int:
        """The rows that are read at once; few with bytes, as of pictures."""
        features = str(self.table.features)
        return 16 if "binary" in features or "Image" in features else 1000

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self.made(self.table[range(len(self))[index]])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not hasattr(self.table, "__len__"):  # a stream
            yield from map(self.made, self.table() if callable(self.table) else self.table)
            return
        for piece in self.table.iter(self.at_once):  # one row at a time is 50 times slower
            rows = zip(*piece.values(), strict=True)
            yield from (self.made(dict(zip(piece, row, strict=True))) for row in rows)

    def made(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row of the file that a row of the table stands for."""
        values = self.make(row)
        return {name: values.get(name) for name in self.column_names}

    def select(self, places: Sequence[int]) -> "TableRows":
        """Return the rows at these places."""
        lines = [self.line(place) for place in places] if self.by_line else None
        return replace(self, table=self.table.select(places), lines=lines)

    def select_columns(self, names: Sequence[str]) -> "TableRows":
        """Return the rows with these columns alone."""
        return replace(
            self,
            table=self.table if self.by_line else self.table.select_columns(list(names)),
            column_names=tuple(names),
        )

    def line(self, place: int) -> int:
        """Return the line, or the number, of a row in its file, from 1."""
        return place + 1 if self.lines is None else self.lines[place]

    def where(self, place: int) -> str:
        """Return the file of a row, and its line or row from 1, for a message."""
        if self.file is None:
            return f"row {place + 1}"
        if self.file.suffix == ".csv":
            return f"{self.file}, line {line_of_csv(self.file, place)}"
        unit = "line" if self.by_line and self.file.suffix == ".jsonl" else "row"
        return f"{self.file}, {unit} {self.line(place)}"


def read_file(file: Path, streaming: bool = False, numbers: Sequence[str] = ()) -> TableRows:
    """Return the rows of a file. numbers: see `Dataset`. Raises UserError, or whatever a parser raises, for a damaged file."""
    if file.suffix not in KINDS:
        raise UserError(f"task.path={file} is not a dataset file: {', '.join(KINDS)} are read")
    if not file.is_file():
        raise UserError(f"the dataset file {file} is a folder, a pipe, a device or a broken link: give a file")
    if file.stat().st_size == 0:
        raise UserError(f"the dataset file {file} is empty")
    kind = KINDS[file.suffix]
    if numbers and kind != "csv":
        raise UserError(f"task.numbers={list(numbers)} is for CSV files: {file} has types of its own")
    readers = {"json": json_rows, "csv": partial(csv_rows, numbers=numbers), "parquet": parquet_rows}
    rows = readers[kind](file, streaming)
    if streaming:
        return rows
    with file.open("rb") as content:
        return replace(rows, digest=hashlib.file_digest(content, "sha256").hexdigest()[:16])


def from_datasets(*source: str | None, **options: Any) -> Any:
    """Return a table of `datasets`, without its bars. source, options: of `load_dataset`."""
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    return load_dataset(*source, **options)


def loaded(kind: str, file: Path, streaming: bool, **more: Any) -> Any:
    """Return the table of a file by a reader of `datasets`."""
    name = glob.escape(str(file))  # it may have * or [
    return from_datasets(kind, data_files=name, split="train", streaming=streaming, **more)


def json_rows(file: Path, streaming: bool) -> TableRows:
    """Return the rows of a JSON file. Every line is read once, for its columns and its faults; a stream's first ones are."""
    from datasets import Dataset

    # lines, not the JSON reader of `datasets`, which rounds long numbers
    rows = whole_file(file) if file.suffix == ".json" else None
    if rows is not None:
        names = dict.fromkeys(name for row in rows for name in row)
        lines = [json.dumps(row) for row in rows]
        return TableRows(Dataset.from_dict({"text": lines}), of_line, tuple(names), file, by_line=True)
    names, places = {}, array("q")
    for place, row in lines_of(file, LOOKS if streaming else None):
        names |= dict.fromkeys(row)
        places.append(place)
    if not names:
        raise UserError(f"the dataset file {file} is empty")
    if streaming:
        return TableRows(lambda: (row for _, row in lines_of(file)), dict, tuple(names), file, by_line=True)
    table = loaded("text", file, streaming, encoding="utf-8-sig")
    if blank := len(table) > len(places):
        table = table.select([place - 1 for place in places])
    return TableRows(table, of_line, tuple(names), file, lines=places if blank else None, by_line=True)


def of_line(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the row that a line holds."""
    values: dict[str, Any] = value_of(row["text"])
    return values


def csv_rows(file: Path, streaming: bool, numbers: Sequence[str] = ()) -> TableRows:
    """Return the rows of a CSV file. A column gets integers, floats or booleans if Python writes every one of its texts so, else
    it keeps its texts. In a stream every column keeps them, since the rows to come are unknown."""
    import pandas as pd
    from datasets import Features, Value

    with file.open("rb") as lines:
        for line, content in enumerate(lines, 1):
            try:
                content.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{error}, in line {line}: save it as UTF-8") from None
    sep = separator(file)
    names = pd.read_csv(file, sep=sep, nrows=0, index_col=False, dtype=object).columns
    if missing := [name for name in numbers if name not in names]:
        raise UserError(f"task.numbers={list(numbers)}: {file} has no column {missing[0]!r}; it has {', '.join(names)}")
    features = Features({name: Value("string") for name in names})
    # index_col: else a long first row shifts the columns; na_filter: NA and null are texts
    options = {"index_col": False, "na_filter": False}
    table = loaded("csv", file, streaming, features=features, sep=sep, **options)
    kinds: dict[str, Callable[[str], Any]] = dict.fromkeys(names, str)
    if not streaming:
        kinds = {name: written_as(table.data.column(name).chunks) for name in names}
    kinds |= dict.fromkeys(numbers, number_of)

    def make(row: dict[str, str]) -> dict[str, Any]:
        return {name: kinds[name](text) if text else None for name, text in row.items()}

    rows = TableRows(table, make, tuple(names), file)
    checked = () if streaming else numbers
    for name in checked:
        for place, row in enumerate(table.select_columns([name])):
            try:
                number_of(row[name] or "")
            except ValueError:
                fix = "correct it, or take the column out of task.numbers"
                raise UserError(f"{rows.where(place)}, column {name!r}: {row[name]!r} is no number; {fix}") from None
    return rows


def written_as(chunks: Iterable[Any]) -> Callable[[str], Any]:
    """Return the type whose values are written as all the texts of a column, blank ones apart; str if no other is."""
    kinds: list[Callable[[str], Any]] = [int, float, truth]
    for chunk in chunks:
        for text in filter(None, chunk.unique().to_pylist()):
            kinds = [kind for kind in kinds if is_written(text, kind)]
            if not kinds:
                return str
    return kinds[0]


def is_written(text: str, kind: Callable[[str], Any]) -> bool:
    """Return whether a value of this type prints as this text."""
    try:
        return str(kind(text)) == text and text.lstrip("-") not in ("nan", "inf")
    except (ValueError, KeyError):
        return False


def truth(text: str) -> bool:
    """Return the value of True or False as Python writes them. Raises KeyError for another text."""
    return {"True": True, "False": False}[text]


def number_of(text: str) -> int | float | None:
    """Return the number that a text writes; None if the text means that there is none, as NA. Raises ValueError for any other."""
    if text.strip().lower() in MISSING:
        return None
    try:
        return int(text)
    except ValueError:
        return float(text)


def line_of_csv(file: Path, place: int) -> int:
    """Return the line in which a row of a CSV file begins, from 1."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader, end = csv.reader(lines, delimiter=separator(file)), 0  # end: the line in which the last record ended
        row = -1  # the header is the first record
        for record in reader:
            if not_blank(record):
                if row == place:
                    return end + 1
                row += 1
            end = reader.line_num
    return end


def parquet_rows(file: Path, streaming: bool) -> TableRows:
    """Return the rows of a Parquet file."""
    import pyarrow.parquet as pq

    names = pq.read_schema(file).names
    return arrow_rows(loaded("parquet", file, streaming), tuple(names), file)


def arrow_rows(table: Any, names: tuple[str, ...] | None = None, file: Path | None = None) -> TableRows:
    """Return the rows of a table of `datasets` with types of its own, and pictures as they are stored. names: its columns, if a
    stream does not know them."""
    table = unread(table)
    schema = table.features.arrow_schema if table.features else ()
    names = names or tuple(table.column_names or next(iter(table), ()))
    return TableRows(table, exact_fields(schema) or dict, names, file)


def exact_fields(fields: Iterable[Any]) -> Make | None:
    """Return the function that makes the fields of a row, or of a struct, `exact`; None if they all are."""
    makers = {field.name: exact(field.type) for field in fields}
    makers = {name: maker for name, maker in makers.items() if maker}

    def make(row: dict[str, Any]) -> dict[str, Any]:
        return row | {name: maker(row[name]) for name, maker in makers.items() if row.get(name) is not None}

    return make if makers else None


def exact(kind: Any) -> Callable[[Any], Any] | None:
    """Return the function from a value of an Arrow type to the value that was written; None if they are the same. A float of 16
    or 32 bits becomes the shortest number that rounds to it, and bytes become a text if they are one."""
    import pyarrow.types as types

    if types.is_float32(kind) or types.is_float16(kind):
        import numpy as np  # here, because every program imports this module

        of = np.float32 if types.is_float32(kind) else np.float16
        return lambda value: float(str(of(value)))
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return text_of_bytes
    if types.is_dictionary(kind):
        return exact(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = exact(kind.value_type)
        if inner is None:
            return None
        return lambda values: [None if value is None else inner(value) for value in values]
    return exact_fields(kind) if types.is_struct(kind) else None


def text_of_bytes(value: bytes) -> str | bytes:
    """Return the text that bytes are in UTF-8, or the bytes if they are none."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
