r"""Reads answers that are no numbers or formulas: a word is a word, and 2024-03-05 is a date, not 2016.

    kind_of_answer("DBCA")                                  Kind("word", "DBCA")
    kind_of_answer("March 5, 2024")                         Kind("date", (2024, 3, 5, None))
    kind_of_answer("x\\equiv 7 \\pmod{5}")                  Kind("residues", ("x", 5, frozenset({2})))
    kind_of_answer("2x"), kind_of_answer("ab")              None: mathematics

Letters are multiplied only where mathematics says so: by an operator, an exponent or a coefficient, or if two small letters stand
alone. Linear in the text.
"""

import re
from collections.abc import Hashable
from typing import NamedTuple

from grpo.extras.grading.arithmetic import value
from grpo.extras.grading.forms.logic import formula, same_formula
from grpo.extras.grading.forms.structure import TEXT, both_signs, items_of


class Kind(NamedTuple):
    """The kind of an answer, and what is compared. Names: date, clock, residues, logic, statement, word or words."""

    name: str
    what: Hashable


_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_MONTH = (
    r"(?P<m>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    r"nov(?:ember)?|dec(?:ember)?)\.?"
)
_WEEKDAY = r"(?:(?P<w>mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?,? )?"
_DAY = r"(?P<d>[0-9]{1,2})(?:st|nd|rd|th)?"
_DATES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<y>[0-9]{4})(?P<s>[-/])(?P<m>[0-9]{2})(?P=s)(?P<d>[0-9]{2})",
        r"(?P<m>[0-9]{1,2})(?P<s>[-/])(?P<d>[0-9]{1,2})(?P=s)(?P<y>[0-9]{4})",
        rf"{_WEEKDAY}(?:the )?{_DAY} (?:of )?{_MONTH}(?:,? (?P<y>[0-9]{{4}}))?",
        rf"{_WEEKDAY}{_MONTH} (?:the )?{_DAY}(?:,? (?P<y>[0-9]{{4}}))?",
        rf"{_MONTH}(?:,| of)? (?P<y>[0-9]{{4}})",
    )
]
_CLOCK = re.compile(
    r"([0-9]{1,2})(?: ?: ?([0-5][0-9]))?(?: ?: ?([0-5][0-9]))? ?(?:([ap])\.? ?m\.?|(noon|midnight)|(o'clock))?",
    re.IGNORECASE,
)
_RESIDUES = re.compile(
    r"(?:([a-zA-Z]) ?(\\equiv|=) ?)?(.+?) ?(\(? ?(?:\\text ?\{ ?)?\\?[pb]?mod(?:ulo)?) ?\}? ?\{? ?([0-9]+) ?\}? ?\)?"
)
_EITHER = re.compile(r",? ?\\text ?\{ ?(?:or|and) ?\} ?| (?:or|and) |,")
_STATEMENT = re.compile(
    r"\\(?:to|leftrightarrow|rightleftharpoons|perp|parallel|cong|sim|forall|exists|neg|nmid|triangle|angle|l?dots)"
    r"(?![a-zA-Z])"
)
_NO_STATEMENT = re.compile(r"[=<>]|\\(?:lim|sum|int|[lgn]e)(?![a-zA-Z])|_\{?[a-z] ?\\to")
_ARROW = re.compile(r"(\\to|\\rightleftharpoons)(?![a-zA-Z])")
_CHARGE = re.compile(r"\^\{? ?([0-9]*) ?([-+]) ?\}?")
_MATHEMATICS = re.compile(r"[-+*/^=<>|!\\]")

# letters that are no product, as text without braces, spaces and indices
_CODE = re.compile(
    r"[a-zA-Z]{3,}|[A-Z][A-Za-z]|0[xbo][0-9a-fA-F]+|#[0-9a-zA-Z]+|[0-9]+[A-Z]{2,}"
    r"|(?=.*[a-zA-Z][)\]]?[0-9])[0-9]*[A-Z][a-zA-Z0-9()\[\]]*|[a-zA-Z]+[0-9][a-zA-Z0-9]*"  # A7, H2O, Ca(OH)2, e4
    r"|v?[0-9]+(?:\.[0-9]+){2,}|v[0-9]+(?:\.[0-9]+)*"  # 1.10.2, v3.11
    r"|[0-9]{3}-(?:[0-9]{2,3}-)?[0-9]{4}|97[89](?:-[0-9]+){3,4}"  # telephone numbers, ISBN
    r"|(?:\[[A-Z][a-z]\])?(?:[0-9][spdf]\^?[0-9]+)+"  # 1s^2 2s^2
    r"|\^[0-9]+[0-9-]*[A-Z][a-z]?"  # an isotope
    r"|(?:[0-9]*[A-Z][a-z]?[0-9]*)+\^[0-9]*[-+]"  # an ion
)
_SCIENTIFIC = re.compile(r"[0-9.]+[eE][0-9]+")
_SMALL_WORDS = {
    "no", "on", "if", "is", "it", "in", "of", "to", "up", "so", "or", "at", "as", "be", "by", "we", "he", "ok",
}  # fmt: skip
_WORDS = re.compile(
    r"(?:[a-zA-Z][a-zA-Z'.-]+|[aAI])(?: (?:\(?[a-zA-Z0-9][a-zA-Z0-9'.,-]*\)?|&))+|[a-zA-Z]+(?:[-'][a-zA-Z]{2,})+"
)
_GENES = re.compile(r"(?:([a-zA-Z])(?i:\1))+")
_LETTERS = re.compile(r"[a-zA-Z](?: ?(?:[,>-]|\\to)? ?[a-zA-Z])+")  # D, B, C, A


