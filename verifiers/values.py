"""Values of expressions, and equality by value.

Nothing is simplified: two expressions are equal when their values are, exact fractions wherever possible and 60
significant digits elsewhere. So no answer can start a long computation.
"""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from headway.verifiers.expressions import FUNCTIONS, Node, TooLarge

DIGITS = 60
"""Significant digits of values that are no fractions."""
EQUAL_DIGITS = 40
"""Digits in which equal values agree; the rest is left to rounding."""
MAX_BITS = 200_000
"""Largest numerator or denominator that is computed exactly."""
MAX_LOG2 = 1e7
"""Largest base-2 logarithm of a value's size."""

Value = Any
"""Fraction, mpf or mpc."""


class Undefined(Exception):
    """An expression has no finite value at a point."""


def symbols(node: Node) -> frozenset[str]:
    """Names of the free symbols."""
    if node[0] == "symbol":
        return frozenset([node[1]])
    return frozenset().union(*(symbols(child) for child in node[1:] if isinstance(child, tuple)))


def points(names: frozenset[str]) -> list[dict[str, Fraction]]:
    """Points at which expressions are compared, the same in every process: positive ones, ones of mixed signs,
    and small whole ones, for factorials."""
    if not names:
        return [{}]
    generators = [random.Random(f"point {number}") for number in range(8)]
    return [
        {name: _coordinate(number, generator) for name in sorted(names)}
        for number, generator in enumerate(generators)
    ]


def _coordinate(number: int, generator: random.Random) -> Fraction:
    if number >= 6:
        return Fraction(generator.randrange(2, 30))
    sign = 1 if number < 2 else generator.choice((-1, 1))
    return sign * Fraction(generator.randrange(1000, 4000), generator.randrange(901, 1999))


def same_value(left: Node, right: Node) -> bool:
    """Whether two expressions have the same value wherever both are defined; real values count where there are
    any. Raises `TooLarge`, and `Undefined` when no point tells."""
    compared = {True: 0, False: 0}  # real, complex
    equal_complex = True
    for point in points(symbols(left) | symbols(right)):
        try:
            one, other = evaluate(left, point), evaluate(right, point)
        except Undefined:
            continue
        is_real = _is_real(one) and _is_real(other)
        compared[is_real] += 1
        if not close(one, other):
            if is_real:
                return False
            equal_complex = False
    if not any(compared.values()):
        raise Undefined
    return equal_complex or compared[True] > 1


def proportional(left: Node, right: Node, same_sign: bool = False) -> bool:
    """Whether left = c * right with one constant c other than 0, and above it for `same_sign`. Raises as
    `same_value`."""
    names = symbols(left) | symbols(right)
    if symbols(left) != symbols(right):
        return False
    values = []
    for point in points(names):
        try:
            values.append((evaluate(left, point), evaluate(right, point)))
        except Undefined:
            continue
    if len(values) < 2:
        raise Undefined
    (one, other), *rest = values
    if (
        one == 0
        or other == 0
        or (same_sign and not (_is_real(one) and _is_real(other) and (one > 0) == (other > 0)))
    ):
        return False
    return all(close(_multiply(one, second), _multiply(other, first)) for first, second in rest)


def near(gold: Node, answer: Node, relative_tolerance: Fraction) -> bool:
    """Whether two expressions without symbols differ by at most this share of the first."""
    one, other = (_inexact(evaluate(node, {})) for node in (gold, answer))
    return bool(abs(one - other) <= _inexact(relative_tolerance) * abs(one))


def is_rounding(node: Node, number: Fraction, last_place: Fraction) -> bool:
    """Whether a number is an expression's value, rounded or cut at this place. Raises as `evaluate`, and `Undefined`
    for an expression with symbols or without a real value."""
    value = evaluate(node, {}) if not symbols(node) else None
    if value is None or not _is_real(value):
        raise Undefined
    left_off, place = abs(_inexact(value)) - abs(_inexact(number)), _inexact(last_place)
    return bool((value < 0) == (number < 0) and -place / 2 <= left_off < place)


