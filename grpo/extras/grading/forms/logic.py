r"""Compares formulas of logic and of sets, p \to q and A \cap B, by their tables of truth. Text in."""

import re
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

MOST_NAMES = 8

_SIGN = {
    "\\cap": "&", "\\land": "&", "\\cup": "|", "\\lor": "|", "\\setminus": "-", "\\to": ">", "\\leftrightarrow": "=",
    "\\oplus": "+", "\\neg": "~", "(": "(", ")": ")",
}  # fmt: skip
_TOKEN = re.compile(
    r"\s*(?:(\\(?:cap|cup|land|lor|setminus|to|leftrightarrow|oplus|neg)(?![a-zA-Z])|[()])|\^\{?\s*(c|C|\\complement)\s*\}?"
    r"|\\(?:overline|bar)\s*\{\s*([a-zA-Z])\s*\}|([a-zA-Z](?:_[0-9])?))\s*"
)
_RANK = {"=": 1, ">": 2, "|": 3, "-": 3, "+": 3, "&": 4}
_APPLY: dict[str, Callable[[bool, bool], bool]] = {
    "=": lambda x, y: x == y,
    ">": lambda x, y: not x or y,
    "|": lambda x, y: x or y,
    "-": lambda x, y: x and not y,
    "+": lambda x, y: x != y,
    "&": lambda x, y: x and y,
}


class Formula(NamedTuple):
    """A formula in postfix order: names, ~ and the signs of two sides. sets: whether it is about sets."""

    steps: tuple[str, ...]
    sets: bool


def formula(text: str) -> Formula | None:
    """Return a formula of logic or of sets; None for anything else, and for a chain A \\to B \\to C, which is an order."""
    if "\\" not in text or len(text) > 200:
        return None
    steps: list[str] = []
    waiting: list[str] = []
    position, wants_name = 0, True
    while position < len(text):
        if not (match := _TOKEN.match(text, position)):
            return None
        position, sign = match.end(), _SIGN.get(match[1] or "", "")
        if wants_name and (match[3] or match[4]):
            steps += [match[3], "~"] if match[3] else [match[4]]
            wants_name = False
        elif wants_name and sign in ("~", "("):
            waiting.append(sign)
            continue
        elif not wants_name and match[2]:
            steps.append("~")
        elif not wants_name and sign == ")":
            while waiting and waiting[-1] != "(":
                steps.append(waiting.pop())
            if not waiting:
                return None
            waiting.pop()
        elif not wants_name and sign in _RANK:
            while waiting and _RANK.get(waiting[-1], 0) >= _RANK[sign]:
                if sign == ">" == waiting[-1]:
                    return None
                steps.append(waiting.pop())
            waiting.append(sign)
            wants_name = True
        else:
            return None
        while not wants_name and waiting[-1:] == ["~"]:
            steps.append(waiting.pop())
    steps += reversed(waiting)
    signs = set(steps) & {*_RANK, "~"}
    if wants_name or "(" in waiting or not signs or len(_names(steps)) > MOST_NAMES:
        return None
    return Formula(tuple(steps), bool(re.search(r"\\(?:cap|cup|setminus)(?![a-zA-Z])|\^", text)))


def same_formula(ours: Formula, gold: Formula) -> bool:
    """Return whether two formulas of the same names are true together. One that is always true or never must be written alike."""
    names = _names(gold.steps)
    if names != _names(ours.steps) or ours.sets != gold.sets:
        return ours.steps == gold.steps
    rows = [dict(zip(names, row, strict=True)) for row in product((False, True), repeat=len(names))]
    mine, theirs = ([_true(x.steps, row) for row in rows] for x in (ours, gold))
    return mine == theirs if len(set(theirs)) == 2 else ours.steps == gold.steps


def _names(steps) -> list[str]:
    return sorted({step for step in steps if step[0].isalpha()})


def _true(steps: tuple[str, ...], row: dict[str, bool]) -> bool:
    values: list[bool] = []
    for step in steps:
        if step in row:
            values.append(row[step])
        elif step == "~":
            values.append(not values.pop())
        else:
            y, x = values.pop(), values.pop()
            values.append(_APPLY[step](x, y))
    return values.pop()