def without_text(text: str) -> str:
    """Return a text without \\text: \\text{sp}^3 as sp^3."""
    return TEXT.sub(r"\1", text)


def bare(text: str) -> str:
    """Return a cleaned text without \\text, braces and quotes."""
    return re.sub(r"\s+", " ", re.sub(r"(?<!\\)[{}]", "", TEXT.sub(r"\1", text.replace("\\#", "#")))).strip(" .\"'")


def several_words(text: str) -> bool:
    """Return whether words may be several answers."""
    return bool(_EITHER.search(bare(text)))


def kind_of_answer(text: str) -> Kind | None:
    """Return what a cleaned answer is, if it is no mathematics to compute with."""
    plain = bare(text)
    if (date := _date(plain)) is not None:
        return Kind("date", date)
    if (clock := _clock(plain)) is not None and (clock[1] or "o'clock" in plain):
        return Kind("clock", clock)
    if (residues := _residues(text)) is not None:
        return Kind("residues", residues)
    if (logic := formula(text)) is not None:
        return Kind("logic", logic)
    if _STATEMENT.search(text) and not _NO_STATEMENT.search(text) and len(items_of(text)) == 1:
        return Kind("statement", _stated(text))
    if (code := _code(text)) is not None:
        return Kind("word", code)
    if _WORDS.fullmatch(plain) and re.search(r"[a-zA-Z]{3}", plain):
        return Kind("words", phrase(plain))
    return None


def same_kind(ours: str, kind: Kind | None, gold: str, gold_kind: Kind | None) -> bool | None:
    """Return whether two cleaned answers, one of which at least is of a kind, are the same; None if mathematics decides."""
    if gold_kind is None:
        if kind.name == "word" and not kind.what[:1].isdigit():
            if squeezed(gold) == squeezed(ours):
                return True
            letters = set(re.findall("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", gold)))
            product = kind.what.isalpha() and letters and letters >= set(kind.what)
            return None if product else False  # aab may be a^2b
        if kind.name == "clock":
            other = _clock(bare(gold), _hours(ours))
            return other is not None and _same_clock(kind.what, other)
        return False if kind.name == "date" or (kind.name == "words" and not several_words(ours)) else None
    name, what = gold_kind
    if kind is not None and kind.name == name:
        mine = kind.what
        if name == "date":
            return all(
                x == y or (place == 3 and None in (x, y)) for place, (x, y) in enumerate(zip(mine, what, strict=True))
            )
        if name == "clock":
            return _same_clock(mine, what)
        if name == "residues":
            return mine[1:] == what[1:] and (mine[0] == what[0] or not (mine[0] and what[0]))
        if name == "logic":
            return same_formula(mine, what)
        return mine == what or (None if name == "words" and several_words(ours) and several_words(gold) else False)
    if name == "clock":
        other = _clock(bare(ours), _hours(gold))
        return other is not None and _same_clock(other, what)
    if name == "words":
        return None if several_words(gold) else phrase(bare(ours)) == what
    if name == "word":
        if squeezed(ours) == squeezed(gold) or (kind and kind.what == phrase(bare(gold))):
            return True
        if _LETTERS.fullmatch(bare(ours)) and len(what) > 2:
            return _folded("".join(re.findall("[a-zA-Z]", re.sub(r"\\to", "", bare(ours))))) == what
        return None if what.isalpha() and _MATHEMATICS.search(ours) and not TEXT.search(gold) else False
    return False


