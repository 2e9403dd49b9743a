"""Decides whether two numbers are equal, by proof and not by rounding: sympy expressions in, True, False or None out.

The proofs, in this order: rationals are compared exactly; powers too large to write down by their factors, as 4^{10^{10}} =
2^{2*10^{10}}; two numbers differ if digits of their difference are sure; roots by their separation bound; anything else by
sympy's rules, and at last to DIGITS digits. Runs in a worker: only its callers import sympy.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import gcd, inf, log2, prod

import mpmath
import sympy
from sympy import E, Expr, Pow, Rational
from sympy.functions.elementary.hyperbolic import HyperbolicFunction

MOST_BITS = 2**18  # of a number that is computed; 79,000 digits
MOST_DIGITS = 20000  # that a separation bound may ask for
DIGITS = 1000  # to which two numbers without a proof must agree, beyond the digits of the numbers in them
ROUGH = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)  # whose digits sympy does not answer for

Factors = dict[int | Expr, Fraction]  # base -> exponent; a base is an integer above 1, or e


def size(x: Expr) -> float:
    """Return about how many bits the numbers of an expression have once they are computed; infinity for very many."""
    if x.is_Rational:
        return x.p.bit_length() + x.q.bit_length()
    inner = max(1, sum(size(part) for part in x.args))
    if isinstance(x, sympy.exp | HyperbolicFunction) or (isinstance(x, Pow) and not x.base.is_algebraic):
        return inner if inner <= 256 else inf  # sympy gets lost in the digits of e^{-2025!}
    if isinstance(x, Pow) and x.exp.is_number:
        return size(x.base) * max(1.0, _magnitude(x.exp))
    if isinstance(x, sympy.factorial | sympy.binomial) and x.args[0].is_number:
        return inner * max(1.0, _magnitude(x.args[0]))
    return inner


def _magnitude(x: Expr) -> float:
    """Return |x| of a number of few bits, else infinity."""
    return abs(complex(x.doit())) if x.is_number and size(x) <= 64 else inf


def same_number(a: Expr, b: Expr) -> bool | None:
    """Return whether two expressions without unknowns are the same number; None if that takes too much."""
    if size(a) + size(b) > MOST_BITS:
        return _same_sums([a], [b])
    a, b = a.doit(), b.doit()
    if (a.is_Rational and b.is_Rational) or not (a.is_finite and b.is_finite):
        return a == b
    difference = a - b
    if difference == 0 or not difference.is_number:
        return difference == 0
    rough = difference.has(*ROUGH)
    if not rough and _nonzero(difference, 100):
        return False
    bound = None if rough else _bound(difference)
    if bound is not None and bound < MOST_DIGITS:
        return not _nonzero(difference, bound)
    if sympy.simplify(difference) == 0:
        return True
    return None if rough else not _nonzero(difference, DIGITS + int(size(difference)))


def _nonzero(x: Expr, digits: int) -> bool:
    """Return whether x is surely not 0. sympy raises its precision up to so many digits until three digits of x are sure."""
    parts = x.evalf(3, maxn=digits).as_real_imag()
    return any(isinstance(part, sympy.Float) and part._prec > 1 and part != 0 for part in parts)


def _bound(x: Expr) -> int | None:
    """Return a number of digits: if a number made of rationals by + - * / and roots is not 0, so many of its digits show it.

    The separation bound of Burnikel, Funke, Mehlhorn, Schirra and Schmitt (2001). None for other numbers.
    """
    roots: set[Expr] = set()

    def measured(x: Expr) -> tuple[float, float]:
        """Return log2 of the bounds u and l of the paper."""
        if x.is_Rational:
            return x.p.bit_length(), x.q.bit_length()
        if x == sympy.I:
            roots.add(Pow(-1, Rational(1, 2), evaluate=False))
            return 0, 0
        parts = [measured(part) for part in x.args[:1] if x.is_Pow] or [measured(part) for part in x.args]
        if x.is_Add:
            total = sum(low for _, low in parts)
            return max(up + total - low for up, low in parts) + log2(len(parts)), total
        if x.is_Mul:
            return sum(up for up, _ in parts), sum(low for _, low in parts)
        if not (x.is_Pow and x.exp.is_Rational):
            raise ValueError(f"{x.func} makes no algebraic number")
        (up, low), q = parts[0], x.exp.q
        if q > 1:
            roots.add(Pow(x.base, Rational(1, q), evaluate=False))
            up, low = ((up + (q - 1) * low) / q, low) if up >= low else (up, ((q - 1) * up + low) / q)
        return (up * abs(x.exp.p), low * abs(x.exp.p))[:: 1 if x.exp.p > 0 else -1]

    try:
        up, low = measured(x)
    except ValueError:
        return None
    return int((low + prod(root.exp.q for root in roots) * up) * 0.302) + 10


def _same_sums(ours: list[Expr], theirs: list[Expr]) -> bool | None:
    """Compare sums of products of powers by their exponents: no power is computed."""
    try:
        terms = [*((1, *_factors(x)) for x in _terms(ours)), *((-1, *_factors(x)) for x in _terms(theirs))]
    except (ValueError, OverflowError):
        return None
    # a term, and the sum of all terms that are small multiples of it, divided by it
    left: list[tuple[Factors, Expr]] = []
    for side, sign, term in terms:
        for i, (other, total) in enumerate(left):
            ratio = _coprime([*term.items(), *((base, -power) for base, power in other.items())])
            lengths = (abs(power) * (1 if base == E else base.bit_length()) for base, power in ratio.items())
            if sum(lengths) <= MOST_BITS:
                left[i] = other, total + side * sign * _product(ratio)
                break
        else:
            left.append((term, Rational(side * sign)))
    zero = [same_number(total, Rational(0)) for _, total in left]
    if None in zero:
        return None
    sizes = sorted(_log2(*term) for term, is_zero in zip(left, zero, strict=True) if not is_zero)
    if len(sizes) > 1 and sizes[-1] - sizes[-2] < len(sizes):
        return None  # they may cancel
    return not sizes


def _log2(factors: Factors, times: Expr):
    """Return log2 of |a product|, exact to about 64 bits behind the point."""
    longest = max((abs(power.numerator).bit_length() for power in factors.values()), default=0)
    with mpmath.workprec(64 + longest):
        logs = [mpmath.log(mpmath.e if base == E else base, 2) for base in factors]
        powers = [mpmath.mpf(power.numerator) / power.denominator for power in factors.values()]
        return mpmath.log(abs(mpmath.mpmathify(times.evalf())), 2) + mpmath.fdot(powers, logs)


def _terms(sums: Iterable[Expr]) -> Iterator[Expr]:
    for x in sums:
        if x.is_Add:
            yield from _terms(x.args)
        elif x != 0:
            yield x


def _product(factors: Factors) -> Expr:
    powers = (Pow(base, Rational(power.numerator, power.denominator)) for base, power in factors.items())
    return prod(powers, start=Rational(1))


def _rational(x: Expr) -> Fraction:
    """Return the value of a rational number that can be computed."""
    x = x.doit() if size(x) <= MOST_BITS else x
    if not x.is_Rational:
        raise ValueError(f"no rational number within {MOST_BITS} bits")
    return Fraction(int(x.p), int(x.q))


def _factors(x: Expr) -> tuple[int, Factors]:
    """Return the sign of a real number other than 0, and |x| as a product of powers. Raises ValueError for other numbers."""
    if isinstance(x, sympy.UnevaluatedExpr):
        return _factors(x.args[0])
    if x == E or isinstance(x, sympy.exp):
        return 1, {E: _rational(x.exp) if x != E else Fraction(1)}
    if x.is_Mul:
        signs, parts = zip(*map(_factors, x.args), strict=True)
        return prod(signs), _coprime(item for part in parts for item in part.items())
    if x.is_Pow:
        (sign, factors), power = _factors(x.base), _rational(x.exp)
        if sign < 0 and power.denominator > 1:
            raise ValueError("a root of a negative number")
        powers = {base: old * power for base, old in factors.items() if power}
        return (sign if power.numerator % 2 else 1), powers
    value = _rational(x)
    if not value:
        raise ValueError("0 has no factors")
    powers = [(abs(value.numerator), Fraction(1)), (value.denominator, Fraction(-1))]
    return (1 if value > 0 else -1), _coprime(powers)


def _coprime(powers: Iterable[tuple[int | Expr, Fraction]]) -> Factors:
    """Return the product of powers, with bases that have no common divisor: none are left if it is 1. Nothing is factorized."""
    product: Factors = {}
    todo = list(powers)
    while todo:
        base, power = todo.pop()
        if base == 1 or power == 0:
            continue
        if base == E and E in product:
            todo.append((E, product.pop(E) + power))
            continue
        divisors = ((other, gcd(base, other)) for other in product if E not in (base, other))
        shared = next(((other, divisor) for other, divisor in divisors if divisor > 1), None)
        if shared is None:
            product[base] = power
            continue
        other, divisor = shared
        old = product.pop(other)
        todo += [(base // divisor, power), (other // divisor, old), (divisor, power + old)]
    return product
