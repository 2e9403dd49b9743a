"""Atomic writes: a file is written under another name beside the old one, and then replaces it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(file: str | Path) -> Iterator[Path]:
    """Yield the path to write to. After the block that file is `file`; if the block raises, `file` stays as it was."""
    new = Path(f"{file}.new")
    new.parent.mkdir(parents=True, exist_ok=True)
    yield new
    os.replace(new, file)


def write_text(file: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(file) as new:
        new.write_text(text, encoding="utf-8")


def write_json(file: str | Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_text(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
