"""A strict reader of mathematical expressions: whole or not at all, and nothing is computed."""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

from headway.verifiers.numbers import parse_number

MAX_DEPTH = 40
"""Deepest nesting that is read."""
MAX_TOKENS = 1000

Node = tuple[Any, ...]
"""("number", Fraction), ("symbol", name), ("constant", name), or (operation, node, …)."""


class NotRead(Exception):
    """The text is no expression of this grammar."""


class TooLarge(Exception):
    """The text is too long or too deep, or a value in it too large to compute."""


_TOKEN = re.compile(
    r"\s*(?:(\d*\.\d*(?:\(\d+\)|\\overline\{\d+\})|(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,4}(?![\d.]))?)|(\\[A-Za-z]+|\\[{}|])|([A-Za-z]+)|(.))",
    re.DOTALL,
)
_GREEK = frozenset({
    r"\alpha", r"\beta", r"\gamma", r"\delta", r"\epsilon", r"\varepsilon", r"\zeta", r"\eta", r"\theta",
    r"\vartheta", r"\iota", r"\kappa", r"\lambda", r"\mu", r"\nu", r"\xi", r"\rho", r"\sigma", r"\tau",
    r"\upsilon", r"\phi", r"\varphi", r"\chi", r"\psi", r"\omega", r"\Gamma", r"\Delta", r"\Theta",
    r"\Lambda", r"\Xi", r"\Sigma", r"\Phi", r"\Psi", r"\Omega", r"\ell", r"\hbar",
})  # fmt: skip
_GREEK_WORDS = frozenset(name[1:] for name in _GREEK) - {"mu", "nu", "xi", "ell", "hbar"}
_CONSTANTS = {"\\pi": "pi", "pi": "pi", "π": "pi", "e": "e", "i": "i", "\\infty": "infinity"}
FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "asin", "acos", "atan", "sinh",
    "cosh", "tanh", "ln", "log", "lg", "exp",
})  # fmt: skip
OF_SEVERAL = frozenset({"gcd", "lcm", "max", "min"})
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_OPEN = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_NO_FACTOR = frozenset({
    "\\cdot", "\\times", "\\div", "\\}", "\\rvert", "\\rfloor", "\\rceil", "\\degree", "\\over", "\\choose",
})  # fmt: skip
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
                if letters in FUNCTIONS | OF_SEVERAL | _GREEK_WORDS | {"pi", "sqrt"}:
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
        if (
            self.peek() in ("+", "-")
            and self.position + 1 < len(self.tokens)
            and self.tokens[1][1] in ("+", "-")
        ):
            raise NotRead  # --5: a dash, or a slip
        node = self.halves()
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

    def halves(self) -> Node:
        """A sum, or two of them with \\over or \\choose between."""
        node = self.sum()
        if sign := self.accept("\\over", "\\choose"):
            return ("fraction" if sign == "\\over" else "binomial", node, self.sum())
        return node

    def sum(self) -> Node:
        sign = self.accept("+", "-")
        terms = [_signed(sign, self.product())]
        while sign := self.accept("+", "-"):
            terms.append(_signed(sign, self.product()))
        return terms[0] if len(terms) == 1 else ("add", *terms)

    def product(self) -> Node:
        factors = [self.signed_power()]
        while True:
            if sign := self.accept("*", "/", "\\cdot", "\\times", "\\div"):
                factor = self.signed_power()
                factors.append(("inverse", factor) if sign in ("/", "\\div") else factor)
            elif self.starts_factor():
                after_digits = self.tokens[self.position - 1][0] == "number"
                right = self.power()
                if (
                    after_digits
                    and _is_whole(factors[-1])
                    and right[0] == "fraction"
                    and _is_number(right[1:])
                ):
                    factors[-1] = self.mixed(factors[-1], right)
                else:
                    factors.append(right)
            else:
                return factors[0] if len(factors) == 1 else ("multiply", *factors)

    def mixed(self, whole: Node, fraction: Node) -> Node:
        """An integer before a proper fraction is a mixed number; before another one it could be anything."""
        if not fraction[1][1] < fraction[2][1]:
            raise NotRead
        return ("add", whole, fraction)

    def starts_factor(self) -> bool:
        kind, text = self.kind(), self.peek()
        if kind == "letter" or (kind == "number" and self.tokens[self.position - 1][1] == "!"):
            return True
        if kind == "command":
            return text not in _NO_FACTOR and text not in self.bars[-1:]
        return text in ("(", "[", "{") or (text == "|" and not self.bars)

    def signed_power(self) -> Node:
        return _signed(self.accept("+", "-"), self.power())

    def power(self) -> Node:
        node = self.postfix(self.atom())
        if self.accept("^"):
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
        if self.accept("!"):
            node = ("factorial", node)
        elif self.accept("\\degree"):
            node = ("multiply", node, ("degree",))
        if self.peek() in ("!", "\\degree"):  # n!! is no factorial of a factorial
            raise NotRead
        return node

    def group(self) -> Node:
        opening = self.next()[1]
        if opening not in _OPEN:
            raise NotRead
        bars, self.bars = self.bars, []
        node = self.halves()
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
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge
        node = self.thing()
        self.depth -= 1
        return node

    def thing(self) -> Node:
        kind, text = self.tokens[self.position] if self.position < len(self.tokens) else ("", "")
        if kind == "number":
            self.next()
            value = parse_number(text)
            if value is None:
                raise TooLarge
            if self.peek() == "_" or self.kind() == "number":
                raise NotRead
            return ("number", value)
        if text in _BARS:
            self.next()
            self.bars.append(_BARS[text])
            node = self.sum()
            self.expect(self.bars.pop())
            return ("floor" if text == "\\lfloor" else "ceiling" if text == "\\lceil" else "absolute", node)
        if text in _OPEN:
            return self.group()
        if text == "C" and (pair := self.several("C")) is not None and len(pair) == 2:
            return ("binomial", *pair)
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
        if name[1:] in OF_SEVERAL:
            self.position -= 1
            if arguments := self.several(name):
                return (name[1:], *arguments)
        if name[1:] not in FUNCTIONS:
            raise NotRead
        return self.function(name[1:])

    def several(self, name: str) -> list[Node] | None:
        """The arguments of name(a, b, …), in brackets or braces; None when nothing of this kind stands here."""
        start = self.position
        self.expect(name)
        if closing := _OPEN.get(self.accept("(", "\\{")):
            arguments = [self.sum()]
            while self.accept(","):
                arguments.append(self.sum())
            if len(arguments) > 1 and self.accept(closing):
                return arguments
        self.position = start
        return None

    def function(self, name: str) -> Node:
        base = self.argument() if name == "log" and self.accept("_") else None
        exponent = self.script() if self.accept("^") else None
        if exponent == ("negative", ("number", Fraction(1))) and name in _INVERSE:
            name, exponent = _INVERSE[name], None
        node: Node = (name, self.function_argument())
        if base is not None:
            node = ("fraction", node, ("log", base))
        return node if exponent is None else ("power", node, exponent)

    def function_argument(self) -> Node:
        """A group, or the factors up to the next sign or function."""
        if self.peek() in ("(", "[", "{"):
            return self.group()
        factors = [self.power()]
        while self.starts_factor() and self.peek() not in ("(", "[") and self.peek()[1:] not in FUNCTIONS:
            factors.append(self.power())
        return factors[0] if len(factors) == 1 else ("multiply", *factors)


def _signed(sign: str, node: Node) -> Node:
    return ("negative", node) if sign == "-" else node


def _is_whole(node: Node) -> bool:
    return node[0] == "number" and node[1].denominator == 1


def _is_number(nodes: Node) -> bool:
    return all(node[0] == "number" for node in nodes)
