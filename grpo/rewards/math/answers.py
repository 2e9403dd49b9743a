"""Extracts the answer that a completion claims, and compares it with the gold answer as far as exact arithmetic can.

Knows no algebra: if algebra is needed, `equal` returns None, and `grading` asks math-verify. Pure functions, linear in the text.
"""
# ruff: noqa: RUF001 - a part of this file replaces characters that look like others

import re
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from grpo.rewards.math.arithmetic import Value, same, value

MAX_LENGTH = 1000  # characters of an answer worth reading; longer ones are loops, and some take minutes
MAX_NESTING = 10  # of brackets, where algebra is needed

# <|im_end|> and its like
_SPECIAL = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>|</?(?:s|answer)>|<(?:eos|pad|end_of_turn)>|\[/?INST\]")
_BRACE = re.compile(r"\\f?box(?:ed)?(?:\s*\{| *(-?[0-9][0-9.,/]{0,99}))|\\\\(?![a-z])|\\[{}]|[{}]")
_HASHES = re.compile(r"(?<!#)####+([^\n#]+)")


def boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} or \\fbox{...}, the innermost of nested ones.

    Empty, unclosed and overlong boxes do not count. `\\boxed 7` is TeX too, and occurs in MATH.
    """
    answer, latest = None, -1
    opened: list[tuple[int, bool]] = []  # the braces that are open, and whether each is a box
    for match in _BRACE.finditer(text):
        if match[1]:
            answer, latest = match[1], match.start()
        elif match[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box and start > latest:
                latest = start
                if match.start() - start <= MAX_LENGTH:
                    answer = text[start : match.start()].strip() or answer
        elif match[0][-1] == "{" and match[0] != "\\{":
            opened.append((match.end(), match[0] != "{"))
    return answer


def extract_answer(text: str) -> str | None:
    """Return the answer that a completion claims: after the last `</think>`, the last box, else the last `#### ...`; else None.

    The last one counts, so that a corrected answer is judged by its correction. An unclosed <think> claims nothing yet.
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    if (answer := boxed(text)) is not None:
        return answer
    for line in reversed(_HASHES.findall(text)):  # the text after <|eot_id|> is another turn
        answer = next(filter(None, map(str.strip, _SPECIAL.split(line))), "")
        if 0 < len(answer) <= MAX_LENGTH and answer.strip("*_ "):
            return answer
    return None


# inline mathematics, as Markdown delimits it (not "$18 and $20"), or a number
_LOOSE = re.compile(
    r"\$(?![\s$])([^$\n]{1,200}?)(?<!\s)\$(?!\d)|\\\((.{1,200}?)\\\)"
    r"|((?<![\w.)}])-)?(?<!\w)(?<!\d\.)((?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+)(?:/\d+)?%?)"
)


def loose_answer(text: str) -> str | None:
    """Return the text that a reader would take for the answer: the result of `extract_answer`, else the last box, else the
    last formula or number, anywhere in the text."""
    if (answer := extract_answer(text) or boxed(text)) is not None:
        return answer
    found = [*_LOOSE.finditer(text)][-1:]
    if not found:
        return None
    formula = found[0][1] or found[0][2]
    return formula.strip() if formula else (found[0][3] or "") + found[0][4]


# One spelling for mathematics that is written in many ways.

