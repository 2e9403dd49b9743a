"""Rows of a dataset (a hub id, a folder or a file), filtered, and split so that no question is in two splits.

Knows nothing of what the columns mean, except that the first column a task needs is the question.
"""

import contextlib
import logging
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from grpo.data.rows import at, head, key_of, point_of, side
from grpo.env.types import Example, Split
from grpo.extras.datasets.tables import KINDS, TableRows, arrow_rows, from_datasets, read_file
from grpo.system.errors import MissingRows, UserError
from grpo.system.ranges import Count, Share, enforced

log = logging.getLogger(__name__)

SPLITS = get_args(Split)
Filter = Literal["empty", "duplicate"]
FILTERS = get_args(Filter)
FEW = 20  # rows to hold out: of more, hashes leave none in one case of 500 million


class Dataset:
    """The rows of a task, by split, each read once.

    path: a local folder or file (jsonl, json, parquet, csv), else a dataset on the hub with its `config`.
    columns: columns that every row must have, the question first, maybe by dotted names (`at`). name: picks the file in a folder
    with several datasets.
    splits: from our names (train, validation, test) to the source's; None or absent if the source, such as a file, lacks one.
    held_out: for a split that the source lacks, the share of train rows that it takes, such as {validation: 0.1}, chosen by a
    hash of the question; test has at least one row of two. A row of a test or validation split is never trained on, even if it is
    in train too.
    filters: `empty` removes rows in which a column is missing or blank, `duplicate` rows whose question came before. The log
    counts removed rows. limits: numbers of rows, after filtering. streaming: read only as much of a hub dataset as they need.
    numbers: columns of a CSV file that hold numbers; NA, nan, null, None and blanks are then None. form: called with every
    question; it raises UserError for one that cannot be asked. demonstration: the column with an answer to learn from.
    pictures: tells which column has pictures, that belong to the question (see `RowPictures`).
    """

    @enforced("task")
    def __init__(
        self,
        path: str,
        columns: Sequence[str],
        name: str = "",
        config: str | None = None,
        splits: Mapping[Split, str | None] | None = None,
        held_out: Mapping[Literal["validation", "test"], Share] | None = None,
        filters: Sequence[Filter] = FILTERS,
        train_limit: Count | None = None,
        validation_limit: Count | None = None,
        test_limit: Count | None = None,
        streaming: bool = False,
        numbers: Sequence[str] = (),
        form: Callable[[Any], Any] | None = None,
        demonstration: str | None = None,
        pictures: Any = None,
    ) -> None:
        self.path, self.columns, self.name, self.config = path, tuple(columns), name, config
        self.local = Path(path).expanduser()
        named = splits if splits is not None else {"train": "train", "test": "test"}
        self.splits = {split: source for split, source in named.items() if source is not None}
        self.held_out = {split: float(share) for split, share in (held_out or {}).items() if share}
        self.filters, self.streaming = tuple(filters), streaming
        self.numbers, self.form, self.demonstration_column = tuple(numbers), form, demonstration
        self.pictures = pictures
        self.limits = {"train": train_limit, "validation": validation_limit, "test": test_limit}
        self.sources: dict[Split, TableRows] = {}
        self.read: dict[Split, Sequence[Example]] = {}
        if sum(self.held_out.values()) >= 1:
            raise UserError(f"task.held_out={self.held_out} must be shares of the rows that leave some to train on")
        for split in list(self.held_out):  # the source's own rows take precedence
            lacks_file = self.local.is_dir() and not _files(self.local, self.splits.get(split, split))
            if lacks_file or self.local.is_file():
                self.splits.pop(split, None)
            if split in self.splits:
                del self.held_out[split]

    def split(self, split: Split) -> Sequence[Example]:
        """Return the rows of a split. Raises UserError if they are missing, empty or unreadable, with the row's number from 1."""
        if split not in self.read:
            self.read[split] = self._split(split)
        return self.read[split]

    def _split(self, split: Split) -> Sequence[Example]:
        if split not in self.splits and split not in self.held_out:
            has = ", ".join(name for name in SPLITS if name in self.splits or name in self.held_out)
            fix = f"task.held_out.{split}=0.1 takes a tenth of the train rows"
            raise UserError(f"there is no split {split!r}: task.splits and task.held_out give {has}; {fix}")
        if self.streaming and self.limits[split] is None:
            raise UserError(f"task.streaming=true reads the first rows only: set task.{split}_limit to how many")
        source = self._source("train" if split in self.held_out else split)
        sides = {split} if split in self.held_out or split == "train" else set(SPLITS)
        return self._kept(split, source, sides, self._questions(SPLITS[SPLITS.index(split) + 1 :]))

    @cached_property
    def shares(self) -> Mapping[str, float]:
        """The shares that are held out. A small file may have no hash below test's share, which then reaches the lowest one."""
        share, streams = self.held_out.get("test"), self.streaming
        if share is None or streams or len(source := self._source("train")) * share > FEW:
            return self.held_out
        asked = (asked for _, values, asked in self._rows(source, "train") if not any(map(_blank, values)))
        points = set(map(point_of, asked))
        return self.held_out | ({"test": max(share, math.nextafter(min(points), 1))} if len(points) > 1 else {})

    def _questions(self, splits: Sequence[Split]) -> set[int]:
        """Return the keys of the questions in the source's own rows of these splits."""
        keys: set[int] = set()
        name = self.columns[0]
        for split in splits:
            if split in self.splits:
                # a split that cannot be read is refused when it is requested
                with contextlib.suppress(UserError, KeyError, ValueError):  # of a stream only the rows that are read
                    rows = self.split(split) if self.streaming else self._source(split)
                    if not self.streaming:
                        beside = self._beside(rows.column_names)
                        rows = rows.select_columns([head(one, rows.column_names) for one in (name, *beside)])
                    keys |= {key_of(self._asked(row)) for row in rows}
        return keys

    def _beside(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the column with pictures, if there is one."""
        name = self.pictures and self.pictures.name(columns)
        return (name,) if name else ()

    def _asked(self, row: Example) -> Any:
        """Return the question of a row, with what tells its pictures from others."""
        question = at(row, self.columns[0])
        return self.pictures.question(question, row) if self.pictures else question

    def _kept(self, split: Split, source: TableRows, sides: set[str], elsewhere: set[int]) -> Sequence[Example]:
        """Return the rows of `source` that are in one of `sides`, not `elsewhere`, and pass the filters. Logs removals."""
        removed = dict.fromkeys((*self.filters, "held out"), 0)
        kept = [] if self.streaming else array("q")  # rows of a table are not kept in memory
        seen: set[int] = set()
        shares = self.shares if len(sides) == 1 else {}
        read, blank = 0, None
        for row, values, asked in self._rows(source, split):
            if len(kept) == self.limits[split]:
                break
            read += 1
            question = key_of(asked)
            blanks = (name for name, value in zip(self.columns, values, strict=True) if _blank(value))
            blank = next(blanks, None)
            if blank and "empty" not in self.filters:
                fix = f"every row needs {', '.join(self.columns)} (task.filters=[empty] leaves such rows out)"
                raise UserError(f"{source.where(read - 1)}, {split} row {read}: no field {blank!r}; {fix}")
            if blank:
                removed["empty"] += 1
                continue
            self._check_form(values[0], source, read - 1)
            if side(asked, shares) not in sides:
                continue
            if "duplicate" in self.filters and question in seen:
                removed["duplicate"] += 1
            elif question in elsewhere:
                removed["held out"] += 1
            else:
                kept.append(row)
                seen.add(question)
        removals = ", ".join(f"{count} {name}" for name, count in removed.items() if count)
        if not kept:
            counts = f"{read} read, {removals or 'none for it'}"
            hint = self._hint(split, read, removed, blank)
            raise UserError(f"task.path={self.path} has no rows for the split {split!r}: {counts}; {hint}")
        if split in self.held_out:
            log.info("%s, %s: %d of %d rows, held out of training", self.path, split, len(kept), read)
        if removals:
            log.info("%s, %s: %d rows kept of %d; removed: %s", self.path, split, len(kept), read, removals)
        return kept if self.streaming else source.select(kept)

    def _check_form(self, question: Any, source: TableRows, place: int) -> None:
        if self.form is None:
            return
        try:
            self.form(question)
        except UserError as error:
            raise UserError(f"{source.where(place)}, column {self.columns[0]!r}: {error}") from error

    def _hint(self, split: Split, read: int, removed: Mapping[str, int], blank: str | None) -> str:
        """Return what a user can do about a split without rows. blank: the column that its last row lacks."""
        if split in self.held_out:
            return f"raise task.held_out.{split}, which is {self.held_out[split]}, or give more rows"
        if removed["held out"]:
            fix = "set task.splits.validation=null and task.held_out.test=0.1"
            return f"they are in the test or validation rows too; if these are the same file, {fix}"
        if read and removed.get("empty") == read:
            return f"no row has {blank!r}; see task.filters"
        return "see task.filters"

    def _rows(self, source: TableRows, split: Split) -> Iterable[tuple[Any, Sequence, Any]]:
        """Yield for each row what `_kept` keeps of it (a streamed row itself, else its index), the values of `columns`, and the
        question with its pictures."""
        with _reading(f"task.path={self.path}"):
            wanted = (*self.columns, *self._beside(source.column_names))
            heads = tuple(dict.fromkeys(head(name, source.column_names) for name in wanted))
            if missing := [name for name in heads if name not in source.column_names]:
                raise self.no_column(split, missing[0], source.column_names)
            rows = source if self.streaming else source.select_columns(heads)
            for i, row in enumerate(rows):
                yield row if self.streaming else i, [at(row, name) for name in self.columns], self._asked(row)

    def _source(self, split: Split) -> TableRows:
        """Return all rows of the source's split, which is opened once."""
        if split not in self.sources:
            self.sources[split] = self._opened(split)
        return self.sources[split]

    def file(self, split: Split) -> Path | None:
        """Return the local file of a split; None if it is on the hub."""
        name = self.splits.get(split, split)
        if not self.local.exists():
            return None
        return split_file(self.local, name, self.name) if self.local.is_dir() else self.local

    def _opened(self, split: Split) -> TableRows:
        if file := self.file(split):
            with _reading(f"the dataset file {file}"):
                return read_file(file, self.streaming, self.numbers)
        self.check_path()
        name = self.splits.get(split, split)
        try:
            return arrow_rows(from_datasets(self.path, self.config, split=name, streaming=self.streaming))
        except Exception as error:  # a network may raise anything
            reason = _reason(error)
            if "split" not in reason.lower():
                raise self.not_given(reason) from error
            settings = f"task.splits.{split}=null task.held_out.{split}=0.1"
            fix = f"name it, as task.splits.{split}=NAME, or take it from the train rows by {settings}"
            raise UserError(f"task.path={self.path} has no split {name!r} ({reason}): {fix}") from error

    def check_path(self) -> None:
        """Raises UserError if the path does not exist and is no id of the hub."""
        if not self.local.exists() and (self.path.startswith((".", "/", "~")) or self.path.count("/") != 1):
            raise UserError(f"task.path={self.path} does not exist: give a folder, a file or a dataset's id on the hub")

    def no_column(self, split: str, name: str, columns: Iterable[str]) -> UserError:
        """Return the error for rows without a column."""
        return UserError(f"{self.path}, {split}: no column {name!r}; it has {', '.join(columns)}")

    def not_given(self, reason: str) -> MissingRows:
        """Return the error for a dataset that is not here and does not come from the hub."""
        line = f"task.path={self.path} is no folder of this machine, and the hub does not give it ({reason})"
        return MissingRows(f"{line}: give task.path=FOLDER with a train.jsonl and a test.jsonl")


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn any exception of a parser or a network into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} could not be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    cause = error.__cause__ or error
    advice = ": save it as UTF-8" if isinstance(cause, UnicodeDecodeError) else ""
    return (str(cause).partition("\n")[0] or type(cause).__name__) + advice


def _files(path: Path, split: str) -> list[Path]:
    named = re.compile(rf"(?<![a-z]){re.escape(split)}(?![a-z])")  # but not latest.jsonl
    return sorted(file for file in path.iterdir() if file.suffix in KINDS and named.search(file.stem.lower()))


def split_file(path: Path, split: str, name: str) -> Path:
    """Return the one file in a folder with the split in its name. If several have it: the one named so, else with `name` too."""
    files = _files(path, split)
    if len(files) > 1:
        exact = [file for file in files if file.stem == split]
        files = exact or [file for file in files if name and name in file.stem]
    if len(files) != 1:
        other = f" or {name}_{split}.jsonl" if name else ""
        fix = f"there must be one, such as {split}.jsonl{other} ({', '.join(KINDS)} are read)"
        raise UserError(f"task.path={path} has {len(files) or 'no'} files for the split {split!r}: {fix}")
    return files[0]


def _blank(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value in (None, []) or value != value  # NaN is no value
