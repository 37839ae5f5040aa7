"""The generated pages say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.reference import PAGES


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(root: Path, name: str) -> None:
    assert (root / "docs" / name).read_text(encoding="utf-8") == PAGES[name](), "run: make docs"
