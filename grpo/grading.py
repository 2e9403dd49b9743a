"""Layer 1 - is this answer right? Extraction is ours, mathematics is math-verify's. Text in, reward out.

Simplified: `is_correct` runs in the calling thread, which must be the main one, because math-verify's time limit is an
alarm signal. Plain numbers, nearly every answer of a word problem, never get that far.
"""

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache

from grpo.rl import Reward

MAX_LENGTH = 1000  # characters of an answer worth parsing; longer ones are loops, and some take minutes
MAX_NESTING = 10  # depth 16 already costs seconds
TIME_LIMIT = 3  # whole seconds: math-verify swallows a float, and then everything is wrong in silence

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?(/\d+)?")
_UNITS = re.compile(r"\\(?:text|mathrm)\{[^{}]*\}\s*$|\\[!,;: ]|\\%|%|\\\$|\$|\s+$")


def boxed(text: str) -> str | None:
    """The content of the last balanced, non-empty \\boxed{...} (or \\fbox), None if there is none."""
    for match in reversed(list(_BOX.finditer(text))):
        depth = 1
        for end in range(match.end(), min(len(text), match.end() + MAX_LENGTH)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[match.end() : end].strip() or None
    return None


def extract_answer(text: str) -> str | None:
    """What a completion claims: after the last `</think>`, the last box, else the last `#### ...`.

    The last one counts: an answer that was corrected on the way is judged by its correction.
    """
    text = text.rpartition("</think>")[2]
    if (answer := boxed(text)) is not None:
        return answer
    lines = _HASHES.findall(text)
    return lines[-1].strip().removesuffix(".") or None if lines else None


def number(text: str) -> Fraction | None:
    """The exact value of a plain number: sign, thousands commas, decimals, a/b, $ or % around it. Else None."""
    text = _UNITS.sub("", text.strip()).strip().removesuffix(".")
    match = _NUMBER.fullmatch(text)
    if not match or not (match[1] or match[3]):
        return None
    numerator, _, denominator = text.replace(",", "").partition("/")
    try:
        return Fraction(Decimal(numerator)) / Fraction(denominator or 1)
    except (InvalidOperation, ZeroDivisionError):
        return None


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest


@lru_cache(maxsize=65536)
def is_correct(answer: str | None, gold: str) -> bool:
    """Whether `answer` equals `gold` as mathematics. None, overlong and over-nested answers are wrong.

    Raises TimeoutError where math-verify does not finish in TIME_LIMIT seconds: a verdict nobody reached is not a 0. What
    it cannot read is wrong if the model wrote it, and raised if it is `gold`.
    """
    if answer is None or len(answer) > MAX_LENGTH or _nesting(answer) > MAX_NESTING:
        return False
    if answer.strip() == gold.strip():
        return True
    ours, theirs = number(answer), number(gold)
    if ours is not None and theirs is not None:
        return ours == theirs
    from math_verify import parse, verify  # slow to import, and mostly not needed
    from math_verify.errors import TimeoutException

    wanted = parse(f"${gold}$", parsing_timeout=TIME_LIMIT, raise_on_error=True)
    try:
        got = parse(f"${answer}$", parsing_timeout=TIME_LIMIT, raise_on_error=True)
        return bool(verify(wanted, got, timeout_seconds=TIME_LIMIT, raise_on_error=True))
    except TimeoutException as error:
        raise TimeoutError(f"math-verify needs more than {TIME_LIMIT} s for {answer!r} against {gold!r}") from error
    except Exception:  # a policy writes anything, and sympy raises anything
        return False


def grade(text: str, gold: str, format_reward: float = 0.0) -> Reward:
    """1 for a text whose answer equals `gold`, plus format_reward for an answer in the form that `extract_answer` reads.

    parts: format, and timeout, which is 1 where nobody could tell in time: then the reward is NaN, not 0.
    """
    answer = extract_answer(text)
    has_answer = float(answer is not None)
    try:
        correct = is_correct(answer, gold)
    except TimeoutError:
        return Reward(float("nan"), False, {"format": has_answer, "timeout": 1.0})
    return Reward(correct + format_reward * has_answer, correct, {"format": has_answer, "timeout": 0.0})