def _date(plain: str) -> tuple | None:
    for pattern in _DATES:
        if match := pattern.fullmatch(plain):
            found = match.groupdict()
            month, day, year = found["m"], int(found.get("d") or 0), int(found.get("y") or 0)
            weekday = (found.get("w") or "")[:2].lower() or None
            month = int(month) if month.isdigit() else _MONTHS.split("|").index(month[:3].lower()) + 1
            if month > 12 >= day and pattern is _DATES[1]:
                month, day = day, month
            if month <= 12 and day <= 31:
                return year, month, day, weekday
    return None


def _clock(plain: str, more: str = "") -> tuple[int, str] | None:
    """Return the seconds since midnight, as far as known, and "a", "p" or nothing if it is not said; None for no time.

    more: what is written after a bare hour.
    """
    if plain.lower() in ("noon", "midnight"):
        plain = f"12 {plain}"
    match = _CLOCK.fullmatch(plain + more * plain.isdigit())
    if not match or not any(match.groups()[1:]):
        return None
    hour, minute, second = (int(part or 0) for part in match.groups()[:3])
    half = (match[4] or {"noon": "p", "midnight": "a"}.get((match[5] or "").lower(), "")).lower()
    if hour > 24 or (half and not 1 <= hour <= 12):
        return None
    if half:
        hour = hour % 12 + 12 * (half == "p")
    elif hour > 12 or match[1] in ("00", "0"):
        half = "p" if hour > 12 else "a"
    return (hour * 60 + minute) * 60 + second, half


def _hours(clock: str) -> str:
    """Return what a bare hour lacks beside a time: 5 is 5 PM, but 24 is not 24:00."""
    return ":00" if re.search("[a-zA-Z]", bare(clock)) else ""


def _same_clock(ours: tuple[int, str], gold: tuple[int, str]) -> bool:
    noon = 12 * 3600
    return ours == gold if ours[1] and gold[1] else ours[0] % noon == gold[0] % noon


def _residues(text: str) -> tuple | None:
    match = _RESIDUES.fullmatch(text) if "mod" in text else None
    if not match or not (match[2] == "\\equiv" or "(" in match[4] or "pmod" in match[4]):
        return None
    modulus = int(match[5])
    each = [part for item in _EITHER.split(match[3]) for part in both_signs(item)]
    found = [value(part.rpartition("\\equiv")[2].strip()) for part in each]
    if not modulus or any(x is None or x != int(x) for x in found):
        return match[1] or "", modulus, squeezed(match[3])
    return match[1] or "", modulus, frozenset(int(x) % modulus for x in found)


def squeezed(text: str) -> str:
    """Return the characters of a text that are not layout: H_2O, \\text{H}_2\\text{O} and H2O give the same."""
    return _folded(re.sub(r"[\s_]+|\^(?=\\circ)", "", bare(text)))


def _folded(word: str) -> str:
    """Return a word in small letters, unless their size tells: Co and CO, Aa and AA."""
    short = len(word) <= 2 and word.lower() not in _SMALL_WORDS
    return word if short or re.search("[a-z][A-Z]|[0-9]", word) or _GENES.fullmatch(word) else word.casefold()


def _code(text: str) -> str | None:
    if re.search(r"(?<![a-zA-Z])[a-z] ?_", without_text(text)):  # x_1x_2 is a product
        return None
    code = re.sub(r"^\^?\s*\{\s*\}|[\s_]", "", TEXT.sub(r"\1", _CHARGE.sub(r"^\1\2", text)))
    code = re.sub(r"\\(?=#)|(?<!\\)[{}]", "", code).strip(".\"'")
    if _CODE.fullmatch(code) is None and code.lower() not in _SMALL_WORDS:
        return None
    if _SCIENTIFIC.fullmatch(code) or (" " in bare(text) and "^" not in code):  # a number, or several words
        return None
    return code.lower() if code[0] in "0#" else _folded(code)


def _stated(text: str) -> str:
    """Return a statement without layout; the substances on a side of a reaction in one order."""
    text = without_text(text)
    text = _CHARGE.sub(lambda m: f"^{m[1]}{'pm'[m[2] == '-']}", text) if _ARROW.search(text) else text
    sides = [sorted(re.split(r"\+", squeezed(side))) for side in _ARROW.split(text)]
    return " ".join("+".join(side) for side in sides)


def phrase(plain: str) -> str:
    """Return words in one form: small letters, no full stops and no article before them, "no solutions" as "no solution"."""
    found = re.sub(r"(?<=[a-z])[.,](?= |$)", "", plain.casefold()).strip(" .\"'")
    found = re.sub(r"^(?:there (?:is|are) |on |in |at )?(?:(?:an?|the) (?=\w\w))?", "", found)
    return re.sub(r"(?<=[a-rt-z]{3})s$", "", found) if " " in found else found
