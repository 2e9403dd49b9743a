"""Rows of a dataset: a hub id, a folder or a file, filtered, and split so that no question is on two sides.

Knows nothing of what the columns mean, but that the first of those a task needs is the question.
"""

import contextlib
import hashlib
import json
import logging
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from grpo.env.types import Example, Split
from grpo.system.errors import UserError, check_least, oneof

log = logging.getLogger(__name__)

SPLITS = get_args(Split)
FILTERS = ("empty", "duplicate")
_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def side(question: Any, held_out: Mapping[str, float]) -> Split:
    """The split that a question belongs to, whatever rows are around it: a stable hash of its text decides.

    held_out: the shares of validation and test; train has the rest.
    """
    place = key_of(question) / 2**64
    for split in ("test", "validation"):
        if place < (share := held_out.get(split, 0.0)):
            return split
        place -= share
    return "train"


class Dataset:
    """The rows of a task, by split, each read once.

    path: a folder or file of this machine (jsonl, json, parquet, csv), else a dataset of the hub with its `config`.
    columns: what every row must have, the question first. name: tells the file of a folder with several datasets.
    splits: ours (train, validation, test) to the source's, None or left out where the source has none; a single file has none.
    held_out: for a split that the source lacks, the share of its train rows to keep from training, as {validation: 0.1}, picked
    by a hash of the question. A row of a test or validation split is never trained on, even if it is in train too.
    filters: of `empty` (a column of it is missing or blank) and `duplicate` (the question came before). Removed rows are
    counted in the log. limits: of rows, after all that. streaming: read no more of a hub dataset than the limits ask for.
    """

    def __init__(
        self,
        path: str,
        columns: Sequence[str],
        name: str = "",
        config: str | None = None,
        splits: Mapping[str, str] | None = None,
        held_out: Mapping[str, float] | None = None,
        filters: Sequence[str] = FILTERS,
        train_limit: int | None = None,
        validation_limit: int | None = None,
        test_limit: int | None = None,
        streaming: bool = False,
    ) -> None:
        self.path, self.columns, self.name, self.config = path, tuple(columns), name, config
        self.local = Path(path).expanduser()
        named = splits if splits is not None else {"train": "train", "test": "test"}
        self.splits = {split: source for split, source in named.items() if source is not None}
        self.held_out = {split: float(share) for split, share in (held_out or {}).items() if share}
        self.filters, self.streaming = tuple(filters), streaming
        self.limits = {"train": train_limit, "validation": validation_limit, "test": test_limit}
        self.sources: dict[Split, Any] = {}
        self.read: dict[Split, Sequence[Example]] = {}
        for key, names, known in (
            ("splits", self.splits, SPLITS),
            ("held_out", self.held_out, SPLITS[1:]),
            ("filters", self.filters, FILTERS),
        ):
            for name in names:
                oneof(f"task.{key}", name, known)
        if any(share < 0 for share in self.held_out.values()) or sum(self.held_out.values()) >= 1:
            raise UserError(f"task.held_out={self.held_out} must be shares of the rows that leave some to train on")
        for split in list(self.held_out):  # rows of the source's own go first
            without = self.local.is_dir() and not _files(self.local, self.splits.get(split, split))
            if without or self.local.is_file():
                self.splits.pop(split, None)
            if split in self.splits:
                del self.held_out[split]
        for split, limit in self.limits.items():
            check_least(f"task.{split}_limit", limit, 1, ", or null for all rows")

    def split(self, split: Split) -> Sequence[Example]:
        """Its rows. Raises UserError for what is missing, empty or unreadable; a row is named by its number, from 1."""
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

    def _questions(self, splits: Sequence[Split]) -> set[int]:
        """Keys of the questions in the source's own rows of these splits, as far as there are any."""
        found: set[int] = set()
        name = self.columns[0]
        for split in splits:
            if split in self.splits:
                # a split that cannot be read is refused when somebody asks for it
                with contextlib.suppress(UserError, KeyError, ValueError):  # of a stream as much as is read
                    rows = self.split(split) if self.streaming else self._source(split).select_columns([name])
                    found |= {key_of(row[name]) for row in rows}
        return found

    def _kept(self, split: Split, source: Any, sides: set[str], elsewhere: set[int]) -> Sequence[Example]:
        """The rows of `source` that are on one of `sides`, not `elsewhere`, and pass the filters; logs how many were removed."""
        removed = dict.fromkeys((*self.filters, "held out"), 0)
        kept, seen, read = [] if self.streaming else array("q"), set(), 0  # nothing large of a row stays in memory
        for row, values in self._rows(source, split):
            if len(kept) == self.limits[split]:
                break
            read += 1
            question = key_of(values[0])
            blank = next((name for name, value in zip(self.columns, values, strict=True) if _blank(value)), None)
            if blank and "empty" not in self.filters:
                fix = f"every row needs {', '.join(self.columns)} (task.filters=[empty] leaves such rows out)"
                raise UserError(f"{self.path}, {split} row {read}: no field {blank!r}; {fix}")
            if blank:
                removed["empty"] += 1
            elif side(values[0], self.held_out) not in sides:
                continue
            elif "duplicate" in self.filters and question in seen:
                removed["duplicate"] += 1
            elif question in elsewhere:
                removed["held out"] += 1
            else:
                kept.append(row)
                seen.add(question)
        told = ", ".join(f"{count} {name}" for name, count in removed.items() if count)
        if not kept:
            hint = "see task.filters"
            if split in self.held_out:
                hint = f"raise task.held_out.{split}, which is {self.held_out[split]}, or give more rows"
            elif removed["held out"]:
                hint = "they stand in the test or validation rows too; one file for all needs task.held_out.test=0.1"
            counts = f"{read} read, {told or 'none for it'}"
            raise UserError(f"task.path={self.path} has no rows for the split {split!r}: {counts}; {hint}")
        if split in self.held_out:
            log.info("%s, %s: %d of %d rows, held out of training", self.path, split, len(kept), read)
        if told:
            log.info("%s, %s: %d rows kept of %d; removed: %s", self.path, split, len(kept), read, told)
        return kept if self.streaming else source.select(kept)

    def _rows(self, source: Any, split: Split) -> Iterable[tuple[Any, Sequence]]:
        """(what to keep, the values of our columns) of each row: the row itself where it streams by, else its place."""
        if self.streaming:
            with _reading(f"task.path={self.path}"):
                for row in source:
                    self._check_columns(row, split)
                    yield row, [row[name] for name in self.columns]
        else:
            self._check_columns(source.column_names, split)
            pieces = source.select_columns(list(self.columns)).iter(
                1000
            )  # one row at a time is slower by a factor of 50
            rows = (zip(*(piece[name] for name in self.columns), strict=True) for piece in pieces)
            yield from enumerate(chain.from_iterable(rows))

    def _check_columns(self, there: Iterable[str], split: Split) -> None:
        for name in self.columns:
            if name not in there:
                raise UserError(f"{self.path}, {split}: no column {name!r}; it has {', '.join(there)}")

    def _source(self, split: Split) -> Any:
        """All rows of the source's split, from wherever they are; opened once."""
        if split not in self.sources:
            self.sources[split] = self._opened(split)
        return self.sources[split]

    def _opened(self, split: Split) -> Any:
        from datasets import load_dataset
        from datasets.utils.logging import disable_progress_bar

        disable_progress_bar()
        name = self.splits.get(split, split)
        if self.local.exists():
            file = split_file(self.local, name, self.name) if self.local.is_dir() else self.local
            if file.suffix not in _KINDS:
                raise UserError(f"task.path={self.path} is not a dataset file: {', '.join(_KINDS)} are read")
            if file.stat().st_size == 0:
                raise UserError(f"the dataset file {file} is empty")
            with _reading(f"the dataset file {file}"):
                return load_dataset(_KINDS[file.suffix], data_files=str(file), split="train", streaming=self.streaming)
        if self.path.startswith((".", "/", "~")) or self.path.count("/") != 1:
            raise UserError(
                f"task.path={self.path} does not exist: give a folder, a file, or a dataset's id on the hub"
            )
        try:
            return load_dataset(self.path, self.config, split=name, streaming=self.streaming)
        except Exception as error:  # whatever a network can raise
            missing = "is no folder of this machine, and the hub does not give it"
            fix = "give task.path=FOLDER with a train.jsonl and a test.jsonl"
            if "split" in (reason := _reason(error)).lower():
                missing = f"has no split {name!r}"
                rest = f"task.splits.{split}=null task.held_out.{split}=0.1"
                fix = f"name it, as task.splits.{split}=NAME, or take it from the train rows by {rest}"
            raise UserError(f"task.path={self.path} {missing} ({reason}): {fix}") from error


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Makes a UserError of whatever a parser or a network raises."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} could not be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error.__cause__ or error).partition("\n")[0]


