"""Compares two answers by algebra: math-verify reads them, `exact` compares the numbers in them. Text in, verdict out.

Runs in a worker: math-verify and sympy may take minutes and gigabytes, and use the alarm signal.
"""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import math_verify.grader as comparing
import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from sympy import Eq, Expr, Rational, simplify
from sympy.core.relational import Relational

from grpo.env.types import Outcome
from grpo.extras.grading.exact import MOST_BITS, ROUGH, same_number, size
from grpo.extras.grading.forms.structure import items_of

ALARM = 3.0  # seconds that a worker computes in each step

_COMMAND = re.compile(r"\\text\s*\{[^{}]*\}|\\(?:begin|end|mathbb)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_AND = re.compile(r"\band\b|\\(?:land|wedge)\b")
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")
# {n pi : n in Z}, or x = n pi, n in Z: the expressions, the unknown that they are for, and its domain
_FAMILY = re.compile(
    r"(?:\\\{ ?)?(?:([a-zA-Z](?:_\w)?|\\[a-z]+) ?(?:=|\\in) ?)?(?:\\\{ ?)?([^:;|]*?),? ?"
    r"(?::|;|\||\\mid|,|\(|\\text ?\{ ?(?:for|where|with)[a-z ]*\}) ?(?:\\forall ?)?"
    r"([a-z]) ?\\in ?\\mathbb ?\{([ZN])\} ?\)?(?: ?\\\})?"
)
_OUTCOME: dict[bool, Outcome] = {True: "right", False: "wrong"}


def by_algebra(answer: str, gold: str) -> Outcome:
    """Return whether math-verify finds two cleaned answers equal.

    An answer that it cannot read is wrong; a gold answer that it cannot read raises.
    """
    try:
        if family := _FAMILY.fullmatch(gold):
            return _OUTCOME[_same_family(_FAMILY.fullmatch(answer), family)]
        theirs = _parse(gold)
        if not answer:
            return "wrong"
        try:
            ours = _parse(answer)
            with _alarm(ALARM):
                (ours, our_name), (theirs, name) = _solved(ours, answer), _solved(theirs, gold)
            if our_name and name and our_name != name:
                return "wrong"
            if _differ(ours, theirs) or _other_letters(answer, gold, getattr(ours, "is_Symbol", False)):
                return "wrong"
            with _alarm(ALARM):
                if _is_equation(ours) and _is_equation(theirs):
                    return _OUTCOME[same_equation(ours, theirs)]
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
    exact = _DECIMAL.sub(lambda d: f"\\frac{{{int(d[1] + d[2])}}}{{{10 ** len(d[2])}}}", text)
    spelling = NormalizationConfig(units=False, malformed_operators=True, boxed="none")  # units=True reads 4s as 4
    only_latex = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=spelling)
    with _alarm(ALARM):
        options = {"parsing_timeout": None, "raise_on_error": True}
        readings = parse(f"${exact}$", [only_latex], "no_fallback", "first_match", **options)
    if not readings:
        raise ValueError(f"math-verify cannot read {text!r}")
    value = readings[0]
    units = {symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"}
    return value.subs(units) if units and not isinstance(value, Relational) else value


def _same_family(ours: re.Match | None, gold: re.Match) -> bool:
    """Return whether two families have the same members: 2n+1 and 2k-1 for all integers, but not for all natural numbers."""
    if ours is None or ours[4] != gold[4]:
        return False
    members, theirs = (
        [_parse(item).subs(sympy.Symbol(x[3], real=True), _N) for item in items_of(x[2])] for x in (ours, gold)
    )
    return all(any(_same_members(x, y, gold[4]) for y in theirs) for x in members) and all(
        any(_same_members(x, y, gold[4]) for x in members) for y in theirs
    )


_N = sympy.Symbol("n", integer=True)


def _same_members(x: Expr, y: Expr, domain: str) -> bool:
    steps = [simplify(item.subs(_N, _N + 1) - item) for item in (x, y)]
    if domain != "Z" or any(step.has(_N) or step == 0 for step in steps):
        return simplify(x - y) == 0
    offset = simplify((x - y).subs(_N, 0) / steps[1])
    return bool(simplify(steps[0] ** 2 - steps[1] ** 2) == 0 and offset.is_integer)


def _solved(x, text: str):
    """Return the set of an inequality in one unknown, or of several, and the unknown; else what is given, and nothing.

    x > 2 and x < 3 is an intersection, and so is a list with x != 3; x < 2 or x > 3 is a union.
    """
    each = x.args if isinstance(x, sympy.FiniteSet) else (x,)
    simple = all(isinstance(item, Relational | sympy.And) and not isinstance(item, Eq) for item in each)
    if isinstance(x, sympy.And) and len(x.free_symbols) > 1 and not x.has(Eq):
        return sympy.FiniteSet(*(part.reversed if part.rel_op in (">", ">=") else part for part in x.args)), None
    if not simple or not each or len(x.free_symbols) != 1:
        return x, None
    (unknown,) = x.free_symbols
    apart = _AND.search(text) or any(item.has(sympy.Ne) for item in each)
    joined = sympy.Intersection if apart else sympy.Union
    try:
        found = joined(*(_interval(item, unknown) for item in each))
    except NotImplementedError:
        return x, None
    return found, unknown


def _interval(x, unknown) -> sympy.Set:
    if isinstance(x, sympy.And):
        return sympy.Intersection(*(_interval(part, unknown) for part in x.args))
    if isinstance(x, sympy.Ne):
        return sympy.Complement(sympy.S.Reals, sympy.solveset(x.lhs - x.rhs, unknown, sympy.S.Reals))
    return sympy.solveset(x, unknown, sympy.S.Reals)


def _is_equation(x) -> bool:
    return isinstance(x, Eq) and all(isinstance(side, Expr) for side in x.args)


def _other_letters(answer: str, gold: str, word: bool) -> bool:
    """Return whether one has an R where the other has an r, or f' where the other has f: math-verify reads both alike."""
    if answer.count("'") != gold.count("'"):
        return True
    if word:
        return False
    ours, theirs = ({*_COMMAND.sub(" ", text)} for text in (answer, gold))
    return any(letter.swapcase() in theirs - ours for letter in ours - theirs if letter not in "eEiI")


def _differ(ours, theirs) -> bool:
    """Return whether two expressions have different values at some point.

    If so, they are not equal, and sympy need not simplify (sin x + cos x)^1000 to find out.
    """
    names = sorted({symbol.name for symbol in ours.free_symbols | theirs.free_symbols})

    @_alarm(1.0)
    def at_a_point(expression):
        symbols = expression.free_symbols
        point = {symbol: Rational(137 + 61 * names.index(symbol.name), 101) for symbol in symbols}
        return expression.evalf(15, subs=point)

    if not (isinstance(ours, Expr) and isinstance(theirs, Expr)) or ours.is_Symbol or theirs.is_Symbol:
        return False  # math-verify reads a word as one symbol, or as the product of its letters
    if not names or size(ours) + size(theirs) > MOST_BITS:
        return False  # `same_number` decides
    rough = ours.has(*ROUGH) or theirs.has(*ROUGH)
    tolerance = 0.1 if rough else 1e-9  # their numerical values may be far off
    try:
        x, y = at_a_point(ours), at_a_point(theirs)
        sure = all(part == 0 or part._prec > 30 for value in (x, y) for part in value.as_real_imag())
        bound = tolerance * (int(rough) + abs(x) + abs(y))
        return sure and bool(abs(x - y) > bound)  # raises if one is not a number
    except (Exception, TimeoutException):
        return False


def _percent(x) -> bool:
    return isinstance(x, sympy.Mul) and sympy.UnevaluatedExpr(Rational(1, 100)) in x.args


def _numeric(a, b, float_rounding: int, numeric_precision: int) -> bool:
    """Return whether two expressions are equal as far as numbers decide it, in place of math-verify's function, which rounds.

    Its own function still takes matrices apart, and knows percent.
    """
    if not (isinstance(a, Expr) and isinstance(b, Expr)) or _percent(a) or _percent(b):
        return _by_math_verify(a, b, float_rounding, numeric_precision)
    if a.free_symbols or b.free_symbols:
        if size(a) + size(b) > MOST_BITS:
            raise TimeoutException
        return (a.doit() - b.doit()).doit() == 0
    same = same_number(a, b)
    if same is None:
        raise TimeoutException
    return same


def _symbolic(a, b) -> bool:
    """Return whether the difference simplifies to zero, in place of math-verify's function. `_numeric` has decided on numbers."""
    scalars = isinstance(a, Expr) and isinstance(b, Expr) and not (_percent(a) or _percent(b))
    if scalars and not (a.free_symbols or b.free_symbols):
        return False
    if _by_simplifying(a, b):
        return True
    unknowns = sympy.ordered(a.free_symbols | b.free_symbols) if scalars else ()
    return scalars and len(a.free_symbols | b.free_symbols) <= 3 and _same_for_reals(a, b, [*unknowns])


def _same_for_reals(a: Expr, b: Expr, unknowns: list) -> bool:
    """Return whether two expressions have the same real values: sqrt(1/n) and 1/sqrt(n) have none for negative n."""
    names = [sympy.Dummy(positive=True) for _ in unknowns]
    for signs in product((1, -1), repeat=len(names)):
        point = [(old, sign * new) for old, sign, new in zip(unknowns, signs, names, strict=True)]
        x, y = a.subs(point), b.subs(point)
        same = simplify(x - y) == 0 or (-1 in signs and x.is_real is False and y.is_real is False)
        if not same:
            return False
    return True


_by_math_verify, _by_simplifying = comparing.sympy_numeric_eq, comparing.sympy_symbolic_eq
comparing.sympy_numeric_eq, comparing.sympy_symbolic_eq = _numeric, _symbolic


def same_equation(ours: Eq, gold: Eq) -> bool:
    """Return whether two equations have the same solutions: one is a multiple of the other, or both have the same solutions for
    each unknown. An identity, which everything solves, must be written alike."""
    p, q = (sympy.fraction(sympy.together((x.lhs - x.rhs).doit()))[0] for x in (ours, gold))
    if not (isinstance(p, Expr) and isinstance(q, Expr)) or not (p := simplify(p)) or not (q := simplify(q)):
        return ours == gold
    if p.free_symbols != q.free_symbols:
        return False
    ratio = simplify(p / q)
    if not ratio.free_symbols and ratio.is_finite and ratio != 0:
        return True
    return all(_solutions(p, unknown) == _solutions(q, unknown) for unknown in sympy.ordered(p.free_symbols))


def _solutions(x: Expr, unknown) -> set[Expr]:
    return {simplify(solution) for solution in sympy.solve(x, unknown)}


_EXACTLY = {
    "allow_set_relation_comp": True,  # x <= 2 is an answer to (-oo, 2]
    "timeout_seconds": None,  # its own alarm counts the seconds in which a worker waits for a core
    "raise_on_error": True,
}
