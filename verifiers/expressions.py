"""A strict reader of mathematical expressions, and their values at given points.

An expression is read whole or not at all. Nothing is simplified: two expressions are compared by their values,
exact fractions wherever possible and 60 significant digits elsewhere, so that no answer can start a long
computation.
"""

from __future__ import annotations

import functools
import math
import random
import re
import threading
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

DIGITS = 60
"""Significant digits of values that are no fractions."""
EQUAL_DIGITS = 40
"""Digits in which equal values agree; the rest is left to rounding."""
MAX_BITS = 200_000
"""Largest numerator or denominator that is computed exactly."""
MAX_LOG2 = 1e7
"""Largest base-2 logarithm of a value's size."""
MAX_DEPTH = 40
"""Deepest nesting that is read."""
MAX_TOKENS = 1000

Node = tuple[Any, ...]
"""("number", Fraction), ("symbol", name), ("constant", name), or (operation, node, …)."""
Value = Any
"""Fraction, mpf or mpc."""


class NotRead(Exception):
    """The text is no expression of this grammar."""


class TooLarge(Exception):
    """A value is too large, or an expression too deep, to compute."""


class Undefined(Exception):
    """An expression has no finite value at a point."""


_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|(\\[A-Za-z]+|\\[{}|])|([A-Za-z]+)|(.))", re.DOTALL)
_GREEK = frozenset(
    r"\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \vartheta \iota \kappa \lambda \mu \nu \xi"
    r" \rho \sigma \tau \upsilon \phi \varphi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Xi \Sigma \Phi \Psi"
    r" \Omega \ell \hbar".split()
)
_GREEK_WORDS = frozenset(name[1:] for name in _GREEK) - {"mu", "nu", "xi", "ell", "hbar"}
_CONSTANTS = {"\\pi": "pi", "pi": "pi", "π": "pi", "e": "e", "i": "i", "\\infty": "infinity"}
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh ln log lg exp".split()
)
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_OPEN = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_BARS = {"|": "|", "\\lvert": "\\rvert", "\\vert": "\\vert", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Node:
    """The expression that a canonical text is. Raises `NotRead`, or `TooLarge` for too many or too deep parts."""
    return _Reader(text).whole()


class _Reader:
    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        for number, command, letters, other in _TOKEN.findall(text.strip()):
            if number:
                self.tokens.append(("number", number))
            elif command:
                self.tokens.append(("command", command))
            elif letters:
                if letters in _FUNCTIONS or letters in ("pi", "sqrt") or letters in _GREEK_WORDS:
                    self.tokens.append(("command", "\\" + letters))
                else:
                    self.tokens.extend(("letter", letter) for letter in letters)
            else:
                self.tokens.append(("sign", other))
        if len(self.tokens) > MAX_TOKENS:
            raise TooLarge
        self.position = 0
        self.depth = 0
        self.bars: list[str] = []

    def whole(self) -> Node:
        node = self.sum()
        if self.position != len(self.tokens):
            raise NotRead
        return node

    def peek(self) -> str:
        return self.tokens[self.position][1] if self.position < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.position][0] if self.position < len(self.tokens) else ""

    def next(self) -> tuple[str, str]:
        if self.position == len(self.tokens):
            raise NotRead
        self.position += 1
        return self.tokens[self.position - 1]

    def accept(self, *texts: str) -> str:
        if self.peek() and self.peek() in texts:
            return self.next()[1]
        return ""

    def expect(self, text: str) -> None:
        if self.next()[1] != text:
            raise NotRead

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge
        sign = self.accept("+", "-")
        node = self.product()
        node = ("negative", node) if sign == "-" else node
        while sign := self.accept("+", "-"):
            right = self.product()
            node = ("add", node, ("negative", right) if sign == "-" else right)
        self.depth -= 1
        return node

    def product(self) -> Node:
        node = self.signed_power()
        while True:
            if sign := self.accept("*", "/", "\\cdot", "\\times", "\\div"):
                right = self.signed_power()
                node = ("divide" if sign in ("/", "\\div") else "multiply", node, right)
            elif self.starts_factor():
                node = self.implicit(node, self.power())
            else:
                return node

    def implicit(self, left: Node, right: Node) -> Node:
        """A product without a sign; an integer before a proper fraction is a mixed number."""
        if (
            left[0] == "number"
            and left[1].denominator == 1
            and right[0] == "fraction"
            and right[1][0] == right[2][0] == "number"
        ):
            if not right[1][1] < right[2][1]:
                raise NotRead
            return ("add", left, right)
        return ("multiply", left, right)

    def starts_factor(self) -> bool:
        kind, text = self.kind(), self.peek()
        if kind == "letter":
            return True
        if kind == "command":
            return text not in ("\\cdot", "\\times", "\\div", "\\}", "\\rvert", "\\rfloor", "\\rceil", "\\degree") and (
                text not in self.bars[-1:]
            )
        return kind == "sign" and text in ("(", "[", "{", "π") or (text == "|" and not self.bars)

    def signed_power(self) -> Node:
        if sign := self.accept("+", "-"):
            node = self.power()
            return ("negative", node) if sign == "-" else node
        return self.power()

    def power(self) -> Node:
        node = self.postfix(self.atom())
        if self.accept("^"):
            if self.accept("\\degree"):
                return ("multiply", node, ("degree",))
            node = self.postfix(("power", node, self.script()))
            if self.peek() == "^":
                raise NotRead
        return node

    def script(self) -> Node:
        """What stands after ^: a group, or one thing, possibly with a sign."""
        if self.peek() in ("{", "("):
            return self.group()
        if self.accept("-"):
            return ("negative", self.atom())
        return self.atom()

    def postfix(self, node: Node) -> Node:
        while sign := self.accept("!", "\\degree"):
            node = ("factorial", node) if sign == "!" else ("multiply", node, ("degree",))
        return node

    def group(self) -> Node:
        opening = self.next()[1]
        if opening not in _OPEN:
            raise NotRead
        bars, self.bars = self.bars, []
        node = self.sum()
        self.bars = bars
        self.expect(_OPEN[opening])
        return node

    def argument(self) -> Node:
        """The argument of \\frac, \\sqrt or an index: a group, one digit, or one symbol."""
        if self.peek() in ("{", "("):
            return self.group()
        if self.kind() != "number":
            return self.atom()
        digit, *rest = self.next()[1]
        if rest:
            self.position -= 1
            self.tokens[self.position] = ("number", "".join(rest))
        if not digit.isdigit():
            raise NotRead
        return ("number", Fraction(digit))

    def atom(self) -> Node:
        kind, text = self.tokens[self.position] if self.position < len(self.tokens) else ("", "")
        if kind == "number":
            self.next()
            if len(text) > 4000:
                raise TooLarge
            if self.peek() == "_" or self.kind() == "number":
                raise NotRead
            return ("number", Fraction(text))
        if text in _BARS:
            self.next()
            self.bars.append(_BARS[text])
            node = self.sum()
            self.expect(self.bars.pop())
            return ("floor" if text == "\\lfloor" else "ceiling" if text == "\\lceil" else "absolute", node)
        if text in _OPEN:
            return self.group()
        if kind == "letter" or text in _GREEK:
            self.next()
            name = text + self.index()
            return ("constant", _CONSTANTS[name]) if name in _CONSTANTS else ("symbol", name)
        if text in _CONSTANTS:
            self.next()
            return ("constant", _CONSTANTS[text])
        if kind == "command":
            return self.command()
        raise NotRead

    def index(self) -> str:
        """Subscript and primes of a symbol, as part of its name."""
        name = ""
        if self.accept("_"):
            if self.accept("{"):
                parts = []
                while (part := self.next()[1]) != "}":
                    if part == "{":
                        raise NotRead
                    parts.append(part)
                name = "_" + "".join(parts)
            else:
                name = "_" + self.next()[1]
        while self.accept("'"):
            name += "'"
        return name

    def command(self) -> Node:
        name = self.next()[1]
        match name:
            case "\\frac":
                return ("fraction", self.argument(), self.argument())
            case "\\binom":
                return ("binomial", self.argument(), self.argument())
            case "\\sqrt":
                degree = self.group() if self.peek() == "[" else ("number", Fraction(2))
                return ("root", self.argument(), degree)
        if name[1:] not in _FUNCTIONS:
            raise NotRead
        return self.function(name[1:])

    def function(self, name: str) -> Node:
        base = self.argument() if name == "log" and self.accept("_") else None
        exponent = self.script() if self.accept("^") else None
        if exponent == ("negative", ("number", Fraction(1))) and name in _INVERSE:
            name, exponent = _INVERSE[name], None
        node: Node = (name, self.function_argument())
        if base is not None:
            node = ("divide", node, ("log", base))
        return node if exponent is None else ("power", node, exponent)

    def function_argument(self) -> Node:
        """A group, or the factors up to the next sign or function."""
        if self.peek() in ("(", "[", "{"):
            return self.group()
        node = self.power()
        while self.starts_factor() and self.peek() not in ("(", "[") and self.peek()[1:] not in _FUNCTIONS:
            node = ("multiply", node, self.power())
        return node


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
        {name: _coordinate(number, generator) for name in sorted(names)} for number, generator in enumerate(generators)
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