@dataclass(frozen=True)
class Made(Sequence):
    """Rows that are made when they are asked for, each from its place alone."""

    size: int
    make: Callable[[int], Example]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        place = range(self.size)[index]  # counts from the end too, and ends the iteration
        return [self.make(i) for i in place] if isinstance(place, range) else self.make(place)


def picked(rows: Sequence[Example], places: Sequence[int]) -> Sequence[Example]:
    """Some of the rows, by their places."""
    return Made(len(places), lambda i: rows[places[i]])


def fingerprint(example: Example) -> str:
    """12 hex digits that an example has in every run: of what its columns say, in any order."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(name): plain(one) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(one) for one in value]
        if isinstance(value, (set, frozenset)):
            return sorted(json.dumps(plain(one), sort_keys=True) for one in value)
        if value is None or isinstance(value, (str, int, float)):
            return value
        return plain(vars(value)) if hasattr(value, "__dict__") else str(value)  # its repr may tell where it lies

    return hashlib.sha256(json.dumps(plain(example), sort_keys=True).encode()).hexdigest()[:12]


def fingerprint_of_all(examples: Sequence[Example], looks: int = 1000) -> str:
    """The same for a split, by at most so many of its examples from everywhere in it, and their number."""
    places = range(0, len(examples), math.ceil(len(examples) / looks))
    return fingerprint({"rows": len(examples), "examples": [fingerprint(examples[i]) for i in places]})


def _files(path: Path, split: str) -> list[Path]:
    named = re.compile(rf"(?<![a-z]){re.escape(split)}(?![a-z])")  # and not latest.jsonl
    return sorted(file for file in path.iterdir() if file.suffix in _KINDS and named.search(file.stem.lower()))


def split_file(path: Path, split: str, name: str) -> Path:
    """The one file of a folder that holds a split: with the split in its name, and of several the one with `name` too."""
    files = _files(path, split)
    if len(files) > 1:
        files = [file for file in files if file.stem == split] or [file for file in files if name and name in file.stem]
    if len(files) != 1:
        other = f" or {name}_{split}.jsonl" if name else ""
        fix = f"there must be one, such as {split}.jsonl{other} ({', '.join(_KINDS)} are read)"
        raise UserError(f"task.path={path} has {len(files) or 'no'} files for the split {split!r}: {fix}")
    return files[0]


def key_of(question: Any) -> int:
    """The same for two rows that ask the same: a number of 64 bits, so that a million of them take little memory."""
    text = question if isinstance(question, str) else json.dumps(question, sort_keys=True)
    return int.from_bytes(hashlib.sha256(" ".join(text.split()).encode()).digest()[:8], "big")


def _blank(value: Any) -> bool:
    return value in (None, []) or (isinstance(value, str) and not value.strip())
