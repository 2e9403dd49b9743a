"""Atomic writes: a file is written under another name beside the old one, and then replaces it."""

import errno
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from grpo.system.errors import one_line

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOST: dict[str, str] = {}  # of this run: why a file or folder could not be written, by its path


@contextmanager
def replacing(file: str | Path) -> Iterator[Path]:
    """Yield the path to write to. After the block that file is `file`; if the block raises, `file` stays as it was."""
    # beside the old one: a rename replaces a file in one move only within a file system
    new = Path(f"{file}.new")
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield new
        os.replace(new, file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def surviving(what: str) -> Iterator[None]:
    """Log one line if `what` cannot be written in this block because the disk is full, note it in LOST, and go on. Other errors
    are raised. A file that is written later is not lost."""
    try:
        yield
        LOST.pop(what, None)
    except (OSError, SafetensorError) as error:
        number = re.search(r"os error (\d+)", str(error))  # Safetensors has no errno
        if (int(number[1]) if number else getattr(error, "errno", None)) not in FULL:
            raise
        LOST[what] = one_line(error, 200)
        log.warning("%s was not written, and the run goes on: %s", what, LOST[what])


def write_text(file: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(file) as new:
        new.write_text(text, encoding="utf-8")


def write_json(file: str | Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_text(file, strict_json(content, indent=2, ensure_ascii=False) + "\n")


def strict_json(value: Any, **options: Any) -> str:
    """Return the value as JSON that every parser reads: NaN and infinities are null. options: of json.dumps."""
    return json.dumps(without_nan(value), allow_nan=False, **options)


def without_nan(value: Any) -> Any:
    """Return the value with None for each number, however deep, that JSON does not have."""
    if isinstance(value, Mapping):
        return {without_nan(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