def close(one: Value, other: Value) -> bool:
    """Equal: exactly for fractions, else relative to their size. Never by an absolute tolerance."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    mp = _context()
    one, other = _inexact(one), _inexact(other)
    size = max(abs(one), abs(other))
    return bool(size == 0 or abs(one - other) <= size * mp.mpf(10) ** -EQUAL_DIGITS)


def evaluate(node: Node, point: Mapping[str, Fraction]) -> Value:
    """The value at a point. Raises `Undefined` or `TooLarge`."""
    match node:
        case ("number", value):
            return value
        case ("symbol", name):
            return point[name]
        case ("constant", "infinity"):
            raise Undefined
        case ("constant", name):
            mp = _context()
            return {"pi": mp.pi, "e": mp.e, "i": mp.j}[name] * 1
        case ("degree",):
            return _context().pi / 180
    arguments = [evaluate(child, point) for child in node[1:]]
    try:
        value = _OPERATIONS[node[0]](*arguments)
    except (ZeroDivisionError, ValueError, OverflowError) as error:
        raise Undefined from error
    if isinstance(value, Fraction):
        if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
            raise TooLarge
    elif not _context().isfinite(value):
        raise Undefined
    elif value != 0 and abs(_context().mag(value)) > MAX_LOG2:
        raise TooLarge
    return _plain(value)


_local = threading.local()


def _context() -> Any:
    """This thread's own multi-precision arithmetic."""
    if not hasattr(_local, "mp"):
        import mpmath

        _local.mp = mpmath.mp.clone()
        _local.mp.dps = DIGITS
    return _local.mp


def _inexact(value: Value) -> Value:
    if isinstance(value, Fraction):
        return _context().mpf(value.numerator) / value.denominator
    return value


def _plain(value: Value) -> Value:
    """A complex number without an imaginary part as a real one."""
    return value if isinstance(value, Fraction) or _context().im(value) else _context().re(value)


def _is_real(value: Value) -> bool:
    return isinstance(value, Fraction) or not _context().im(value)


def _is_small_integer(value: Value, bound: int) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1 and abs(value) <= bound


def _log2(value: Value) -> float:
    """Base-2 logarithm of the size of a value other than 0, roughly."""
    if isinstance(value, Fraction):
        return math.log2(abs(value.numerator)) - math.log2(value.denominator)
    size = abs(value)
    return float(_context().log(size, 2))


def _pair(function: Callable[[Any, Any], Any]) -> Callable[[Value, Value], Value]:
    def applied(one: Value, other: Value) -> Value:
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return function(one, other)
        return function(_inexact(one), _inexact(other))

    return applied


def _add(one: Value, other: Value) -> Value:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one + other
    one, other = _inexact(one), _inexact(other)
    total = one + other
    # what is left after all but the last digits cancel is rounding
    cancelled = abs(total) <= max(abs(one), abs(other)) * _context().mpf(10) ** -(DIGITS - 10)
    return Fraction(0) if cancelled else total


_multiply = _pair(lambda one, other: one * other)
_divide = _pair(lambda one, other: one / other)


def _power(base: Value, exponent: Value) -> Value:
    if base == 0:
        if not _is_real(exponent) or exponent < 0:
            raise Undefined
        return Fraction(int(exponent == 0))
    if abs(exponent) > 10**12:
        if base == 1:
            return Fraction(1)
        raise TooLarge
    log2 = abs(_log2(base))
    if _is_small_integer(exponent, MAX_BITS) and isinstance(base, Fraction):
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size * abs(exponent.numerator) <= MAX_BITS:
            return base**exponent.numerator
    if log2 * float(abs(exponent)) > MAX_LOG2:
        raise TooLarge
    if isinstance(exponent, Fraction) and exponent.denominator > 1:
        return _root(_power(base, Fraction(exponent.numerator)), Fraction(exponent.denominator))
    if isinstance(exponent, Fraction):
        return _inexact(base) ** exponent.numerator
    return _context().power(_inexact(base), exponent)


