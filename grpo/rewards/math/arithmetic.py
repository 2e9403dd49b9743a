"""Plain arithmetic as people write it, exactly: a Fraction, or for numbers too large to write down, their size.

    value("1\\frac{4}{5}")            Fraction(9, 5)
    value("2^{2^{2^{2^{2^{2}}}}}")    Size(sign=1, low=..., high=inf): 4 is not in there, and that is all one needs to know
    value("x + 1")                    None

No roots, no names, no floating point in a value. Linear in the text, without recursion, and no number of more than MAX_BITS
is ever computed: 10^{10^{10}} takes as long as 10^{10}.
"""

import math
import re
from fractions import Fraction
from typing import NamedTuple

MAX_BITS = 4096  # of a numerator and a denominator together; 1,000 digits are 3,322
CLAMP = 10**300  # integers up to here survive as a float


class Size(NamedTuple):
    """A number that is not zero, known by its sign and low <= log2|x| <= high."""

    sign: int
    low: float
    high: float


Value = Fraction | Size


class Undecided(Exception):
    """Not a number, or one whose size the bounds do not tell."""


def same(x: Value, y: Value) -> bool | None:
    """None if only the sizes are known, and they overlap."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    if x == 0 or y == 0:
        return False
    a, b = size(x), size(y)
    return False if a.sign != b.sign or a.high < b.low or b.high < a.low else None


def sized(sign: int, low: float, high: float) -> Size:
    if math.isnan(low) or math.isnan(high):
        raise Undecided
    return Size(sign, low, high)


def size(x: Value) -> Size:
    if isinstance(x, Size):
        return x
    above, below = math.log2(abs(x.numerator)), math.log2(x.denominator)
    slack = 1e-9 * (1 + above + below)
    return Size(1 if x > 0 else -1, above - below - slack, above - below + slack)


def shrunk(x: Fraction) -> Value:
    return x if x.numerator.bit_length() + x.denominator.bit_length() <= MAX_BITS else size(x)


def add(x: Value, y: Value) -> Value:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return shrunk(x + y)
    if x == 0 or y == 0:
        return y if x == 0 else x
    b, a = sorted((size(x), size(y)), key=lambda s: s.low)
    if a.sign == b.sign:
        return sized(a.sign, a.low, max(a.high, b.high) + 1)
    if a.low > b.high + 1:  # what is taken away is less than half
        return sized(a.sign, a.low - 1, a.high)
    raise Undecided


def negative(x: Value) -> Value:
    return -x if isinstance(x, Fraction) else Size(-x.sign, x.low, x.high)


def multiply(x: Value, y: Value) -> Value:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return shrunk(x * y)
    if x == 0 or y == 0:
        return Fraction(0)
    a, b = size(x), size(y)
    return sized(a.sign * b.sign, a.low + b.low, a.high + b.high)


def inverse(x: Value) -> Value:
    if x == 0:
        raise Undecided
    return 1 / x if isinstance(x, Fraction) else Size(x.sign, -x.high, -x.low)


def power(x: Value, n: Value) -> Value:
    if x == 1 or (n == 0 and x != 0):
        return Fraction(1)
    if isinstance(n, Size):
        return _power_of_size(x, n)
    if n.denominator != 1 or (x == 0 and n <= 0):
        raise Undecided
    n = n.numerator
    if x in (0, 1, -1):
        return x if n % 2 else abs(x)
    if isinstance(x, Fraction) and abs(n) * (x.numerator.bit_length() + x.denominator.bit_length()) <= MAX_BITS:
        return x**n
    base, times = size(x), float(min(abs(n), CLAMP))
    low, high = base.low * times, base.high * times
    if abs(n) > CLAMP:
        low, high = (low if low > 0 else -math.inf), (high if high < 0 else math.inf)
    result = sized(base.sign if n % 2 else 1, low, high)
    return result if n > 0 else inverse(result)


def _power_of_size(x: Value, n: Size) -> Value:
    if x == 0 or (base := size(x)).sign < 0 or base.low <= 0 <= base.high:
        raise Undecided
    times = 2.0 ** min(n.low, 900)
    result = sized(1, base.low * times, math.inf) if base.low > 0 else sized(1, -math.inf, base.high * times)
    return result if n.sign > 0 else inverse(result)


def factorial(n: Value) -> Value:
    if isinstance(n, Size):
        if n.sign < 0 or n.low < 1:
            raise Undecided
        return sized(1, 2.0 ** min(n.low, 900) - 1, math.inf)  # n! >= 2^(n-1)
    if n.denominator != 1 or n < 0:
        raise Undecided
    if n <= 500:
        return shrunk(Fraction(math.factorial(int(n))))
    log = math.lgamma(float(min(n, CLAMP)) + 1) / math.log(2)
    return sized(1, log * (1 - 1e-9), log * (1 + 1e-9) if n <= CLAMP else math.inf)


def choose(n: Value, k: Value) -> Value:
    if isinstance(n, Size) or isinstance(k, Size) or n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n:
        raise Undecided
    n, k = int(n), min(int(k), int(n - k))
    if k * n.bit_length() <= MAX_BITS:
        return shrunk(Fraction(math.comb(n, k)))
    log, times = math.log2(n) - math.log2(k), float(min(k, CLAMP))  # (n/k)^k <= C(n, k) <= (e n/k)^k
    high = (log + math.log2(math.e)) * times * (1 + 1e-9) if k <= CLAMP else math.inf
    return sized(1, log * times * (1 - 1e-9), high)


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
    "/": lambda x, y: multiply(x, inverse(y)),
    "^": power,
    "\\frac": lambda x, y: multiply(x, inverse(y)),
    "\\binom": choose,
}


def value(text: str) -> Value | None:
    """What plain arithmetic comes to; None for anything else, and where nothing can be said about its size.

    Two numbers side by side are a mixed number if they look like one (1\\frac{4}{5}, 1 4/5), and else nothing.
    """
    if match := _MIXED.fullmatch(text):
        sign, whole, *parts = match.groups()
        above, below = (int(part) for part in parts if part is not None)
        if above < below:
            return (int(whole) + Fraction(above, below)) * (-1 if sign == "-" else 1)
    try:
        return _evaluate(text)
    except Undecided:
        return None


def _evaluate(text: str) -> Value:
    """Dijkstra's shunting yard. \\frac waits below its first brace as `\\frac`, below its second as `\\frac 2`."""
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
                raise Undecided  # nobody knows what 1/2(3) is
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
            if sign != "^":  # which is taken from the right
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
