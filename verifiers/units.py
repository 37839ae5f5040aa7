"""Units behind a value: recognised, so that a missing one can be forgiven and a different one cannot."""

from __future__ import annotations

import re

_NAMES = {
    "millimeter": "mm", "centimeter": "cm", "decimeter": "dm", "meter": "m", "kilometer": "km", "metre": "m",
    "millimetre": "mm", "centimetre": "cm", "kilometre": "km", "inch": "in", "inche": "in", "foot": "ft",
    "feet": "ft", "yard": "yd", "mile": "mi", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "gram": "g", "kilogram": "kg", "milligram": "mg", "ounce": "oz", "pound": "lb", "liter": "L", "litre": "L",
    "l": "L", "milliliter": "ml", "millilitre": "ml", "dollar": "dollar", "usd": "dollar", "euro": "euro",
    "eur": "euro", "€": "euro", "£": "gbp", "people": "person", "men": "man", "women": "woman",
    "children": "child", "mph": "mi/h", "kph": "km/h", "kmph": "km/h", "unit": "unit",
}  # fmt: skip
_SINGLE = "mgshLlNJWKVAΩ€£¥"
NO_UNITS = frozenset({
    "or", "and", "not", "if", "where", "when", "with", "either", "neither", "both", "than", "then", "but",
    "nor", "vs", "versus", "times", "over", "plus", "minus", "squared", "cubed", "sin", "cos", "tan", "cot",
    "sec", "csc", "log", "ln", "lg", "exp", "sqrt", "pi", "mod", "to", "from", "between", "through", "by",
    "at", "theta", "alpha", "beta", "gamma", "delta", "lambda", "sigma", "omega", "phi", "rho", "tau",
    "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "max", "lim", "gcd", "lcm", "det", "true",
    "false", "yes", "no", "none", "infinity", "inf", "undefined",
})  # fmt: skip
"""Words that change what stands before them."""
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_WORD = rf"(?:[A-Za-z]{{2,}}|[{_SINGLE}])"
_POWER = r"(?:\^\{?-?\d\}?)"
_UNIT = rf"{_WORD}\.?{_POWER}?"
_TRAILING = re.compile(
    rf"(?P<value>(?:\S.*?)?[\d)}}!.\]i]|.*\\pi|.*[\d)}}]\s*[a-z])(?P<unit>\s*(?<![\\A-Za-z]){_UNIT}(?:\s*[/* ·]\s*(?:per\s+)?{_UNIT})*)"
)
_SCALE = re.compile(rf"(?P<value>.*\d)\s*(?P<scale>{'|'.join(_SCALES)})\b\s*(?P<rest>.*)")


def split_unit(text: str) -> tuple[str, str | None]:
    """(value, unit) of a canonical text; unit None when it has none. "5 million dollars" is (5*10^{6}, dollar)."""
    if scale := _SCALE.fullmatch(text):
        value = f"{scale['value']}*10^{{{_SCALES[scale['scale']]}}}"
        text = f"{value} {scale['rest']}".strip()
    match = _TRAILING.fullmatch(text) if len(text) <= 400 else None
    if match is None or not re.search(r"\d|\\pi", match["value"]):
        return text, None
    words = re.findall(r"[A-Za-zΩ€£¥]+", match["unit"])
    if any(word.lower() in NO_UNITS for word in words) or len(words) > 5:
        return text, None
    attached = not match["unit"].startswith(" ")
    if attached and (len(words[0]) == 1 or not _known(words[0])):  # 2s is a product
        return text, None
    return match["value"].strip(), _normal(match["unit"])


def _known(word: str) -> bool:
    return (
        word in _NAMES.values()
        or word.lower().rstrip("s") in _NAMES
        or word in ("mL", "kWh", "Hz", "kg", "mg")
    )


def _normal(unit: str) -> str:
    """One spelling of a unit: "square centimeters" and "cm^{2}" are both cm^2."""
    unit = re.sub(r"[{}.]", "", unit).strip()
    unit = re.sub(r"\s+per\s+|\s*/\s*", "/", unit)
    unit = re.sub(r"\b(?:square|sq)\s+([A-Za-z]+)", r"\1^2", unit)
    unit = re.sub(r"\b(?:cubic|cu)\s+([A-Za-z]+)", r"\1^3", unit)
    unit = re.sub(r"\b([A-Za-z]+)\s+squared\b", r"\1^2", unit)
    unit = re.sub(r"\b([A-Za-z]+)\s+cubed\b", r"\1^3", unit)
    return re.sub(r"[A-Za-zΩ€£¥]+", lambda word: _name(word.group()), unit)


def _name(word: str) -> str:
    if len(word) == 1:
        return _NAMES.get(word, word)
    lower = word.lower()
    for form in (lower, lower[:-1] if lower.endswith("s") else lower):
        if form in _NAMES:
            return _NAMES[form]
    return lower[:-1] if lower.endswith("s") and len(lower) > 2 else lower
