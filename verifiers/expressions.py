"""A strict reader of mathematical expressions: whole or not at all, and nothing is computed."""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

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
    r"\s*(?:((?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,4}(?![\d.]))?)|(\\[A-Za-z]+|\\[{}|])|([A-Za-z]+)|(.))",
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
                if letters in FUNCTIONS or letters in ("pi", "sqrt") or letters in _GREEK_WORDS:
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
            return text not in (
                "\\cdot",
                "\\times",
                "\\div",
                "\\}",
                "\\rvert",
                "\\rfloor",
                "\\rceil",
                "\\degree",
            ) and (text not in self.bars[-1:])
        return (kind == "sign" and text in ("(", "[", "{", "π")) or (text == "|" and not self.bars)

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
        if name[1:] not in FUNCTIONS:
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
        while self.starts_factor() and self.peek() not in ("(", "[") and self.peek()[1:] not in FUNCTIONS:
            node = ("multiply", node, self.power())
        return node
