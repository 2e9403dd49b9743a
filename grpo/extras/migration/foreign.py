"""Names of settings in other systems, and what they are here: `python -m grpo.from_trl --table` prints the tables.

from_trl.yaml has the rows of TRL, foreign.tsv those of the other systems. A key that does not exist is looked up here before a
similar one is guessed.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import yaml

from grpo.system.errors import UserError

TRL, OTHERS = Path(__file__).with_name("from_trl.yaml"), Path(__file__).with_name("foreign.tsv")
SETTINGS, ARGUMENTS = ("TRL", "flag"), ("argument",)  # headers of first columns: names of settings, arguments of Python
IN_TICKS = re.compile(r"`([^`]+)`")


class TableRow(NamedTuple):
    """A row of a table, as Markdown. header: of the column `theirs`. here: keys, `none` or `always`."""

    header: str
    system: str
    theirs: str
    here: str
    remark: str


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
def rows() -> list[TableRow]:
    """Return the rows of all tables: TRL's fields, those of older versions, arguments of its trainer; then the other systems."""
    data = yaml.load(TRL.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    trl = [row for part in ("fields", "others", "trainer") for row in data[part]]
    found = [TableRow("TRL", "TRL", ticked(row["trl"]), ticked(row["here"]), row.get("remark", "")) for row in trl]
    return found + [TableRow(*line.split("\t")) for line in OTHERS.read_text(encoding="utf-8").splitlines()]


def ticked(words: str) -> str:
    """Return words of from_trl.yaml as Markdown."""
    return words if words in ("always", "none") else ", ".join(f"`{word}`" for word in words.split())


def settings_in(row: TableRow) -> Iterator[Foreign]:
    """Yield each setting in a row, as plain text. Several share all keys, unless there is one key for each."""
    theirs, keys = IN_TICKS.findall(row.theirs), IN_TICKS.findall(row.here)
    remark = re.sub(r"\[([^]]*)\]\([^)]*\)|`", lambda link: link[1] or "", row.remark).partition("; ")[0]
    pairs = list(zip(theirs, keys, strict=True)) if len(theirs) == len(keys) else None
    answer = " and ".join(keys) or row.here
    for name, key in pairs or [(name, answer) for name in theirs]:
        yield Foreign(row.system, name, key, remark)


@cache
def tables(headers: tuple[str, ...] = SETTINGS) -> Mapping[str, list[Foreign]]:
    """Return the settings of the tables with these headers, by `plain_name` name."""
    found: dict[str, list[Foreign]] = defaultdict(list)
    for setting in (setting for row in rows() if row.header in headers for setting in settings_in(row)):
        found[plain_name(setting.name)].append(setting)
    return found


def printed(systems: Sequence[str] = ()) -> str:
    """Return the tables of these systems, or of all, as Markdown. Raises UserError for a system that has none."""
    there = list(dict.fromkeys(row.system for row in rows()))
    if unknown := {*systems} - {*there}:
        raise UserError(f"there is no table of {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    text = ""
    wanted = [row for row in rows() if row.system in (systems or there)]
    for system, of_system in groupby(sorted(wanted, key=lambda row: there.index(row.system)), lambda row: row.system):
        text += f"## {system}\n\n"
        for header, group in groupby(of_system, lambda row: row.header):
            lines = (f"| {row.theirs} | {row.here} | {row.remark} |\n".replace("|  |", "| |") for row in group)
            text += f"| {header} | here | remark |\n|---|---|---|\n{''.join(lines)}\n"
    return text.rstrip("\n")


def plain_name(name: str) -> str:
    """Return a name without what differs between a flag, a key and an argument."""
    return name.lstrip("-+~").replace("-", "_").removeprefix("actor_rollout_ref.")


def told(name: str, headers: tuple[str, ...] = SETTINGS) -> str | None:
    """Return what a setting of other systems is here, in one line; None if no table has the name.

    name: a key, a flag or an argument. One that no table has is looked up by its last part, as `FIRST.*`, and as the last part of
    a name in a table.
    """
    name, table = plain_name(name), tables(headers)
    group, _, last = name.rpartition(".")
    short = [
        each for settings in table.values() for each in settings if each.name.endswith(f".{last}")
    ]  # written without its section
    found = next((table[each] for each in (name, last, f"{group}.*") if each in table), short)
    by_answer = {each.here: each for each in reversed(found)}  # systems that agree are one
    lines = [each.line() for each in reversed(by_answer.values())]
    return f"{'; '.join(lines[:2])}; `python -m grpo.from_trl --table` prints all" if lines else None
