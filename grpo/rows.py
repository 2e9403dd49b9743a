"""Layer 1 - rows of a dataset, from a hub id, a folder or a file. Knows nothing of what the columns mean."""

from collections.abc import Sequence
from pathlib import Path

from grpo.errors import UserError
from grpo.rl import Example, Split

_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def split_file(path: Path, split: Split, name: str) -> Path:
    """The one file of a folder that holds a split: with the split in its name, and of several the one with `name` too."""
    files = sorted(file for file in path.iterdir() if file.suffix in _KINDS and split in file.stem)
    if len(files) > 1:
        files = [file for file in files if file.stem == split] or [file for file in files if name in file.stem]
    if len(files) != 1:
        raise UserError(
            f"task.path={path} has {len(files) or 'no'} files for the split {split!r}: there must be one, such as "
            f"{split}.jsonl or {name}_{split}.jsonl ({', '.join(_KINDS)} are read)"
        )
    return files[0]


def read_rows(
    path: str, split: Split, name: str, fields: Sequence[str], config: str | None = None, limit: int | None = None
) -> Sequence[Example]:
    """The rows of a split, the first `limit` of them, every one with all of `fields`.

    path: a folder or a file of this machine, else a dataset of the hub with its `config`. Raises UserError for what is
    missing, empty or unreadable; a row without a field is named by its number, from 1.
    """
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    local = Path(path).expanduser()
    if not local.exists() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise UserError(f"task.path={path} does not exist: give a folder, a file, or the id of a dataset on the hub")
    file = split_file(local, split, name) if local.is_dir() else local
    if local.exists() and file.suffix not in _KINDS:
        raise UserError(f"task.path={path} is not a dataset file: {', '.join(_KINDS)} are read")
    if local.exists() and file.stat().st_size == 0:
        raise UserError(f"the dataset file {file} is empty")
    try:
        if local.exists():
            rows = load_dataset(_KINDS[file.suffix], data_files=str(file), split="train")
        else:
            rows = load_dataset(path, config, split=split)
    except Exception as error:  # whatever a parser or a network can raise
        reason = str(error.__cause__ or error).splitlines()[0]
        if local.exists():
            raise UserError(f"the dataset file {file} could not be read: {reason}") from error
        raise UserError(
            f"task.path={path} is no folder of this machine, and the hub does not give it ({reason}): "
            f"give task.path=FOLDER with a train.jsonl and a test.jsonl"
        ) from error
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    if len(rows) == 0:
        raise UserError(f"{file} has no rows for the split {split!r}: the file is empty or limit={limit}")
    for field in fields:
        if field not in rows.column_names:
            raise UserError(f"{file}, row 1: no field {field!r}; it has {', '.join(rows.column_names)}")
        for number, value in enumerate(rows[field], start=1):
            if value is None:
                raise UserError(f"{file}, row {number}: no field {field!r}; every row needs {', '.join(fields)}")
    return rows
