"""Units behind a value: recognised, so that a missing one can be forgiven and a different one cannot."""

from __future__ import annotations

import re
from collections import Counter

Unit = frozenset[tuple[str, int]]
"""Names with their powers: km/h is {(km, 1), (h, -1)}. Empty: none."""

_MEASURES = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "dm": "decimeter decimetre", "m": "meter metre",
    "km": "kilometer kilometre", "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "s": "second sec", "min": "minute", "h": "hour hr", "day": "", "week": "wk", "month": "", "year": "yr",
    "mg": "milligram", "g": "gram", "kg": "kilogram kilo", "oz": "ounce", "pound": "lb gbp £", "ton": "tonne",
    "ml": "milliliter millilitre", "L": "l liter litre", "gallon": "gal",
    "dollar": "usd buck", "euro": "eur €", "cent": "¢", "yen": "¥",
    "celsius": "℃", "fahrenheit": "℉", "radian": "rad", "unit": "",
}  # fmt: skip
_NAMES = {name: unit for unit, names in _MEASURES.items() for name in (unit, *names.split())}
_IRREGULAR = {"people": "person", "men": "man", "women": "woman", "children": "child"}
_RATES = {"mph": "mi/h", "kph": "km/h", "kmph": "km/h", "kmh": "km/h"}
_SYMBOLS = frozenset({
    "mL", "Hz", "kHz", "MHz", "kJ", "kW", "kWh", "Pa", "kPa", "eV", "mA", "mV", "kV", "kN", "Nm", "dB", "mol", "pt",
    "KB", "MB", "GB", "TB",
})  # fmt: skip
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_SINGLE = "mgshlLNJWKVAΩ€£¥¢"
NO_UNITS = frozenset({
    "or", "and", "not", "if", "where", "when", "with", "either", "neither", "both", "than", "then", "but",
    "nor", "vs", "versus", "times", "over", "plus", "minus", "sin", "cos", "tan", "cot",
    "csc", "log", "ln", "lg", "exp", "sqrt", "pi", "mod", "to", "from", "between", "through", "by",
    "at", "theta", "alpha", "beta", "gamma", "delta", "lambda", "sigma", "omega", "phi", "rho", "tau",
    "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "max", "lim", "gcd", "lcm", "det", "true",
    "false", "yes", "no", "none", "infinity", "inf", "undefined", "more", "less", "most", "least", "choose",
    "half", "twice", "double", "triple", "except", "factorial", "squared", "cubed",
})  # fmt: skip
"""Words that change what stands before them."""
_FILLERS = frozenset({"per", "of", "in", "sq", "cu"})
_AFTER_UNIT = frozenset({"squared", "cubed"})
"""Words that are part of a unit behind another word of it."""
_WORD = rf"(?:[A-Za-z]{{2,}}|[{_SINGLE}])"
_POWER = r"(?:\^(?:\{-?\d\}|-?\d))"
_UNIT = rf"{_WORD}\.?{_POWER}?"
_UNITS = rf"{_UNIT}(?:\s*[/* ]\s*(?:per\s+)?{_UNIT}|\s+{_WORD})*"
_FRACTION = rf"\\frac\{{({_UNITS})\}}\{{({_UNITS})\}}"
_TRAILING = re.compile(
    rf"(?P<value>(?:\S.*?)?[\d)}}!.\]i]|.*\\pi|.*[\d)}}]\s*[a-z])(?P<unit>\s*(?<![\\A-Za-z]){_UNITS})"
)
_SCALE = re.compile(rf"(?P<value>.*\d)\s*(?P<scale>{'|'.join(_SCALES)})\b\s*(?P<rest>.*)")
_SPELLINGS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[{}.]", ""),
        (r"\b(?:square|sq)\s+([A-Za-z]+)", r"\1^2"),
        (r"\b(?:cubic|cu)\s+([A-Za-z]+)", r"\1^3"),
        (r"\b([A-Za-z]+)\s+squared\b", r"\1^2"),
        (r"\b([A-Za-z]+)\s+cubed\b", r"\1^3"),
        (r"\b(" + "|".join(_RATES) + r")\b", lambda match: _RATES[match[1]]),
        (r"\s*(?:\bper\b|/)\s*", " / "),
    )
)
_FACTOR = re.compile(r"(/)|([A-Za-zΩ€£¥¢]+)(?:\^(-?\d))?")

MEASURE = rf"(?:(?:square|cubic|sq\.?|cu\.?) )?(?:{'|'.join(sorted(map(re.escape, _NAMES), key=len, reverse=True))})s?(?:\^?[23²³])?(?:\s*/\s*{_WORD}{_POWER}?| per {_WORD})?"
"""Pattern of a unit of measure in a running text."""


def split_unit(text: str) -> tuple[str, Unit | None]:
    """(value, unit) of a canonical text; unit None when it has none. "5 million dollars" is (5*1000000, dollar)."""
    if scale := _SCALE.fullmatch(text):
        value = f"{scale['value']}*{_SCALES[scale['scale']]}"
        text = f"{value} {scale['rest']}".strip()
    text = re.sub(_FRACTION + "$", r" \1/\2", text)
    match = _TRAILING.fullmatch(text) if len(text) <= 400 else None
    if match is None or not re.search(r"\d|\\pi", match["value"]):
        return text, None
    words = re.findall(r"[A-Za-zΩ€£¥¢]+", match["unit"])
    if len(words) > 5 or any(
        word.lower() in NO_UNITS and not (place and word.lower() in _AFTER_UNIT)
        for place, word in enumerate(words)
    ):
        return text, None
    attached = not match["unit"].startswith(" ")
    if (attached and not _is_attachable(words[0])) or not all(
        map(_is_unit, words)
    ):  # 2s and 2 ab are products
        return text, None
    return match["value"].strip(), _read(match["unit"])


def cut_unit(text: str, unit: Unit) -> tuple[str, Unit | None]:
    """Without this unit, should it stand right at the digits: 50m is 50 metres beside an answer in metres."""
    match = re.fullmatch(rf"(.*\d)({_UNITS})", text)
    return (match[1], unit) if match and _read(match[2]) == unit else (text, None)


def _is_known(word: str) -> bool:
    return _name(word) in _MEASURES or word in _SYMBOLS or word in _RATES


def _is_attachable(word: str) -> bool:
    return word in "€£¥¢" or (len(word) > 1 and _is_known(word))


def _is_unit(word: str) -> bool:
    """Known, or a word of a language: long enough, and with a vowel."""
    if len(word) == 1 or _is_known(word) or word in _FILLERS:
        return True
    return len(word) > 2 and re.search("[aeiouAEIOU]", word) is not None


def _read(unit: str) -> Unit:
    """The same for every spelling: "square centimeters" and "cm^{2}", "km/h" and "km h^{-1}"."""
    for pattern, replacement in _SPELLINGS:
        unit = pattern.sub(replacement, unit)
    powers: Counter[str] = Counter()
    sign = 1
    for slash, word, power in _FACTOR.findall(unit):
        if slash:
            sign = -1
            continue
        powers[_name(word)] += sign * int(power or 1)
        sign = 1
    return frozenset(powers.items())


def _name(word: str) -> str:
    if word in _NAMES:
        return _NAMES[word]
    if len(word) == 1:
        return word
    lower = word.lower()
    singular = lower[:-1] if lower.endswith("s") and len(lower) > 2 else lower
    return _NAMES.get(lower) or _NAMES.get(singular) or _IRREGULAR.get(lower) or singular
