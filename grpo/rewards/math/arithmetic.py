"""Evaluates plain arithmetic as people write it: an exact Fraction.

    value("1\\frac{4}{5}")            Fraction(9, 5)
    value("2^{2^{2^{2^{2^{2}}}}}")    LARGE: not 4, which is all that a comparison needs
    value("x + 1")                    None

No roots, no names. Linear in the text, without recursion, and no number gets more digits than the bounds below allow:
10^{10^{10}} takes as long as 10^{10}.
"""

import math
import operator
import re
from fractions import Fraction

MAX_BITS = 4096  # of a numerator and a denominator together; 1,000 digits are 3,322
LARGE = math.inf  # stands for an expression in which a number has more

Value = Fraction | float


class Undecided(ArithmeticError):
    """Not a number."""


def same(x: Value, y: Value) -> bool | None:
    """Return whether two numbers are equal; None if both are LARGE."""
    return None if x == y == LARGE else x == y


def bits(x: Fraction) -> int:
    """Return the bits of numerator and denominator together."""
    return x.numerator.bit_length() + x.denominator.bit_length()


def power(x: Fraction, n: Fraction) -> Value:
    """x^n."""
    if n.denominator != 1 or x == n == 0:  # a root
        raise Undecided
    return LARGE if abs(n) * (bits(x) - 2) > MAX_BITS else x**n.numerator


def factorial(n: Fraction) -> Value:
    """n!."""
    if n.denominator != 1 or n < 0:
        raise Undecided
    return Fraction(math.factorial(int(n))) if n <= 1000 else LARGE


def binomial(n: Fraction, k: Fraction) -> Value:
    """n over k."""
    if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n:
        raise Undecided
    return Fraction(math.comb(int(n), int(k))) if min(k, n - k) * bits(n) <= 16 * MAX_BITS else LARGE


_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE](?P<exponent>[-+]?[0-9]+)(?![0-9a-zA-Z]))?
    |(?P<sign>\\frac|\\binom|\\cdot|\\times|\\div|\*\*|!(?!!)|[-+*/^(){}])
    )\s*""",
    re.VERBOSE,
)
_MIXED = re.compile(r"([-+]?)\s*([0-9]+)\s*(?:\\frac\s*\{([0-9]+)\}\s*\{([0-9]+)\}|\s([0-9]+)\s*/\s*([0-9]+))")
_SYNONYM = {"\\cdot": "*", "\\times": "*", "\\div": "/", "**": "^"}
_CLOSES = {")": "(", "}": "{"}
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2, "negative": 3, "^": 4}
_APPLY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "^": power,
    "\\frac": operator.truediv,
    "\\binom": binomial,
    "!": factorial,
    "negative": operator.neg,
}


def applied(sign: str, *numbers: Value) -> Value:
    """Return the result of an operation. One with a LARGE number is LARGE."""
    result = LARGE if LARGE in numbers else _APPLY[sign](*numbers)
    return LARGE if result == LARGE or bits(result) > MAX_BITS else result


def value(text: str) -> Value | None:
    """Return the value of plain arithmetic; None for anything else.

    Two numbers side by side are read only if they look like a mixed number (1\\frac{4}{5}, 1 4/5).
    """
    if match := _MIXED.fullmatch(text):
        sign, units, *parts = match.groups()
        above, below = (int(part) for part in parts if part is not None)
        if above < below:
            return (int(units) + Fraction(above, below)) * (-1 if sign == "-" else 1)
    try:
        return _evaluate(text)
    except ArithmeticError:
        return None


def _evaluate(text: str) -> Value:
    """Run Dijkstra's shunting yard. In `waiting`, `\\frac` is below a fraction's first brace, `\\frac 2` below its second."""
    values: list[Value] = []
    waiting: list[str] = []

    def apply(rank: int) -> None:
        while waiting and _RANK.get(waiting[-1], 0) >= rank:
            sign, y = waiting.pop(), values.pop()
            values.append(applied(sign, y) if sign == "negative" else applied(sign, values.pop(), y))

    wants_value, position = True, 0
    while position < len(text):
        if not (match := _TOKEN.match(text, position)):
            raise Undecided
        position, sign = match.end(), _SYNONYM.get(match["sign"], match["sign"])
        in_fraction = bool(waiting) and waiting[-1][:1] == "\\"
        if in_fraction and sign != "{":
            raise Undecided
        if sign is None and wants_value:
            number = Fraction(match["number"].replace(",", "").removesuffix("."))
            if match["exponent"]:
                number = applied("*", number, power(Fraction(10), Fraction(match["exponent"])))
            values.append(number)
            wants_value = False
        elif not wants_value and sign == "(":  # 2(3)
            apply(_RANK["negative"])
            if waiting[-1:] == ["/"]:
                raise Undecided  # 1/2(3) is ambiguous
            apply(_RANK["*"])
            waiting.extend(["*", "("])
            wants_value = True
        elif wants_value and sign in ("(", "{", "\\frac", "\\binom"):
            waiting.append(sign)
        elif wants_value and sign in ("-", "+"):
            waiting.extend(["negative"] * (sign == "-"))
        elif not wants_value and sign in _CLOSES:
            apply(1)
            if not waiting or waiting.pop() != _CLOSES[sign]:
                raise Undecided
            if waiting and waiting[-1] in _APPLY and waiting[-1][0] == "\\":
                waiting[-1] += " 2"
                wants_value = True
            elif waiting and waiting[-1].endswith(" 2"):
                sign, y = waiting.pop().removesuffix(" 2"), values.pop()
                values.append(applied(sign, values.pop(), y))
        elif not wants_value and sign == "!":
            values.append(applied("!", values.pop()))
        elif not wants_value and sign in _RANK:
            if sign != "^":  # which is evaluated from the right
                apply(_RANK[sign])
            waiting.append(sign)
            wants_value = True
        else:
            raise Undecided
    if wants_value:
        raise Undecided
    apply(1)
    if waiting:
        raise Undecided
    return values.pop()
