"""Grades an answer: extraction and arithmetic are done here, algebra by math-verify. Text in, verdict out.

Plain numbers, which are nearly all answers of word problems, are graded in this process, in microseconds. The rest goes to
worker processes, because math-verify and sympy may take minutes and gigabytes, and use the alarm signal.
"""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from grpo.env.types import Outcome
from grpo.rewards.math.answers import MAX_LENGTH, equal, readable, reading_of, without_names
from grpo.system.workers import WorkerError, Workers

DEADLINE = 4.5  # seconds, without those in which a worker waits for a core; real answers take 0.4 at most
ALARM = 3.0  # seconds that a worker computes in each step
MEMORY = 2**30  # bytes of a worker
WORKERS = min(4, os.cpu_count() or 1)

_COMMAND = re.compile(r"\\text\s*\{[^{}]*\}|\\(?:begin|end|mathbb)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")


def by_algebra(answer: str, gold: str) -> Outcome:
    """Return whether math-verify finds two cleaned answers equal. Runs in a worker.

    An answer that it cannot read is wrong; a gold answer that it cannot read raises.
    """
    from math_verify import verify
    from math_verify.errors import TimeoutException

    try:
        theirs = _parse(gold)
        try:
            ours = _parse(answer)
            if _differ(ours, theirs) or (not getattr(ours, "is_Symbol", False) and _other_case(answer, gold)):
                return "wrong"
            with _alarm(ALARM):
                return _OUTCOME[verify(theirs, ours, **_EXACTLY)]
        except MemoryError:
            raise
        except Exception:  # a policy may write anything, and sympy may raise anything
            return "wrong"
    except TimeoutException:
        return "timeout"


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutException in a `with` block that computes for longer. Waiting for a core is not computing."""
    from math_verify.errors import TimeoutException

    def ring(*_) -> None:
        raise TimeoutException

    signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _parse(text: str):
    """Return a sympy object. Decimals become fractions, so that nothing is rounded; i is the imaginary unit."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import FiniteSet, I, Union
    from sympy.core.relational import Relational

    exact = _DECIMAL.sub(lambda d: f"\\frac{{{int(d[1] + d[2])}}}{{{10 ** len(d[2])}}}", text)
    spelling = NormalizationConfig(units=False, malformed_operators=True, boxed="none")  # units=True reads 4s as 4
    only_latex = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=spelling)
    with _alarm(ALARM):
        found = parse(
            f"${exact}$", [only_latex], "no_fallback", "first_match", parsing_timeout=None, raise_on_error=True
        )
    if not found:
        raise ValueError(f"math-verify cannot read {text!r}")
    found = found[0]
    relations = isinstance(found, FiniteSet) and all(isinstance(item, Relational) for item in found.args)
    if relations and len(found.free_symbols) == 1:
        return Union(*(item.as_set() for item in found.args))  # x < 2 or x > 3
    units = {symbol: I for symbol in found.free_symbols if symbol.name == "i"}
    return found.subs(units) if units and not isinstance(found, Relational) else found


def _other_case(answer: str, gold: str) -> bool:
    """Return whether one has an R where the other has an r: math-verify reads both as r."""
    ours, theirs = ({*_COMMAND.sub(" ", text)} for text in (answer, gold))
    return any(letter.swapcase() in theirs - ours for letter in ours - theirs if letter not in "eEiI")


def _differ(ours, theirs) -> bool:
    """Return whether two expressions have different values at some point.

    If so, they are not equal, and sympy need not simplify (sin x + cos x)^1000 to find out.
    """
    from math_verify.errors import TimeoutException
    from sympy import Expr, Integral, Limit, Product, Rational, Sum

    names = sorted({symbol.name for symbol in ours.free_symbols | theirs.free_symbols})

    @_alarm(1.0)
    def at_a_point(expression):
        point = {symbol: Rational(137 + 61 * names.index(symbol.name), 101) for symbol in expression.free_symbols}
        return expression.evalf(15, subs=point)

    if not (isinstance(ours, Expr) and isinstance(theirs, Expr)) or ours.is_Symbol or theirs.is_Symbol:
        return False  # math-verify reads a word as one symbol, or as the product of its letters
    rough = any(expression.has(Sum, Product, Integral, Limit) for expression in (ours, theirs))
    tolerance = 0.1 if rough else 1e-9  # their numerical values may be far off
    try:
        x, y = at_a_point(ours), at_a_point(theirs)
        return bool(abs(x - y) > tolerance * (1 + abs(x) + abs(y)))  # raises if one of them is not a number
    except (Exception, TimeoutException):
        return False


_OUTCOME: dict[bool, Outcome] = {True: "right", False: "wrong"}
_EXACTLY = {
    "numeric_precision": 50,  # digits; with 15, sqrt(2) 10^-20 equals sqrt(3) 10^-20
    "allow_set_relation_comp": True,  # x <= 2 is an answer to (-oo, 2]
    "timeout_seconds": None,  # its own alarm counts the seconds in which a worker waits for a core
    "raise_on_error": True,
}
ALGEBRA = Workers(f"{__name__}.by_algebra", WORKERS, DEADLINE, MEMORY, warm_up=("x+1", "1+x"))


@lru_cache(maxsize=16384)
def _decide(answer: str, gold: str) -> Outcome:
    """Return the verdict. Raises TimeoutError and WorkerError, so that the cache holds only verdicts."""
    if not reading_of(gold).text:
        raise WorkerError("there is no gold answer")
    if len(answer) <= MAX_LENGTH and (known := equal(answer, gold)) is not None:
        return _OUTCOME[known]
    ours, theirs = without_names(answer, gold) if readable(answer) else ("", reading_of(gold).amount)
    outcome = ALGEBRA.call(ours, theirs)
    if outcome == "timeout":
        raise TimeoutError
    return outcome


def verdict(answer: str | None, gold: str) -> Outcome:
    """Return whether `answer` mathematically equals `gold`, from any thread, within DEADLINE once a worker is free.

    None is no_answer. Overlong, over-nested and unreadable answers are wrong; an unreadable `gold` is an error. timeout and
    error are no verdicts: never count them as wrong.
    """
    if answer is None:
        return "no_answer"
    try:
        return _decide(answer, gold)
    except TimeoutError:
        return "timeout"
    except WorkerError:
        return "error"
