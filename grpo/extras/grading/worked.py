"""Tells a worked-out answer, as 71, from a calculation that was left undone, as 7+8*8. Text in, bool out.

`grading` asks whether two answers are mathematically equal, and 7+8*8 equals 71. A policy that is paid for 7+8*8 never learns to
calculate, so the reward `correct` asks here too.
"""

import re

from grpo.extras.grading.answers import clean, reading_of

_NUMBER = r"[-+]?\s*(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_POWER = r"\s*\^\s*(?:\{\s*-?[0-9]+\s*\}|[0-9]+)"
_SCIENTIFIC = rf"{_NUMBER}\s*(?:\\cdot|\\times|\*)\s*10{_POWER}|[0-9]+{_POWER}"  # 6.7*10^{-5}, and 2^{10}
_BRACKETS = re.compile(r"\s*(?:\\\{|(?:\\text\s*)?[({])(.*?)(?:\\\}|[)}])\s*")
_FRACTION = re.compile(r"\\frac|/")
_PLAIN = re.compile(rf"(?:{_NUMBER}|{_SCIENTIFIC})\s*")
_DOLLARS = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_TRIVIAL = re.compile(r"[\w.,%\s-]*")  # a number or a word may stand in the question, and be the answer too


def unworked(answer: str, gold: str) -> bool:
    """Return whether the gold answer is one number, and the answer, which equals it, a calculation.

    Powers are numbers, since 2^{10} is often the best form. A fraction is a calculation if the gold answer is none: 48/2 for 24.
    An equation is what its right side is.
    """
    right = reading_of(gold)
    body = reading_of(answer).body.rpartition("=")[2]
    if not _PLAIN.fullmatch(right.body) or right.percent:
        return False
    while bracketed := _BRACKETS.fullmatch(body):
        body = bracketed[1]
    if "." in right.body and _FRACTION.search(body):  # 1/2 for 0.5
        body = re.sub(r"\\frac|[{}/]", " ", body).strip()
        return not re.fullmatch(r"-?\s*[0-9]+(?:\s+[0-9]+){1,2}", body)
    return not _PLAIN.fullmatch(body)


def copied(answer: str, gold: str, question: str) -> bool:
    """Return whether the answer, which equals the gold answer but is written otherwise, is a part of a formula of the question.

    Spaces do not count. A bare number or word is no formula.
    """
    ours = _squeezed(answer)
    if ours == _squeezed(gold) or _TRIVIAL.fullmatch(ours):
        return False
    formulas = (next(filter(None, match.groups())) for match in _DOLLARS.finditer(question))
    return any(ours in _squeezed(formula) for formula in formulas)


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", clean(text))
