"""Names of settings in other systems, and what they are here. foreign.tsv has the tables of docs/migration.md, by
benchmarks/foreign.py.

A key that does not exist is looked up here before a similar one is guessed.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("foreign.tsv")
SETTINGS, ARGUMENTS = ("TRL", "flag"), ("argument",)  # headers of first columns: names of settings, arguments of Python


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
    """Return the rows of the tables with these headers, by `plain_name` name."""
    found: dict[str, list[Foreign]] = defaultdict(list)
    for line in FILE.read_text(encoding="utf-8").splitlines():
        header, *row = line.split("\t")
        if header in headers:
            found[plain_name(row[1])].append(Foreign(*row))
    return found


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
