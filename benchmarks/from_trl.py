"""Keep docs/from_trl.md complete: every field of the installed TRL's GRPOConfig has one row there, which has an answer.

    python benchmarks/from_trl.py            # prints what is wrong, and fails if there is anything
    python benchmarks/from_trl.py --write    # also adds rows for new fields, to be answered, and removes those that TRL lost

The page is the only list; tests/test_from_trl.py checks it in the same way, and tries its keys.
"""

import dataclasses
import re
import sys
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "from_trl.md"
OPEN = "?"  # the answer of a row that --write adds


def rows(page: str) -> list[list[str]]:
    """Return the cells of each row: fields of TRL, the answer here, a remark."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"]


def fields() -> dict[str, str]:
    """Return the first sentence about each field of the installed GRPOConfig, by its name."""
    from trl import GRPOConfig

    words = {field.name: field.metadata.get("help") or "" for field in dataclasses.fields(GRPOConfig)}
    return {name: " ".join(re.split(r"(?<=\.)\s", text)[0].split()).replace("|", "or") for name, text in words.items()}


def version() -> str:
    """Return the installed version of TRL without its last number."""
    import trl

    return trl.__version__.rpartition(".")[0]


def faults(page: str) -> list[str]:
    """Return what is wrong with the page, a line each."""
    listed = Counter(name for cells in rows(page) for name in re.findall(r"`(\w+)`", cells[0]))
    there = fields()
    return [
        *(f"{name} has no row" for name in there if name not in listed),
        *(f"{name} has {count} rows" for name, count in listed.items() if count > 1),
        *(f"{name} is no field of TRL {version()}" for name in listed if name not in there),
        *(f"{cells[0]} has no answer" for cells in rows(page) if cells[1] in ("", OPEN)),
        *([] if f"TRL {version()}'s" in page else [f"the page is not about TRL {version()}"]),
    ]


def mended(page: str) -> str:
    """Return the page with an open row for each new field, without lost fields, and with the installed version."""
    there = fields()
    listed = {name for cells in rows(page) for name in re.findall(r"`(\w+)`", cells[0])}
    lines = []
    for line in page.splitlines():
        if line[:3] == "| `":
            first, rest = line.split(" | ", 1)
            names = [name for name in re.findall(r"`(\w+)`", first) if name in there]
            if names:
                lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {rest}")
                last = len(lines)
        else:
            lines.append(line)
    lines[last:last] = [f"| `{name}` | {OPEN} | {there[name]} |" for name in there if name not in listed]
    return re.sub(r"TRL [\d.]+'s", f"TRL {version()}'s", "\n".join(lines) + "\n")


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(mended(PAGE.read_text()))
    found = faults(PAGE.read_text())
    print("\n".join(found) or f"every field of TRL {version()} has its row")
    sys.exit(bool(found))
