"""Names of settings in other systems, and what they are here: the tables of docs/migration.md as data.

A key that does not exist is looked up here before a similar one is guessed.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from grpo.config.composing import CONF

PAGE = CONF.parent / "docs" / "migration.md"
SETTINGS, ARGUMENTS = ("TRL", "flag"), ("argument",)  # headers of first columns: names of settings, arguments of Python
IN_TICKS = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Foreign:
    """A setting of another system. name: as that system writes it. here: keys of ours, or `none`, or `always`."""

    system: str
    name: str
    here: str
    remark: str

    def line(self) -> str:
        """Return what the setting is here."""
        its = f"{self.system}'{'' if self.system.endswith('s') else 's'} {self.name}"
        if self.here == "none":
            return f"{its} has no counterpart: {self.remark}"
        what = f"{its} needs no setting" if self.here == "always" else f"{its} is {self.here} here"
        return f"{what} ({self.remark})" if self.remark else what


@cache
def tables(headers: tuple[str, ...] = SETTINGS) -> Mapping[str, list[Foreign]]:
    """Return the rows of the tables with these headers, by `plain_name` name; empty without the page."""
    found: dict[str, list[Foreign]] = defaultdict(list)
    system = header = ""
    with suppress(OSError):
        for line in PAGE.read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            if line.startswith("## "):
                system = line.removeprefix("## ")
            header = (header or cells[0]) if cells else ""
            if header in headers and len(cells) == 3:
                for row in rows(system, *cells):
                    found[plain_name(row.name)].append(row)
    return found


def rows(system: str, first: str, here: str, remark: str) -> list[Foreign]:
    """Return the settings of a row. Several names share all keys, unless there is one key for each."""
    names, keys = IN_TICKS.findall(first), IN_TICKS.findall(here)
    pairs = list(zip(names, keys, strict=True)) if len(names) == len(keys) else None
    remark = re.sub(r"\[([^]]*)\]\([^)]*\)|`", lambda link: link[1] or "", remark).partition("; ")[0]
    answer = " and ".join(keys) or here
    return [Foreign(system, name, key, remark) for name, key in pairs or [(name, answer) for name in names]]


def plain_name(name: str) -> str:
    """Return a name without what differs between a flag, a key and an argument."""
    return name.lstrip("-+~").replace("-", "_").removeprefix("actor_rollout_ref.")


def known_elsewhere(name: str, headers: tuple[str, ...] = SETTINGS) -> str | None:
    """Return what a setting of other systems is here, in one line; None if no table has the name.

    name: a key, a flag or an argument. One that no table has is looked up by its last part, as `FIRST.*`, and as the last part of
    a name in a table.
    """
    name, table = plain_name(name), tables(headers)
    group, _, last = name.rpartition(".")
    short = [
        row for rows in table.values() for row in rows if row.name.endswith(f".{last}")
    ]  # written without its section
    found = next((table[each] for each in (name, last, f"{group}.*") if each in table), short)
    by_answer = {row.here: row for row in reversed(found)}  # systems that agree are one
    lines = [row.line() for row in reversed(by_answer.values())]
    return f"{'; '.join(lines[:2])}; docs/migration.md has all" if lines else None
