r"""Takes answers apart that hold several: lists, sets, tuples, matrices, cases, plus-minus. Their parts are compared one by one.

    parts_of("\\{red, blue\\}")           Parts("{}", ("red", "blue"))
    parts_of("\\frac{1\\pm\\sqrt5}{2}")   Parts("list", ("\\frac{1+\\sqrt5}{2}", "\\frac{1-\\sqrt5}{2}"))
    parts_of("0 < x < 5")                 None: one answer

Linear in the text.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

MOST_PAIRS = 400  # of parts that are compared

_DEPTH = re.compile(r"\\[{}]|[{}()\[\]]|\\begin(?![a-zA-Z])|\\end(?![a-zA-Z])")
_SEPARATOR = re.compile(
    r" ?,? ?\\text ?\{[ ,]*(?:and|or)[ ,]*\} ?|,? (?:and|or|&) |, ?(?:and|or) |;|,(?![0-9]{3}(?![0-9]))|(?<![0-9]),"
)
_RELATION = re.compile(r"[<>:]|\\(?:[lgn]e|in|subset|subseteq|mid|equiv|pmod)(?![a-zA-Z])")
_MATRIX = re.compile(r"\\begin ?\{([pbBV]?matrix|cases)\}(.*)\\end ?\{\1\}")
TEXT = re.compile(r"\\text ?\{([^{}]*)\}")
_VECTOR = re.compile(r"\(([^()]*)\) ?= ?(\(.*\))")
_POINT = re.compile(r"([A-Z]) ?=? ?(\(.*,.*\))")
_NAMED = re.compile(r"[a-zA-Z](?:_\w+)? ?=")
_FUNCTION = re.compile(r"([a-zA-Z](?: ?\([a-z]\))?) ?= ?(\\begin.*)")
_DOTS = re.compile(r"\\ldots")


class Parts(NamedTuple):
    """kind: list (bare), {}, a pair of brackets, cases, or rows x columns of a matrix. name: of the point P(1,2)."""

    kind: str
    items: tuple[str, ...]
    name: str = ""


def items_of(text: str, separator: re.Pattern = _SEPARATOR) -> list[str]:
    """Return the parts of a text between separators outside of brackets."""
    items, depth, start = [], 0, 0
    found = sorted([*_DEPTH.finditer(text), *separator.finditer(text)], key=lambda match: match.start())
    for match in found:
        if separator.fullmatch(match[0]) or match.re is separator:
            if depth == 0 and match.start() >= start:
                items.append(text[start : match.start()].strip())
                start = match.end()
        elif match.start() >= start:
            depth += 1 if match[0][-1] in "{([n" else -1
    return [*items, text[start:].strip()]


def both_signs(text: str) -> list[str]:
    r"""Return both values of a text with \pm or \mp, else the text."""
    if not re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text):
        return [text]
    signs = ("+", "-"), ("-", "+")
    return [re.sub(r"\\(pm|mp)(?![a-zA-Z]) ?", lambda m, s=s: s[m[1] == "mp"], text).removeprefix("+") for s in signs]


def _wrapped(text: str) -> bool:
    """Return whether the first bracket of a text closes at its end."""
    depth = 0
    for match in _DEPTH.finditer(text):
        depth += 1 if match[0][-1] in "{([n" else -1
        if depth == 0:
            return match.end() == len(text)
    return False


def parts_of(text: str) -> Parts | None:
    """Return the parts of a cleaned answer; None if it is one answer."""
    if whole := TEXT.fullmatch(text):
        text = whole[1].strip()
    if text[:1] == "{" and _wrapped(text):
        text = text[1:-1].strip()
    if (vector := _VECTOR.fullmatch(text)) and _wrapped(vector[2]):
        names, values = items_of(vector[1]), items_of(vector[2][1:-1])
        if len(names) == len(values) > 1:
            return Parts("list", tuple(f"{name}={item}" for name, item in zip(names, values, strict=True)))
    if (point := _POINT.fullmatch(text)) and _wrapped(point[2]):
        return (inner := parts_of(point[2])) and inner._replace(name=point[1])
    if function := _FUNCTION.fullmatch(text):
        text = function[2]
    if matrix := _MATRIX.fullmatch(text):
        return _rows(matrix[1], matrix[2])
    braces = text.startswith("\\{") and text.endswith("\\}")
    if (braces or (text[:1] in ("(", "[") and text[-1:] in (")", "]"))) and _wrapped(text):
        return _bracketed(text, text[2:-2] if braces else text[1:-1], "{}" if braces else text[0] + text[-1])
    if _RELATION.search(text):
        return None
    items = [each for item in items_of(text) for each in both_signs(item)]
    return Parts("list", tuple(items)) if len(items) > 1 and "" not in items else None


def _bracketed(text: str, inside: str, kind: str) -> Parts | None:
    items, several = items_of(inside), [both_signs(item) for item in items_of(inside)]
    if kind == "{}":
        items = (
            [] if _RELATION.search(inside) or "|" in inside else [each for item in several for each in item]
        )  # {x | ...}
    elif any(len(item) > 1 for item in several):
        return Parts("list", tuple(both_signs(text)))
    return Parts(kind, tuple(items)) if "" not in items and len(items) > (kind != "{}") else None


def _rows(name: str, body: str) -> Parts | None:
    rows = [items_of(row, re.compile("&")) for row in items_of(body.strip(), re.compile(r"\\\\")) if row]
    if name == "cases":
        cases = [
            [re.sub(r"\\text ?\{ ?(?:if|for|when) ?\}|^(?:if|for|when) ", "", x).strip(" ,.;") for x in row]
            for row in rows
        ]
        return Parts("cases", tuple(f"({', '.join(row)})" for row in cases))
    if not rows or len({len(row) for row in rows}) > 1 or name == "Vmatrix" or any("" in row for row in rows):
        return None
    return Parts(f"{len(rows)}x{len(rows[0])}", tuple(item for row in rows for item in row))


def matched(ours: str, gold: str, same: Callable[[str, str], bool]) -> bool | None:
    """Return whether two cleaned answers have the same parts; None if they are to be compared as wholes.

    Lists and sets have no order, except around dots. A bare list may stand for a tuple, in its order.
    """
    mine, theirs = parts_of(ours), parts_of(gold)
    if mine is None and theirs is None:
        return None
    if mine is None or theirs is None:
        other = ours if mine is None else gold
        if (theirs and theirs.kind == "cases") or "\\emptyset" in other:
            return False
        if (
            (mine or theirs).kind not in ("list", "{}")
            or _RELATION.search(other)
            or re.search(r"\\cup|\\setminus", other)
        ):
            return None
        single = Parts("list", (other,))
        mine, theirs = mine or single, theirs or single
    if len(mine.items) * len(theirs.items) > MOST_PAIRS:
        return None

    def alike(x: str, y: str) -> bool:  # {1} is not 1 among others
        return x.startswith("\\{") == y.startswith("\\{") and same(x, y)

    if mine.name and theirs.name and mine.name != theirs.name:
        return False
    unordered = ("list", "{}", "cases")
    if mine.kind in unordered and theirs.kind in unordered:
        if (mine.kind == "cases") != (theirs.kind == "cases"):
            return False
        if not any(_DOTS.match(item) for item in mine.items + theirs.items):
            return _covered(mine.items, theirs.items, alike) and _covered(
                theirs.items, mine.items, lambda x, y: alike(y, x)
            )
    elif mine.kind != theirs.kind and "list" not in (mine.kind, theirs.kind):
        return None if "x" in mine.kind + theirs.kind else False
    if len(mine.items) != len(theirs.items):
        return False
    pairs = zip(_in_order(mine.items), _in_order(theirs.items), strict=True)
    return all(alike(x, y) for x, y in pairs)


def _in_order(items: tuple[str, ...]) -> tuple[str, ...]:
    """Return x=1, y=2 by their names, and other items as they are."""
    return tuple(sorted(items)) if all(_NAMED.match(item) for item in items) else items


def _covered(xs: tuple[str, ...], ys: tuple[str, ...], same: Callable[[str, str], bool]) -> bool:
    return all(x in ys or any(same(x, y) for y in ys) for x in xs)
