"""One way of writing for the many ways in which models write the same mathematics."""

from __future__ import annotations

import re
import unicodedata

from headway.verifiers.extract import closing_brace
from headway.verifiers.numbers import plain

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUBSCRIPT_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_UNICODE = {
    "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "⁄": "/", "∕": "/", "≤": "<=", "⩽": "<=", "≥": ">=", "⩾": ">=",
    "≠": "!=", "≈": r"\approx ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "°": r"\degree ", "′": "'", "’": "'", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "λ": r"\lambda ", "φ": r"\phi ", "ω": r"\omega ", "±": r"\pm ", "ℝ": r"\mathbb{R}", "→": r"\to ", "∶": ":",
}  # fmt: skip
_TEXT_COMMANDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathit|mathsf|mathtt|operatorname\*?|mbox|hbox"
    r"|boldsymbol|bm|emph|displaystyle|vec)\s*\{"
)
_GROUPED = re.compile(r"(?<=\d)(?:\\,|\\ |\\!|\\;|\\:|\u2009|\{,\}|,\\!)(?=\d{3}(?!\d))")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|phantom|hfill|hspace\{[^{}]*\})(?![A-Za-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:leq?|leqslant)(?![A-Za-z])", "<="),
        (r"\\(?:geq?|geqslant)(?![A-Za-z])", ">="),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:neq?|not\s*=)(?![A-Za-z])", "!="),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\(?:simeq|sim|cong|doteq)(?![A-Za-z])", r"\\approx "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:lbrack)(?![A-Za-z])", "["),
        (r"\\(?:rbrack)(?![A-Za-z])", "]"),
        (r"\\mid(?![A-Za-z])", "|"),
        (r"\\(?:varnothing)(?![A-Za-z])", r"\\emptyset"),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\circ(?![A-Za-z])", r"\\degree "),
        (r"\^\s*\{\s*\\degree\s*\}|\^\s*\\degree", r"\\degree "),
        (r"\^\s*\{\s*\\prime\s*\}|\^\s*\\prime(?![A-Za-z])", "'"),
        (r"\s+degrees?(?![A-Za-z])(?!\s+(?:[CF]\b|[Cc]elsius|[Ff]ahrenheit))", r"\\degree "),
        (r"\\%|\s*\b(?:percent|per cent|percentage points?)\b", "%"),
        (r"\\#", "#"),
        (r"\\&", "&"),
        (r"\\_", "_"),
        (r"(?<!\\)\\(?:[,;:! ]|(?:quad|qquad|enspace|thinspace)(?![A-Za-z]))", " "),
        (r"~", " "),
        (r"\\\$", "$"),
        (r"\\(?:lor|vee)(?![A-Za-z])", " or "),
        (r"\\(?:land|wedge)(?![A-Za-z])", " and "),
        (r"\*\*", "^"),
        (r"\s+", " "),
    )
)
_SPACE = re.compile(r" (?![A-Za-z0-9.€£¥])|(?<![A-Za-z0-9.%})]) ")
_HEDGE = re.compile(
    r"^(?:\\approx|about|approximately|roughly|exactly|therefore|thus|so|is|equals|the answer is|answer:?)(?![A-Za-z])\s*",
    re.IGNORECASE,
)


def canonical(text: str) -> str:
    """The text with one spelling of digits, signs, brackets, spacing and common commands. Its meaning is kept:
    what is not understood stays as it is."""
    text = _unicode(text.strip().strip("*"))
    text = _GROUPED.sub("", text)
    text = _without_text_commands(text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _dollars(text.strip())
    text = _SPACE.sub("", text).strip()
    while (shorter := _HEDGE.sub("", text).rstrip(" .,;:\\")) != text:
        text = shorter
    return _without_thousands(_before_approximation(text))


def _before_approximation(text: str) -> str:
    """The exact value of `37/3 \\approx 12.33`, and the value of `x \\approx 12.33`."""
    left, sign, right = text.partition("\\approx")
    if not sign:
        return text
    return right.strip() if re.fullmatch(r"\\?[A-Za-z]+", left.strip()) else left.strip()


def _without_thousands(text: str) -> str:
    """Without the commas that group digits. In brackets a comma separates: (1,234) is a pair."""

    def joined(match: re.Match[str]) -> str:
        before = text[: match.start()]
        inside = sum(map(before.count, "([{")) > sum(map(before.count, ")]}"))
        return match.group() if inside else match.group().replace(",", "")

    return _THOUSANDS.sub(joined, text)


def _unicode(text: str) -> str:
    if text.isascii():
        return text
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + run.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda run: "_{" + run.group().translate(_SUBSCRIPTS) + "}", text)
    text = _VULGAR.sub(_vulgar, text)
    text = re.sub(r"√\s*(\d+|\w|\()", lambda root: r"\sqrt" + _root_argument(root[1]), text)
    text = "".join(_UNICODE.get(character, character) for character in plain(text))
    return plain(unicodedata.normalize("NFKC", text.replace("\u2009", r"\,")))


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
