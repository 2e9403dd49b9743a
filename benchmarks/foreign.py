"""Write the tables of docs/migration.md, which people read, as grpo/extras/migration/foreign.tsv, which the programs read.

    python benchmarks/foreign.py

A line is a setting of another system: the header of its column, the system, its name there, what it is here, a remark.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from grpo.extras.migration.foreign import ARGUMENTS, FILE, SETTINGS

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"
IN_TICKS = re.compile(r"`([^`]+)`")


def settings(page: str) -> Iterator[tuple[str, ...]]:
    """Yield the columns of FILE for each name in the tables of the page whose header is one of SETTINGS and ARGUMENTS."""
    system = header = ""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if line.startswith("## "):
            system = line.removeprefix("## ")
        header = (header or cells[0]) if cells else ""
        if header in SETTINGS + ARGUMENTS and len(cells) == 3:
            yield from ((header, system, *columns) for columns in names(*cells))


def names(first: str, here: str, remark: str) -> list[tuple[str, str, str]]:
    """Return (name, here, remark) of the names in a row. Several names share all keys, unless there is one key for each."""
    theirs, keys = IN_TICKS.findall(first), IN_TICKS.findall(here)
    pairs = list(zip(theirs, keys, strict=True)) if len(theirs) == len(keys) else None
    remark = re.sub(r"\[([^]]*)\]\([^)]*\)|`", lambda link: link[1] or "", remark).partition("; ")[0]
    answer = " and ".join(keys) or here
    return [(name, key, remark) for name, key in pairs or [(name, answer) for name in theirs]]


def written(page: str) -> str:
    """Return the content of FILE."""
    return "".join("\t".join(columns) + "\n" for columns in settings(page))


if __name__ == "__main__":
    FILE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
