"""Compares an answer with the gold answer as far as exact arithmetic can.

Knows no algebra: if algebra is needed, `equal` returns None, and `grading` asks math-verify. Pure functions, linear in the text.
"""

import re
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from grpo.extras.grading.arithmetic import LARGE, Value, same, value
from grpo.extras.grading.extraction import MAX_LENGTH, boxed, extract_answer, loose_answer  # noqa: F401 - also found here
from grpo.extras.grading.forms.kinds import Kind, kind_of_answer, same_kind, several_words, without_text
from grpo.extras.grading.spelling import PLAIN, clean
from grpo.extras.grading.units import apart, compound, factor, temperature

MAX_NESTING = 10  # of brackets, where algebra is needed

_FUNCTION = r"\\(?:(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|lg|exp)(?![a-zA-Z])(?:_\{[^{}]*\})?"
_LETTER = r"(?:\\(?!frac|sqrt|angle|text|mathbb|in\b|cap|cup|times|cdot|begin|end)[a-zA-Z]+|[a-zA-Z])"
_INDEX = r"(?:_(?:\w|\{[^{}]*\}))?'*"
# what an equation may define: x, x_1, y', AB, f(x), P(A|B), \angle ABC, \overline{AB}, \frac{dy}{dx}, (x,y), \text{area}
_NAME = (
    rf"(?:\\(?:angle|triangle|overline|vec|hat|bar|operatorname|text|mathbf)\s*(?:\{{[^{{}}]*\}}|[A-Z]+)|[A-Z]{{2,}}|[A-Z][a-z]{{2,}}|"
    rf"\\frac\s*\{{d\^?\w*\s*[a-z]?\}}\s*\{{d[a-z](?:\^\w)?\}}|{_LETTER}{_INDEX}(?:\^\{{?-1\}}?(?=\s*\())?)"
)
_NAMED = re.compile(rf"(?!{_FUNCTION})({_NAME}(?:\s*\([^()=]*\))?|\([a-z](?:\s*,\s*[a-z])+\))\s*=")  # but not \sum_{k=
_FUNCTION_OF = re.compile(
    rf"{_FUNCTION}\s*(?:\(\s*)?{_NAME}(?:\s*\))?\s*=\s*(?=[^a-zA-Z=]*$|(?:[^a-zA-Z=]|\\(?:frac|sqrt|pi)\b)*$)"
)
_EQUALS = re.compile(r"(?<![<>!:\\])=")
_UNKNOWN = re.compile(
    r"(?<![a-zA-Z\\])(?!e(?![a-zA-Z]))[a-zA-Z]|\\(?:theta|alpha|beta|gamma|phi|lambda|mu|omega|rho|sigma|tau)\b"
)
# \text{Evelyn}, but not \text{5 apples}
_WORDS = re.compile(r"(?=\\text\s*\{[\s(]*[a-zA-Z])(?:\\text\s*\{[^{}]*\} ?)+")
_PIECE = re.compile(r"\\text\s*\{([^{}]*)\}")
_BASED = re.compile(r"\(?([0-9][0-9A-F]*)\)?_\{?([0-9]+)\}?")
_UNCLEAR = re.compile(
    r"[0-9] +[0-9]|\)\s*[0-9]|\\sqrt\s*\("
)  # math-verify drops the 0 of 5(0)1, and the root of \sqrt(
_CLOSED_AT_INFINITY = re.compile(r"\[\s*-?\s*\\infty|\\infty\s*\]")
_COLON = re.compile(r"[0-9.]+(?: ?: ?[0-9.]+)+")  # a time or a ratio
_TIME = re.compile(r"[0-9]+(?::[0-5][0-9])+")
_INDIAN = re.compile(r"[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?:\.[0-9]+)?")  # 12,34,567
# C, (C), C), C: a river, Option C. a river
_CHOICE = re.compile(
    r"(?:(?:option|choice) )?(?:\(([a-z])\)|\[([a-z])\]|([a-z])(?=$| ?[):]|\.\)|\.(?!\S)| \())(?:[):.\s]*)(.*)",
    re.IGNORECASE,
)
_OTHER_CHOICE = re.compile(
    r"(?i:or|and|not|is|,|;|/|&)\b|[,;/&+=*^-]|\(?[A-J][).:]|.*(?:\([A-J]\)|\b[A-J][):])|[A-J]$|(?:wrong|incorrect)$"
)
# 18 apples (10 red and 8 green)
_REMARK = re.compile(
    r"^([0-9.,]+ (?:\\text ?\{)?[a-zA-Z ]{3,}?\}?) ?\((?!.*\b(?:or|not|about|if|wrong)\b)(?=[^()]*[a-z]{3})[^()]*\)(\}?)$"
)


