"""Evaluates plain arithmetic as people write it: an exact Fraction, or a rounded Decimal for numbers too large to write.

    value("1\\frac{4}{5}")            Fraction(9, 5)
    value("2^{2^{2^{2^{2^{2}}}}}")    Decimal("Infinity"): not 4, which is all that a comparison needs
    value("x + 1")                    None

No roots, no names. Linear in the text, without recursion, and no number gets more digits than the bounds below allow:
10^{10^{10}} takes as long as 10^{10}.
"""

import math
import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation, localcontext
from fractions import Fraction

MAX_BITS = 4096  # of a numerator and a denominator together; 1,000 digits are 3,322
# Larger numbers have 60 digits and an exponent of at most 10^18. Beyond that they are Infinity, and its inverse is Decimal(0).
ROUNDED = Context(prec=60, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[InvalidOperation])
CLOSE = Decimal("0.01")  # rounded numbers may be equal if their relative difference is at most this

Value = Fraction | Decimal


class Undecided(ArithmeticError):
    """Not a number, or one that rounding might change."""


def same(x: Value, y: Value) -> bool | None:
    """Return whether two numbers are equal; None if one of them is rounded and they are close."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    return None if not (zero(x) or zero(y)) and close(rounded(x), rounded(y)) else False


def zero(x: Value) -> bool:
    """Return whether x is 0. Decimal(0) is not: it stands for a number that is too small for its exponent."""
    return isinstance(x, Fraction) and x == 0


def whole(x: Value) -> bool:
    """Return whether a number is exactly an integer."""
    return isinstance(x, Fraction) and x.denominator == 1


def close(x: Decimal, y: Decimal) -> bool:
    """Return whether two rounded numbers may be equal."""
    if x == y or not (x.is_finite() and y.is_finite()):
        return x == y
    return ROUNDED.subtract(x, y).copy_abs() <= ROUNDED.multiply(CLOSE, max(x.copy_abs(), y.copy_abs()))


def rounded(x: Value) -> Decimal:
    """Return x as a Decimal of 60 digits."""
    return x if isinstance(x, Decimal) else ROUNDED.divide(x.numerator, x.denominator)


def bits(x: Fraction) -> int:
    """Return the bits of numerator and denominator together."""
    return x.numerator.bit_length() + x.denominator.bit_length()


def shrunk(x: Fraction) -> Value:
    """Return the fraction itself, or a rounded Decimal if it is too large."""
    return x if bits(x) <= MAX_BITS else rounded(x)


def add(x: Value, y: Value) -> Value:
    """x + y."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return shrunk(x + y)
    x, y = rounded(x), rounded(y)
    if close(x, y.copy_negate()):
        raise Undecided  # only rounded digits would be left
    return ROUNDED.add(x, y)


def negative(x: Value) -> Value:
    """-x."""
    return -x if isinstance(x, Fraction) else x.copy_negate()


def multiply(x: Value, y: Value) -> Value:
    """x y."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return shrunk(x * y)
    return Fraction(0) if zero(x) or zero(y) else ROUNDED.multiply(rounded(x), rounded(y))


def divide(x: Value, y: Value) -> Value:
    """x / y. Raises Undecided for y = 0."""
    return multiply(x, 1 / y if isinstance(y, Fraction) else ROUNDED.divide(1, y))


def power(x: Value, n: Value) -> Value:
    """x^n."""
    if (zero(n) and not zero(x)) or (isinstance(x, Fraction) and x == 1):
        return Fraction(1)
    if whole(n) and isinstance(x, Fraction) and not (x == n == 0) and abs(n) * (bits(x) - 2) <= MAX_BITS:
        return shrunk(x**n.numerator)
    base, exponent = rounded(x).copy_abs(), rounded(n)
    # a root, an unknown sign, or more factors than the base has correct digits
    if (not whole(n) and (isinstance(n, Fraction) or x <= 0)) or (close(base, Decimal(1)) and exponent.adjusted() > 18):
        raise Undecided
    result = ROUNDED.power(base, exponent)
    return result.copy_negate() if x < 0 and n % 2 else result


def factorial(n: Value) -> Value:
    """n!."""
    if whole(n) and 0 <= n <= 500:
        return shrunk(Fraction(math.factorial(int(n))))
    if n <= 500 or (not whole(n) and isinstance(n, Fraction)):
        raise Undecided
    with localcontext(ROUNDED):  # Stirling's series; the next term is 1/(360 n^3)
        n = rounded(n)
        return (n * (n.ln() - 1) + (Decimal(math.tau) * n).ln() / 2 + 1 / (12 * n)).exp()


def binomial(n: Value, k: Value) -> Value:
    """n over k."""
    if whole(n) and whole(k) and 0 <= k <= n and min(k, n - k) * bits(n) <= MAX_BITS:
        return shrunk(Fraction(math.comb(int(n), int(k))))
    return divide(factorial(n), multiply(factorial(k), factorial(add(n, negative(k)))))


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
    """Return the value of plain arithmetic; None for anything else, and if rounding might change the value.

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