_CHARACTERS = str.maketrans(
    {full: full - 0xFEE0 for full in range(0xFF01, 0xFF5F)}  # full-width digits, brackets, signs
    | dict.fromkeys("−–—﹣", "-")
    | dict.fromkeys("\u00a0\u3000\t\r\n", " ")
    | dict.fromkeys("\u2005\u2006\u2009\u202f", "\\,")
    | dict.fromkeys("\u200b\u2060\ufeff\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069`£€¥₹¢", None)
    | {"½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "÷": "/", "°": "^\\circ "}
    | {"π": "\\pi ", "θ": "\\theta ", "∞": "\\infty ", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "±": "\\pm "}
    | {"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset "}
)


def _repeating(whole: str, once: str, again: str) -> str:
    """0.1\\overline{6} is (16 - 1)/90."""
    first = whole + once
    return f"\\frac{{{int(first + again) - int(first or 0)}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SMALL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉", "0123456789-0123456789")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"[⁰¹²³⁴-⁹⁻]+", lambda match: f"^{{{match[0].translate(_SMALL)}}}"),
        (r"[₀-₉]+", lambda match: f"_{{{match[0].translate(_SMALL)}}}"),
        (r"(?:√|(?<![\\a-zA-Z])sqrt)\s*(?:\(([^()]*)\)|([0-9]+(?:\.[0-9]+)?|[a-z]))", r"\\sqrt{\1\2}"),
        (r"√", r"\\sqrt"),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?|\\displaystyle|(?<!\\)\\!\s*|\\?\$|\bUSD\b", ""),
        (r"\\(?:tiny|small|[lL]arge|LARGE|[hH]uge|bf|it|rm|bm|boldsymbol|underline|pounds|checkmark)(?![a-zA-Z])", ""),
        (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
        (r"(?i)\b(?:the )?(?:final )?answer(?: is)?[:\s]+", ""),
        (r"\\text\s*\{\s*\}", ""),
        (r"^\\text\s*\{\s*(-?[0-9][^{}]*)\}$", r"\1"),
        (r"(?<![\w)}])\*\*([^*]*)\*\*|^\*\*|\*\*\.?$", r"\1"),  # bold, not a power
        (r"\\[lr]brace(?![a-zA-Z])", lambda match: "\\{" if match[0][1] == "l" else "\\}"),
        (r"^\\\{\s*[a-z]\s*(?:\\mid(?![a-zA-Z])|[:|])(.*)\\\}$", r"\1"),  # {x | x < 2}
        (r"\\\{\s*\\\}", r"\\emptyset"),
        (r"\\R(?![a-zA-Z])|\\mathbb\s*R", r"\\mathbb{R}"),
        (r"\\backslash", r"\\setminus"),
        (r"\\(?:operatorname|mathrm)\s*\{((?:arc)?(?:sin|cos|tan)|ln|log|exp)\}", r"\\\1 "),
        (r"(?<![\\a-zA-Z])(pi|(?:arc)?(?:sin|cos|tan)|ln|log)(?![a-zA-Z])", r"\\\1"),
        (r"\{,\}", ","),
        (r"\\mathrm\s*\{\s*([eid])\s*\}", r"\1"),
        (r"\\(?:text(?:bf|it|rm|sf|tt|sc|normal)|emph|mbox|hbox|math(?:rm|bf|it|sf|tt))(?![a-zA-Z])", r"\\text"),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\langle", "("),
        (r"\\rangle", ")"),
        (r"\\varnothing", r"\\emptyset"),
        (r"\\log_\{?e\}?(?![a-zA-Z])", r"\\ln"),
        (r"\*\*", "^"),
        (
            r"(?<![\w.,^])[1-9][0-9]{0,2}(?:(?:\\[,;: ]|[ ~])[0-9]{3})+(?![0-9])",
            lambda match: re.sub(r"\D", "", match[0]),
        ),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\frac\s*([0-9a-z])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9a-z])", r"\1{\2}"),
        (r"\\sqrt\s*([0-9a-z])", r"\\sqrt{\1}"),
        (r"\\([lgn]e)q?(?:slant)?(?![a-zA-Z])", r"\\\1 "),
        (r"\s*(?:\\%|\\text\s*\{\s*(?:percent|%|\\%)\s*\}|(?<![a-zA-Z])per ?cent\b)", "%"),
        (r"\\deg(?:ree)?(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
        (r"(\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)([0-9.]+)\s*\^\\circ", r"\1\\frac{\2\\pi}{180}"),
        (r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{([0-9]{1,50})\}", lambda match: _repeating(*match.groups())),
        (
            r"(?<=[0-9])\s*(?:\\text\s*\{\s*)?(thousand|million|billion|trillion)\b\s*\}?",
            lambda match: f"\\cdot 10^{{{_ZEROS[match[1]]}}}",
        ),
        (r"\s+", " "),
    ]
]
_INTEGER = re.compile(r"[0-9]+")
_WRAPPED = re.compile(r"\\\((.*)\\\)|\\\[(.*)\\\]|\*\*(.*)\*\*")


def clean(text: str) -> str:
    """Return the same mathematics in plain LaTeX: no decoration, no thin spaces, and no braces left out."""
    if _INTEGER.fullmatch(text):
        return text
    text = _SPECIAL.sub("", text).translate(_CHARACTERS).strip()
    if match := _WRAPPED.fullmatch(text):
        text = next(inside for inside in match.groups() if inside is not None)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip(" =*_").rstrip(".,;: \\*_")


# Units and signs after a number.

# also without a space, as in 10cm
_SHORT = "cm|mm|km|ft|kg|mg|lbs?|oz|in|mi|yd|sq|hrs?|m[lL]|mph|[aApP]\\.?[mM]|st|nd|rd|th"
_NO_UNIT = (
    "sin|cos|tan|cot|sec|csc|arc[a-z]+|log|ln|exp|sqrt|pi|theta|alpha|beta|mod|and|or|inf|infinity|hundred|dozen|choose"
)
_UNITS = re.compile(
    r"(?<=[0-9}])(?:\s*\^\s*\\circ\s*[CFK]?\b|"  # after a number, or a fraction
    rf"(?:\s*-?\s*(?:{_SHORT})\b|[ -](?!(?:{_NO_UNIT})\b)(?:[mgshL]|of|[a-zA-Z]{{3,}})\b)"
    r"(?:[ /.]+[a-zA-Z]+)*\.?(?:\s*\^\s*\{?[0-9]\}?)?)$"
    r"|(?<=[0-9a-zA-Z)}\]])(?:\s*(?:/|\\cdot)?\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?-?[0-9]\}?)?)+$"
)
_NAMED = re.compile(r"(\\?[a-zA-Z]+(?:_(?:\w|\{\w+\}))?)\s*=")  # but not \sum_{k=
# \text{Evelyn}, but not \text{5 apples}
_WORDS = re.compile(r"(?=\\text\s*\{[\s(]*[a-zA-Z])(?:\\text\s*\{[^{}]*\} ?)+")
_PIECE = re.compile(r"\\text\s*\{([^{}]*)\}")
_BASED = re.compile(r"\(?([0-9][0-9A-F]*)\)?_\{?([0-9]+)\}?")
_APART = re.compile(r"[0-9] +[0-9]")
_POWER = re.compile(r"\^\s*\{?(-?[0-9])\}?$")
_CLOSED_AT_INFINITY = re.compile(r"\[\s*-?\s*\\infty|\\infty\s*\]")