class Reading(NamedTuple):
    """An answer: cleaned (text), without its units (amount), that as `name = body`, and the value of a plain arithmetic body.

    unit: the units and words after the amount, percent among them. equation: whether it is an equation in unknowns, which
    defines nothing. kind: what it is if it is no mathematics to compute with.
    """

    text: str
    amount: str
    unit: str
    percent: bool
    name: str
    body: str
    equation: bool
    value: Value | None
    kind: Kind | None = None


@lru_cache(maxsize=4096)
def reading_of(answer: str) -> Reading:
    """Return the reading of an answer; later calls take it from a cache."""
    text = clean(answer)
    if PLAIN.fullmatch(text):
        return Reading(text, text, "", False, "", text, False, value(text))
    if kind := kind_of_answer(text):
        return Reading(text, text, "", False, "", text, False, None, kind)
    if total := compound(text):
        return Reading(text, str(total[0]), total[1], False, "", str(total[0]), False, total[0])
    text = _REMARK.sub(r"\1\2", text)
    amount, unit = apart(text)
    percent = amount.endswith("%")
    amount, unit = amount.rstrip("% "), f"percent {unit}".strip() if percent else unit
    named = _NAMED.match(amount) or _FUNCTION_OF.match(amount)
    name, body = (named[0].rstrip("= "), amount[named.end() :].strip()) if named else ("", amount)
    equation = not named and bool(_EQUALS.search(amount)) and not _LISTED.search(amount)
    if equation and not _UNKNOWN.search(amount):
        equation, body = False, amount.rpartition("=")[2].strip()
    return Reading(text, amount, unit, percent, name, body, equation, value(body))


_LISTED = re.compile(
    r",|;|\\text|\\in\b|\\begin|[<>]|\\[lgn]e\b|\b(?:and|or)\b|\\[a-z]+_\{[^{}]*="
)  # more than one equation, or no equation


def readable(answer: str) -> bool:
    """Return whether algebra should read the answer. "1 0" is not 10; math-verify needs seconds for 16 brackets."""
    text = reading_of(answer).amount if len(answer) <= MAX_LENGTH else ""
    depths = accumulate((character in "({[") - (character in ")}]") for character in text)
    return bool(text) and max(depths) <= MAX_NESTING and not _UNCLEAR.search(text)