def _root(value: Value, degree: Value) -> Value:
    """The real root where there is one; exact where it is a fraction."""
    if not _is_small_integer(degree, 1000) or degree < 1:
        raise Undefined
    n = degree.numerator
    value = _plain(value)
    if isinstance(value, Fraction):
        sign = -1 if value < 0 else 1
        if sign > 0 or n % 2:
            top, bottom = _integer_root(abs(value.numerator), n), _integer_root(value.denominator, n)
            if top is not None and bottom is not None:
                return sign * Fraction(top, bottom)
            return sign * _context().root(_inexact(abs(value)), n)
    if _is_real(value) and value < 0 and n % 2:
        return -_context().root(-_inexact(value), n)
    return _context().root(_inexact(value), n)


def _integer_root(value: int, n: int) -> int | None:
    """The exact n-th root of an integer, if it has one."""
    if value < 2:
        return value
    if n == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    if value.bit_length() > 1000:
        return None
    guess = round(value ** (1 / n))
    return next((root for root in (guess - 1, guess, guess + 1) if root >= 0 and root**n == value), None)


def _factorial(value: Value) -> Value:
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
        raise Undefined
    if value > 10_000:
        raise TooLarge
    return Fraction(math.factorial(value.numerator))


def _binomial(n: Value, k: Value) -> Value:
    if not all(isinstance(value, Fraction) and value.denominator == 1 and value >= 0 for value in (n, k)):
        raise Undefined
    if max(n, k) > 10_000:
        raise TooLarge
    return Fraction(math.comb(n.numerator, k.numerator))


def _of_integers(function: Callable[..., int]) -> Callable[..., Value]:
    def applied(*values: Value) -> Value:
        if not all(_is_small_integer(value, 10**100) for value in values):
            raise Undefined
        return Fraction(function(*(value.numerator for value in values)))

    return applied


def _extreme(choose: Callable[..., Value]) -> Callable[..., Value]:
    def applied(*values: Value) -> Value:
        if not all(map(_is_real, values)):
            raise Undefined
        return choose(values, key=lambda value: _context().re(_inexact(value)))

    return applied


def _whole(rounding: Callable[[Any], int]) -> Callable[[Value], Value]:
    def applied(value: Value) -> Value:
        if not _is_real(value) or (value != 0 and _log2(value) > 1000):
            raise Undefined
        return Fraction(rounding(value) if isinstance(value, Fraction) else int(_round(rounding, value)))

    return applied


def _round(rounding: Callable[[Any], int], value: Value) -> Value:
    return _context().floor(value) if rounding is math.floor else _context().ceil(value)


def _absolute(value: Value) -> Value:
    return abs(value)


def _function(name: str) -> Callable[[Value], Value]:
    def applied(value: Value) -> Value:
        mp = _context()
        x = _inexact(value)
        if x != 0 and mp.mag(x) > 24 + (name in _LOGARITHMS) * MAX_LOG2:
            raise TooLarge
        if name in _LOGARITHMS and x == 0:
            raise Undefined
        if (value == 1 and name in _LOGARITHMS) or (
            value == 0 and name in ("sin", "tan", "arcsin", "arctan")
        ):
            return Fraction(0)
        if value == 0 and name in ("cos", "exp"):
            return Fraction(1)
        result = getattr(mp, _MP_NAMES.get(name, name))(x)
        # sin(pi) is 0 and not a rounding error
        return Fraction(0) if name in _PERIODIC and abs(result) < mp.mpf(10) ** -(DIGITS - 10) else result

    return applied


_LOGARITHMS = frozenset(["ln", "log", "lg"])
_PERIODIC = frozenset(["sin", "cos", "tan", "cot"])
_MP_NAMES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "log": "ln", "lg": "log10"}
_OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": lambda *values: functools.reduce(_add, values),
    "negative": lambda value: -value,
    "multiply": lambda *values: functools.reduce(_multiply, values),
    "inverse": lambda value: 1 / value,
    "fraction": _divide,
    "power": _power,
    "root": _root,
    "factorial": _factorial,
    "binomial": _binomial,
    "absolute": _absolute,
    "floor": _whole(math.floor),
    "ceiling": _whole(math.ceil),
    "gcd": _of_integers(math.gcd),
    "lcm": _of_integers(math.lcm),
    "max": _extreme(max),
    "min": _extreme(min),
    **{name: _function(name) for name in FUNCTIONS},
}
