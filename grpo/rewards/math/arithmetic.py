"""Evaluates plain arithmetic as people write it: an exact Fraction, or HUGE for a number that nobody writes down.

    value("1\\frac{4}{5}")            Fraction(9, 5)
    value("2^{2^{2^{2^{2^{2}}}}}")    HUGE: not 4, which is all that a comparison needs
    value("x + 1")                    None

No roots, no names. Linear in the text, without recursion, and no number gets more bits than MAX_BITS: 10^{10^{10}} takes as
long as 10^{10}.
"""

import math
import re
from enum import Enum
from fractions import Fraction

MAX_BITS = 16_384  # of a numerator and a denominator together; 1,500! has 13,700


class Size(Enum):
    """HUGE: a result for which some step had more than MAX_BITS."""

    HUGE = "huge"


HUGE = Size.HUGE
Value = Fraction | Size


class Undecided(ArithmeticError):
    """Not a number."""


def same(x: Value, y: Value) -> bool | None:
    """Return whether two numbers are equal; None if both are HUGE."""
    return None if x is y is HUGE else x == y


def bits(x: Fraction) -> int:
    """Return the bits of numerator and denominator together."""
    return x.numerator.bit_length() + x.denominator.bit_length()


def bounded(x: Fraction) -> Value:
    """Return the fraction itself, or HUGE if it has too many bits."""
    return x if bits(x) <= MAX_BITS else HUGE


def add(x: Value, y: Value) -> Value:
    """x + y."""
    return HUGE if HUGE in (x, y) else bounded(x + y)


def negative(x: Value) -> Value:
    """-x."""
    return HUGE if x is HUGE else -x


def multiply(x: Value, y: Value) -> Value:
    """x y."""
    return HUGE if HUGE in (x, y) else bounded(x * y)


def divide(x: Value, y: Value) -> Value:
    """x / y. Raises ArithmeticError for y = 0."""
    return HUGE if HUGE in (x, y) else bounded(x / y)


def power(x: Value, n: Value) -> Value:
    """x^n. Raises ArithmeticError for roots and 0^0."""
    if x == 1 or (n == 0 and x != 0):
        return Fraction(1)
    if HUGE in (x, n):
        return HUGE
    if n.denominator != 1 or x == n == 0:
        raise Undecided
    return bounded(x**n.numerator) if abs(n) * (bits(x) - 2) <= MAX_BITS else HUGE


def factorial(n: Value) -> Value:
    """n!."""
    if n is not HUGE and (n < 0 or n.denominator != 1):
        raise Undecided
    return HUGE if n is HUGE or n > 1500 else bounded(Fraction(math.factorial(int(n))))


def binomial(n: Value, k: Value) -> Value:
    """n over k."""
    if HUGE in (n, k):
        return HUGE
    if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n:
        raise Undecided
    return bounded(Fraction(math.comb(int(n), int(k)))) if min(k, n - k) * bits(n) <= MAX_BITS else HUGE


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
    "+": add,
    "-": lambda x, y: add(x, negative(y)),
    "*": multiply,
    "/": divide,
    "^": power,
    "\\frac": divide,
    "\\binom": binomial,
}


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
            operator, y = waiting.pop(), values.pop()
            values.append(negative(y) if operator == "negative" else _APPLY[operator](values.pop(), y))

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
                number = multiply(number, power(Fraction(10), Fraction(match["exponent"])))
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
                operator, y = waiting.pop().removesuffix(" 2"), values.pop()
                values.append(_APPLY[operator](values.pop(), y))
        elif not wants_value and sign == "!":
            values.append(factorial(values.pop()))
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
