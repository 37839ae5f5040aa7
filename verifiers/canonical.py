"""One way of writing for the many ways in which models write the same mathematics."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from headway.verifiers.extract import closing_brace
from headway.verifiers.numbers import plain, unspelled
from headway.verifiers.units import NO_UNITS, split_unit

Commas = Literal["group", "separate", "decimal"]
"""What a comma between digits without a space is: 1,234 is one number, a list of two, or one and a bit."""

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUBSCRIPT_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_ROOT = re.compile(r"([√∛∜])\s*(?:\\left\s*)?(\d+|\w|\()")
_UNICODE = {
    "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "≤": "<=", "⩽": "<=", "≥": ">=", "⩾": ">=",
    "≠": "!=", "≈": r"\approx ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "℃": " celsius", "℉": " fahrenheit", "°": r"\degree ", "º": r"\degree ", "′": "'", "’": "'", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "λ": r"\lambda ", "φ": r"\phi ", "ω": r"\omega ", "±": r"\pm ", "∓": r"\mp ", "ℝ": r"\mathbb{R}",
    "→": r"\to ", "∶": ":", "…": "...", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "≡": r"\equiv ", "⟨": "(", "⟩": ")", "∧": " and ", "∨": " or ", "∖": r"\setminus ",
}  # fmt: skip
_OVERLINED = re.compile("((?:\\d\u0305)+)")
_TEXT_COMMANDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textup|textnormal|mathrm|mathbf|mathit|mathsf|mathtt|operatorname\*?|mbox"
    r"|hbox|boldsymbol|bm|pmb|emph|displaystyle|vec|hat|underline|(?:text)?color\s*\{\w+\}|colorbox\s*\{\w+\}|boxed)\s*\{"
)
_SEPARATOR = r"(?:\\[, !;:]|~|,\\!|(?:\\text)?\{,\}|'|,)"
_GROUPED = re.compile(
    rf"(?<![\d.,'])(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+|\d{{1,2}}(?:{_SEPARATOR}\d{{2}})+{_SEPARATOR}\d{{3}})(?!\d|,\d|\{{,\}})"
)
_GROUPED_DECIMALS = re.compile(r"(?<=\.)\d{3}(?:\\[,; ]\d{3})*\\[,; ]\d{1,3}(?!\d)")
_SPACED = re.compile(r"([+-]?\d{1,3}(?: \d{3})+)(?=\.\d|\D|$)(?!\s*\d)")
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_EUROPEAN = re.compile(
    r"(?<![\d.,])(?:(\d{1,3}(?:\.\d{3})+),(\d+)|(\d{1,3}(?:\.\d{3}){2,})|(\d+),(\d{1,2}|\d{4,}))(?!\d|[.,]\d)"
)
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", ""),
        (
            r"\\(?:displaystyle|textstyle|scriptstyle|limits|hfill|hspace\{[^{}]*\}|large|Large|bf|rm)(?![A-Za-z])",
            " ",
        ),
        (r"\\(?:[dtc]|s|nice)frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"(?:\{\}|(?<![\w}]))[_^]\s*\{?(\d+)\}?\s*C\s*_\s*\{?(\d+)\}?", r"\\binom{\1}{\2}"),
        (r"\\(?:leq?|leqslant|leqq)(?![A-Za-z])", "<="),
        (r"\\(?:geq?|geqslant|geqq)(?![A-Za-z])", ">="),
        (r"=<", "<="),
        (r"=>", ">="),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:neq?|not\s*=)(?![A-Za-z])|\\not\s*=", "!="),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        (r"(?<=\d)\s*x\s*(?=10\s*(?:\^|\*\*))", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\(?:simeq|sim|cong|doteq)(?![A-Za-z])", r"\\approx "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\(?:mid|vert|lvert|rvert)(?![A-Za-z])", "|"),
        (r"\\colon(?![A-Za-z])|\{:\}", ":"),
        (r"\\(?:varnothing)(?![A-Za-z])", r"\\emptyset"),
        (r"\\(?:backslash|smallsetminus)(?![A-Za-z])", r"\\setminus"),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\circ(?![A-Za-z])", r"\\degree "),
        (r"\^\s*\{\s*\\degree\s*\}|\^\s*\\degree", r"\\degree "),
        (r"\^\s*\{\s*\\prime\s*\}|\^\s*\\prime(?![A-Za-z])", "'"),
        (r"(?:\\degree|\b(?:degrees?|deg))\s*(?:C|[Cc]elsius)(?![A-Za-z])", " celsius"),
        (r"(?:\\degree|\b(?:degrees?|deg))\s*(?:F|[Ff]ahrenheit)(?![A-Za-z])", " fahrenheit"),
        (r"\s+deg(?:rees?)?(?![A-Za-z])", r"\\degree "),
        (r"\\%|\s*\b(?:percent|per cent|percentage points?)\b", "%"),
        (r"\\#", "#"),
        (r"\\&", "&"),
        (r"\\_", "_"),
        (r"(?<!\\)\\(?:[,;:! ]|(?:quad|qquad|enspace|thinspace)(?![A-Za-z]))", " "),
        (r"\\\$", "$"),
        (r"\\(?:lor|vee)(?![A-Za-z])", " or "),
        (r"\\(?:land|wedge)(?![A-Za-z])", " and "),
        (r"\\[lc]?dots(?![A-Za-z])", "..."),
        (r"(?:\b(?:negative|minus)\s+|-\s*)infinity\b", r"-\\infty "),
        (r"\b(?:positive\s+)?infinity\b", r"\\infty "),
        (r"\*\*", "^"),
        (r"\s+", " "),
    )
)
_BOLD = re.compile(r"^\*+\s*(.*?)\s*\*+\.?$", re.DOTALL)
_NEGATIVE = re.compile(r"^(?:negative|minus)\s+(?=[\d.(\\])")
_SPACE = re.compile(r" (?![A-Za-z0-9.€£¥¢])|(?<![A-Za-z0-9.%})]) ")
_HEDGE = re.compile(
    r"^(?:\\approx|about|approximately|roughly|exactly|therefore|thus|so|is|equals|the (?:final )?answer is"
    r"|(?:final )?answer(?=\s*[:=]))(?![A-Za-z])\s*",
    re.IGNORECASE,
)
_LABEL = re.compile(
    r"[:=]?\s*(?:([A-Za-z][a-z]+(?: [a-z]+){0,4})\s*(?::\s*(?=[^\s:])|\b(?:is|are|equals)\s+(?=[\d\\$(+.-])))?"
)
_REMARK = re.compile(r"(.*\S)\s*\(([^()]*)\)", re.DOTALL)
_VALUELESS_REMARK = re.compile(
    r"(?:approx(?:imately)?|rounded|simplified|exact(?:ly)?)\b[A-Za-z ,]*", re.IGNORECASE
)
_NO_SOLUTION = re.compile(
    r"(?:there (?:is|are) )?no (?:real )?solutions?|(?:the )?(?:empty|null) set", re.IGNORECASE
)


def canonical(text: str, commas: Commas = "group") -> str:
    """The text with one spelling of digits, signs, brackets, spacing and common commands. Its meaning is kept:
    what is not understood stays as it is."""
    text = _unicode(_BOLD.sub(r"\1", text.strip()))
    text = re.sub(r"(?<!\\)\\~|~", " ", _ungrouped(text, commas))
    text = _without_text_commands(text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _dollars(_without_end(text.strip()))
    text = unspelled(_NEGATIVE.sub("-", _SPACE.sub("", text).strip()))
    while (shorter := _shorter(text)) != text:
        text = shorter
    if _NO_SOLUTION.fullmatch(text):
        return r"\emptyset"
    return text


def _shorter(text: str) -> str:
    """Without the words and marks around an answer that add nothing to it."""
    text = _without_end(_HEDGE.sub("", text))
    label = _LABEL.match(text)
    if label and not (label[1] and any(word in NO_UNITS for word in label[1].lower().split())):
        text = text[label.end() :]
    remark = _REMARK.fullmatch(text)
    if remark is None:
        return text
    value, words = remark.groups()
    if _VALUELESS_REMARK.fullmatch(words) or unspelled(words) == value:
        return value
    if words.startswith("\\approx"):
        return value + words
    if (
        value[-1:].isdigit()
        and unspelled(words) == words
        and split_unit(f"{value} {words}") != (f"{value} {words}", None)
    ):
        return f"{value} {words}"  # 5 (units) is 5 units; 5 (or more) is something else
    return text


def _without_end(text: str) -> str:
    """Without punctuation at the end; three dots say that digits go on."""
    text = text.removesuffix(".") if text.endswith("....") else text
    return text.rstrip(" ,;:\\" if text.endswith("...") else " .,;:\\")


def _ungrouped(text: str, commas: Commas) -> str:
    """Without the marks that group digits. In brackets a comma separates: (1,234) is a pair."""

    def joined(match: re.Match[str]) -> str:
        digits = match.group()
        if re.search(r"\d,\d", digits) and (commas == "separate" or _is_inside(text, match.start())):
            return digits
        return re.sub(r"\D", "", digits)

    def pointed(match: re.Match[str]) -> str:
        if _is_inside(text, match.start()):
            return match.group()
        return re.sub(r"\D", "", match[1] or match[3] or match[4]) + "." + (match[2] or match[5] or "0")

    if commas == "decimal":
        text = _EUROPEAN.sub(pointed, text)
    text = _DECIMAL_COMMA.sub(".", _GROUPED.sub(joined, text))
    text = _GROUPED_DECIMALS.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    return _SPACED.sub(lambda match: match[1].replace(" ", ""), text) if _SPACED.match(text) else text


def _is_inside(text: str, position: int) -> bool:
    """Whether a place is in a bracket that may hold a list."""
    before = text[:position]
    is_set = text.startswith("{")
    return sum(before.count(mark) for mark in ("(", "[", "\\{")) + is_set > sum(
        before.count(mark) for mark in (")", "]", "\\}")
    )


def _unicode(text: str) -> str:
    if text.isascii():
        return text
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + run.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda run: "_{" + run.group().translate(_SUBSCRIPTS) + "}", text)
    text = _VULGAR.sub(_vulgar, text)
    text = _ROOT.sub(lambda root: _ROOTS[root[1]] + _root_argument(root[2]), text)
    text = _OVERLINED.sub(lambda run: rf"\overline{{{run[1].replace(chr(0x305), '')}}}", text)
    text = "".join(_UNICODE.get(character, character) for character in plain(text))
    return plain(unicodedata.normalize("NFKC", text.replace("\u2009", "~")))


def _vulgar(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match.group()).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _root_argument(text: str) -> str:
    return "(" if text == "(" else f"{{{text}}}"


def _without_text_commands(text: str) -> str:
    """`\\text{…}` and its kin replaced by their content."""
    parts: list[str] = []
    position = 0
    while match := _TEXT_COMMANDS.search(text, position):
        end = closing_brace(text, match.end() - 1)
        if end < 0:
            break
        parts.append(text[position : match.start()])
        text = f" {text[match.end() : end]} {text[end + 1 :]}"
        position = 0
    return "".join(parts) + text[position:]


def _dollars(text: str) -> str:
    """Without the dollar signs that delimit mathematics; one that stands for money is a unit before a number."""
    text = re.sub(r"\\[()\[\]]", "", text)
    if text.count("$") == 1 and re.match(r"-?\s*\$\s*-?\s*[\d.]", text):
        return re.sub(r"^(-?)\s*\$\s*", r"\1", text) + " dollars"
    if text.count("$") == 1 and re.search(r"\d\s*\$$", text):
        return text.rstrip("$ ") + " dollars"
    return re.sub(r"^(-?)([€£¥])\s*(?=[\d.])(.*)$", r"\1\3 \2", text.replace("$", ""))


def split_top(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Splits where the pattern matches outside all brackets. The pattern must not match a bracket."""
    parts: list[str] = []
    depth = 0
    start = position = 0
    while position < len(text):
        character = text[position]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and (match := pattern.match(text, position)) and match.end() > position:
            parts.append(text[start:position])
            start = position = match.end()
            continue
        position += 2 if character == "\\" and text[position + 1 : position + 2] not in ("{", "}") else 1
    parts.append(text[start:])
    return parts
