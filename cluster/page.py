"""What the HTML pages of a run have in common: templates that escape, and texts and numbers as a person reads them."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import unicodedata
from pathlib import Path
from typing import Any

MAX_CHARACTERS = 4000
"""A longer text loses its middle."""
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories of characters that do not show, or that move others."""


def write_page(template: str, path: Path, **values: Any) -> None:
    """Writes the page whole or not at all. What a model or a user wrote goes through the filter `visible`; everything
    that is no `Markup` is escaped. Raises `OSError`."""
    from jinja2 import ChainableUndefined, Environment, FileSystemLoader

    environment = Environment(
        autoescape=True, undefined=ChainableUndefined, loader=FileSystemLoader(Path(__file__).parent)
    )
    environment.filters.update(number=number, visible=visible, excerpt=excerpt, digest=digest)
    page = environment.get_template(template).render(**values)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def digest(script: str) -> str:
    """As a content security policy names the one script that may run."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def visible(text: str) -> str:
    """The text with every character that would not be seen, or would move others, as its number; newlines stay."""
    unseen = {c for c in set(text) if c != "\n" and unicodedata.category(c) in UNSEEN}
    return text.translate({ord(c): f"⟨U+{ord(c):04X}⟩" for c in unseen})


def excerpt(text: str) -> str:
    """The text, of a long one its beginning and its end."""
    half = MAX_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[… {left_out:,} characters left out …]\n{text[-half:]}" if left_out > 0 else text


def number(value: float | None, digits: int = 3) -> str:
    """Fixed point, never a negative zero; a dash where there is no value."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{round(value, digits) + 0.0:,.{digits}f}"
