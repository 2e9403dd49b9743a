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
LARGE = math.inf  # stands for a fraction in lowest terms with more than LARGE_BITS bits
# whatever 1,000 characters of numbers within MAX_BITS do with a number of more bits, the result is not within MAX_BITS
LARGE_BITS = 2**20

Value = Fraction | float


class Undecided(ArithmeticError):
    """Not a number, or one between MAX_BITS and LARGE_BITS."""


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
    return _within(abs(n) * (bits(x) - 2)) or x**n.numerator


def _within(size: float) -> Value | None:
    """Return LARGE for that many bits, None if a number with so many can be computed."""
    if MAX_BITS < size <= LARGE_BITS:
        raise Undecided
    return LARGE if size > MAX_BITS else None


def factorial(n: Fraction) -> Value:
    """n!."""
    if n.denominator != 1 or n < 0:
        raise Undecided
    return _within(n * (n.numerator.bit_length() - 3)) or Fraction(math.factorial(int(n)))  # since (n/e)^n < n!


def binomial(n: Fraction, k: Fraction) -> Value:
    """n over k."""
    if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n:
        raise Undecided
    k = min(k, n - k)  # C(n, k) is (n/k)^k at least
    return _within(k * max(1, bits(n) - bits(k) - 1)) or Fraction(math.comb(int(n), int(k)))


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
    """Return the result of an operation. Numbers within MAX_BITS, 0 apart, leave a LARGE one LARGE. Two LARGE ones may cancel: if
    they may, it raises Undecided."""
    if LARGE not in numbers:
        result = _APPLY[sign](*numbers)
        if result != LARGE and bits(result) > MAX_BITS:
            raise Undecided
        return result
    x, y = numbers[0], numbers[-1]
    small = next((number for number in numbers if number != LARGE), None)
    if sign == "^" and x == 1:
        return x
    grows = sign == "^" and x not in (0, -1) and (y == LARGE or (y != 0 and y.denominator == 1))
    if grows or sign in ("!", "negative") or (sign in ("+", "-") and small is not None):
        return LARGE
    if sign in ("*", "/", "\\frac") and small:
        return LARGE
    raise Undecided


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


class _Stacks:
    """Values that were read, and the operators and brackets that wait for their right side.

    In `waiting`, `\\frac` is below a fraction's first brace, `\\frac 2` below its second.
    """

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.waiting: list[str] = []

    def apply(self, rank: int) -> None:
        """Apply the waiting operators of at least this rank, back to the last open bracket."""
        while self.waiting and _RANK.get(self.waiting[-1], 0) >= rank:
            sign, y = self.waiting.pop(), self.values.pop()
            numbers = (y,) if sign == "negative" else (self.values.pop(), y)
            self.values.append(applied(sign, *numbers))

    def close(self, bracket: str) -> bool:
        """Close a bracket, and return whether a fraction's second brace must follow."""
        self.apply(1)
        if not self.waiting or self.waiting.pop() != _CLOSES[bracket]:
            raise Undecided
        before = self.waiting[-1] if self.waiting else ""
        if before in _APPLY and before[0] == "\\":
            self.waiting[-1] += " 2"
            return True
        if before.endswith(" 2"):
            sign, y = self.waiting.pop().removesuffix(" 2"), self.values.pop()
            self.values.append(applied(sign, self.values.pop(), y))
        return False


def _number(match: re.Match) -> Value:
    number = Fraction(match["number"].replace(",", "").removesuffix("."))
    if match["exponent"]:
        return applied("*", number, power(Fraction(10), Fraction(match["exponent"])))
    return number


def _evaluate(text: str) -> Value:
    """Run Dijkstra's shunting yard."""
    stacks = _Stacks()
    values, waiting = stacks.values, stacks.waiting
    wants_value, position = True, 0
    while position < len(text):
        if not (match := _TOKEN.match(text, position)):
            raise Undecided
        position, sign = match.end(), _SYNONYM.get(match["sign"], match["sign"])
        in_fraction = bool(waiting) and waiting[-1][:1] == "\\"
        if in_fraction and sign != "{":
            raise Undecided
        if sign is None and wants_value:
            values.append(_number(match))
            wants_value = False
        elif not wants_value and sign == "(":  # 2(3)
            stacks.apply(_RANK["negative"])
            if waiting[-1:] == ["/"]:
                raise Undecided  # 1/2(3) is ambiguous
            stacks.apply(_RANK["*"])
            waiting.extend(["*", "("])
            wants_value = True
        elif wants_value and sign in ("(", "{", "\\frac", "\\binom"):
            waiting.append(sign)
        elif wants_value and sign in ("-", "+"):
            waiting.extend(["negative"] * (sign == "-"))
        elif not wants_value and sign in _CLOSES:
            wants_value = stacks.close(sign)
        elif not wants_value and sign == "!":
            values.append(applied("!", values.pop()))
        elif not wants_value and sign in _RANK:
            if sign != "^":  # which is evaluated from the right
                stacks.apply(_RANK[sign])
            waiting.append(sign)
            wants_value = True
        else:
            raise Undecided
    if wants_value:
        raise Undecided
    stacks.apply(1)
    if waiting:
        raise Undecided
    return values.pop()
