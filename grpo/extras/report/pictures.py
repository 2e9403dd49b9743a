"""Pictures in samples: a table has their names, and the folder of a run small copies of them."""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo.env.pictures import MARK


def picture_names(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the pictures of messages, in order."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def names_in_prompt(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the pictures in the prompt of a sample, one for each <image> in it. row: of a table of samples."""
    if not (count := row["prompt"].count(MARK)):
        return []
    messages, later = json.loads(row["messages"]), row["turns"] - 1
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    end = [*(answers[-later:] if later > 0 else []), len(messages)][0]  # a prompt may have answers of its own
    names = picture_names(messages[end - 1 : end])
    return names if len(names) == count else []  # a text may have an <image>, too


def urls(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the small copies that a run has kept of pictures as data: URLs, by name."""
    found: dict[str, str] = {}
    for name in names:
        with suppress(OSError):  # the run may remove it meanwhile
            data = (folder / "pictures" / f"{name}.jpg").read_bytes()
            found[name] = f"data:image/jpeg;base64,{b64encode(data).decode()}"
    return found