class Reading(NamedTuple):
    """An answer: cleaned (text), without its units (amount), that as `name = body`, and the value of a plain arithmetic body."""

    text: str
    amount: str
    percent: bool
    name: str
    body: str
    value: Value | None


@lru_cache(maxsize=4096)
def reading_of(answer: str) -> Reading:
    """Return the reading of an answer; later calls take it from a cache."""
    text = clean(answer)
    amount = _UNITS.sub("", text).strip()
    percent = amount.endswith("%")
    amount = amount.rstrip("% ")
    named = _NAMED.match(amount)
    name, body = (named[1], amount[named.end() :].strip()) if named else ("", amount)
    return Reading(text, amount, percent, name, body, value(body))


def readable(answer: str) -> bool:
    """Return whether algebra should read the answer. "1 0" is not 10, and math-verify needs seconds for 16 brackets."""
    text = reading_of(answer).amount if len(answer) <= MAX_LENGTH else ""
    depths = accumulate((character in "({[") - (character in ")}]") for character in text)
    return bool(text) and max(depths) <= MAX_NESTING and not _APART.search(text)


def without_names(answer: str, gold: str) -> tuple[str, str]:
    """Return both for algebra: `x = 3` stands for 3, unless there are more equations or the names differ."""
    ours, theirs = reading_of(answer), reading_of(gold)
    equations = "=" in ours.body or "=" in theirs.body or (ours.name and theirs.name and ours.name != theirs.name)
    return (ours.amount, theirs.amount) if equations else (ours.body, theirs.body)


def words(text: str) -> str:
    """Return the bare words of a text: `\\text{(C)}`, `(C)` and `c` give the same."""
    bare = re.sub(r"[(){}\s]+", " ", _PIECE.sub(r" \1 ", text)).casefold().strip(" .\"'")
    return re.sub(r"^an? (?=\w\w)", "", bare)


def _equal_amounts(ours: Reading, gold: Reading) -> bool | None:
    """Return whether two amounts are equal: 28 and 0.28 are both 28\\%, which is neither 0.28\\% nor 2800\\%."""
    if ours.value is None or gold.value is None or (ours.name and gold.name and ours.name != gold.name):
        return None
    known = same(ours.value, gold.value)
    if known is False and ours.percent != gold.percent:
        x, y = (r.value / 100 if r.percent else r.value for r in (ours, gold))
        known = same(x, y)
    return known


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
        if any(known is None for row in matches for known in row):
            return None
        return len(xs) == len(ys) and all(any(row) for row in matches)
    if (left != right and left and right) or len(xs) != len(ys):
        return False
    known = [same(x, y) for x, y in zip(xs, ys, strict=True)]
    return False if False in known else None if None in known else True


def equal(answer: str, gold: str) -> bool | None:
    """Return whether two answers are equal, without rounding and without algebra; None if it takes algebra to decide."""
    ours, theirs = reading_of(answer), reading_of(gold)
    if ours.text == theirs.text:
        return True
    if _WORDS.fullmatch(theirs.text):
        return words(ours.text) == words(theirs.text)
    if theirs.text.isalpha() and len(theirs.text) > 2 and words(ours.text) == words(theirs.text):
        return True
    bases = [_BASED.fullmatch(reading.text.replace(" ", "")) for reading in (ours, theirs)]
    if any(bases):  # 5 is not 5_8: the question asks for a base
        return all(bases) and bases[0].groups() == bases[1].groups()
    powers = [_POWER.search(reading.text.removeprefix(reading.amount)) for reading in (ours, theirs)]
    if all(powers) and powers[0][1] != powers[1][1]:  # cm^2 and cm^3; a unit may be left out
        return False
    if _CLOSED_AT_INFINITY.search(ours.text) and not _CLOSED_AT_INFINITY.search(theirs.text):
        return False
    known = _equal_amounts(ours, theirs)
    return _equal_lists(ours.amount, theirs.amount) if known is None else known