# what can stand for a letter, an operator or a bracket, from the inside to the outside
_PARTS = [
    (re.compile(r"\\(?:d|t)?(?:frac|binom)\s*\{[^{}\\]+\}\s*\{[^{}\\]+\}|\\sqrt\s*(?:\[\w+\])?\s*\{[^{}\\]+\}"), "x"),
    (
        re.compile(
            r"(?<=[_^])\s*\{[^{}\\]+\}|\\(?:text|mathbb)\s*\{[^{}\\]*\}|\\circ|\\infty|\\emptyset|\\(?:pi|theta|alpha|beta)\b"
        ),
        "x",
    ),
    (re.compile(r"[-+]|\\pm(?![a-zA-Z])"), "-"),
    (re.compile(r"\\(?:cdot|times|le|ge|cup|cap|in|ne)(?![a-zA-Z])|[*/^_=<>,;:]"), "+"),
    (re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|ln|log)(?![a-zA-Z])|[!%' .]|\\(?=[{}])"), ""),
    (re.compile(r"[(\[][^()\[\]{}\\]*[)\]]|\{[^()\[\]{}\\]*\}"), "x"),
]
_SOUND = re.compile(r"-*[0-9a-zA-Z|]+(?:[-+]-*[0-9a-zA-Z|]+)*")


def sound(gold: str) -> bool:
    """Return whether a gold answer is surely well formed, so that algebra need not be asked whether it can be read."""
    reading, before = reading_of(gold), ""
    text = reading.body
    while text != before:
        before = text
        for pattern, part in _PARTS[:2]:
            text = pattern.sub(part, text)
    for pattern, part in _PARTS[2:]:
        text = pattern.sub(part, text)
    if len(gold) > MAX_LENGTH:
        return False
    return bool(_WORDS.fullmatch(reading.text) or _SOUND.fullmatch(_PARTS[-1][0].sub("x", text)))


def for_algebra(answer: str, gold: str) -> tuple[str, str]:
    """Return both answers in the form for algebra, and in the gold's unit. `x = 3` stands for 3, unless there are more equations
    or the names differ."""
    ours, theirs = reading_of(answer), reading_of(gold)
    other_names = ours.name and theirs.name and ours.name != theirs.name
    if "=" in ours.body or "=" in theirs.body or other_names:
        return ours.amount, theirs.amount
    times = factor(ours.unit, theirs.unit)
    if times in (1, None):
        return ours.body, theirs.body
    return f"({ours.body})\\cdot\\frac{{{times.numerator}}}{{{times.denominator}}}", theirs.body


def words(text: str) -> str:
    """Return the bare words of a text: `\\text{(C)}`, `(C)` and `c` give the same."""
    bare = re.sub(r"[(){}\s]+", " ", _PIECE.sub(r" \1 ", text)).casefold().strip(" .\"'")
    return re.sub(r"^an? (?=\w\w)", "", bare)


def choice_of(text: str) -> tuple[str, str] | None:
    """Return the letter of a choice and the text beside it: ("C", "a river") for `\\textbf{(C) }a river`; else None."""
    bare = re.sub(r"\s+", " ", _PIECE.sub(r"\1", re.sub(r"[{}]", "", _PIECE.sub(r" \1 ", text)))).strip(" .")
    choice = _CHOICE.fullmatch(bare)
    if not choice or _OTHER_CHOICE.match(choice[4]):
        return None
    return (choice[1] or choice[2] or choice[3]).upper(), choice[4].casefold().strip(" .()")


def _equal_choices(ours: str, gold: str) -> bool | None:
    """Compare answers where the gold is a letter, alone or with its text; a text counts if both have one."""
    theirs = choice_of(gold)
    if theirs is None or not "A" <= theirs[0] <= "J" or theirs[0] not in gold:
        return None
    if (mine := choice_of(ours)) is not None:
        return mine[0] == theirs[0] and (not mine[1] or not theirs[1] or mine[1] == theirs[1])
    return False if theirs[1] or re.search(r"\\text|[a-zA-Z]{2}", ours) else None


def _equal_amounts(ours: Reading, gold: Reading) -> bool | None:
    """Return whether two amounts are equal: 28 and 0.28 are both 28\\%, which is neither 0.28\\% nor 2800\\%."""
    if ours.value is None and gold.value is not None and _INDIAN.fullmatch(ours.body):
        ours = ours._replace(value=value(ours.body.replace(",", "")))
    if ours.value is None or gold.value is None or (ours.name and gold.name and ours.name != gold.name):
        return None
    times = factor(ours.unit, gold.unit)
    if times is None:  # two scales of temperature; other units that disagree do not get here
        return LARGE not in (ours.value, gold.value) and temperature(ours.value, ours.unit, gold.unit) == gold.value
    mine = ours.value if ours.value == LARGE else ours.value * times
    verdict = same(mine, gold.value)
    if verdict is False and ours.percent != gold.percent:
        x = mine / 100 if ours.percent else mine
        y = gold.value / 100 if gold.percent else gold.value
        verdict = same(x, y)
    return verdict


def _equal_colons(ours: Reading, gold: Reading) -> bool | None:
    """Compare times and ratios part by part: 0:45 is not 0:50, and 9:30 is not 3:10. A time is no number."""
    mine, theirs = (_COLON.fullmatch(reading.body) for reading in (ours, gold))
    times = [bool(_TIME.fullmatch(reading.body)) for reading in (ours, gold)]
    if mine and theirs and times[0] == times[1]:
        xs, ys = ([value(part.strip()) for part in match[0].split(":")] for match in (mine, theirs))
        return xs == ys
    return False if any(times) else None


def _items(text: str) -> tuple[str, list[Value | None]]:
    """Return the brackets around a list of numbers, and its values: `\\{1,2\\}` gives {} and 1, 2."""
    brackets = ""
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        brackets, text = text[0] + text[-1], text[1:-1]
    elif text.startswith("\\{") and text.endswith("\\}"):
        brackets, text = "{}", text[2:-2]
    return brackets, [value(item.strip()) for item in text.split(",")]


def _equal_lists(ours: str, gold: str) -> bool | None:
    """Compare lists: pairs and intervals are ordered, sets and bare lists not; a bare list may stand for any, in its order."""
    (left, xs), (right, ys) = _items(ours), _items(gold)
    if None in xs or None in ys or (max(len(xs), len(ys)) == 1 and "{}" not in (left, right)):
        return None
    if not {left, right} - {"", "{}"}:
        xs, ys = ([v for i, v in enumerate(vs) if v not in vs[:i]] for vs in (xs, ys))
        matches = [[same(x, y) for y in ys] for x in xs]
        if any(None in row for row in matches):
            return None
        return len(xs) == len(ys) and all(any(row) for row in matches)
    if (left != right and left and right) or len(xs) != len(ys):
        return False
    matches = [same(x, y) for x, y in zip(xs, ys, strict=True)]
    if False in matches:
        return False
    return None if None in matches else True


def equal(answer: str, gold: str) -> bool | None:
    """Return whether two answers are equal, without rounding and without algebra; None if it takes algebra to decide."""
    ours, theirs = reading_of(answer), reading_of(gold)
    if ours.text == theirs.text or without_text(ours.text) == without_text(theirs.text):
        return True
    bare = not (ours.unit or ours.percent or ours.name or theirs.unit or theirs.percent or theirs.name)
    if bare and ours.value is not None and theirs.value is not None:
        return same(ours.value, theirs.value)
    if (verdict := _equal_choices(ours.text, theirs.text)) is not None:
        return verdict
    if (ours.kind or theirs.kind) and (
        verdict := same_kind(ours.text, ours.kind, theirs.text, theirs.kind)
    ) is not None:
        return verdict
    if _WORDS.fullmatch(theirs.text):
        return words(ours.text) == words(theirs.text) or (None if several_words(theirs.text) else False)
    if theirs.text.isalpha() and len(theirs.text) > 2 and words(ours.text) == words(theirs.text):
        return True
    bases = [_BASED.fullmatch(reading.text.replace(" ", "")) for reading in (ours, theirs)]
    if any(bases):  # 5 is not 5_8: the question asks for a base
        return all(bases) and bases[0].groups() == bases[1].groups()
    if factor(ours.unit, theirs.unit) is None and temperature(Fraction(0), ours.unit, theirs.unit) is None:
        return False
    if theirs.equation and not _EQUALS.search(ours.amount):
        return False
    if _CLOSED_AT_INFINITY.search(ours.text) and not _CLOSED_AT_INFINITY.search(theirs.text):
        return False
    verdict = _equal_colons(ours, theirs)
    if verdict is None:
        verdict = _equal_amounts(ours, theirs)
    if verdict is None:
        verdict = _equal_lists(ours.amount, theirs.amount)
    return verdict