def proportional(left: Node, right: Node) -> bool:
    """Whether left = c * right with one constant c other than 0. Raises as `same_value`."""
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
    if one == 0 or other == 0:
        return False
    return all(close(_multiply(one, second), _multiply(other, first)) for first, second in rest)


def near(gold: Node, answer: Node, relative_tolerance: Fraction) -> bool:
    """Whether two expressions without symbols differ by at most this share of the first."""
    one, other = (_inexact(evaluate(node, {})) for node in (gold, answer))
    return bool(abs(one - other) <= _inexact(relative_tolerance) * abs(one))


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
    return value


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
            return base ** exponent.numerator
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
    if not (_is_small_integer(n, 10_000) and _is_small_integer(k, 10_000)):
        raise TooLarge if isinstance(n, Fraction) and isinstance(k, Fraction) else Undefined
    if n < 0 or k < 0:
        raise Undefined
    return Fraction(math.comb(n.numerator, k.numerator))


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
        if value == 1 and name in _LOGARITHMS or value == 0 and name in ("sin", "tan", "arcsin", "arctan"):
            return Fraction(0)
        if value == 0 and name in ("cos", "exp"):
            return Fraction(1)
        result = _MP_FUNCTIONS[name](mp, x)
        # sin(pi) is 0 and not a rounding error
        return Fraction(0) if name in _PERIODIC and abs(result) < mp.mpf(10) ** -(DIGITS - 10) else result

    return applied


_LOGARITHMS = frozenset(["ln", "log", "lg"])
_PERIODIC = frozenset("sin cos tan cot".split())
_MP_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    name: (lambda mp, x, attribute=attribute: getattr(mp, attribute)(x))
    for name, attribute in {
        **{name: name for name in "sin cos tan cot sec csc sinh cosh tanh asin acos atan exp ln".split()},
        **{"arcsin": "asin", "arccos": "acos", "arctan": "atan", "log": "ln", "lg": "log10"},
    }.items()
}
_OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": _add,
    "negative": lambda value: -value,
    "multiply": _multiply,
    "divide": _divide,
    "fraction": _divide,
    "power": _power,
    "root": _root,
    "factorial": _factorial,
    "binomial": _binomial,
    "absolute": _absolute,
    "floor": _whole(math.floor),
    "ceiling": _whole(math.ceil),
    **{name: _function(name) for name in _FUNCTIONS},
}
