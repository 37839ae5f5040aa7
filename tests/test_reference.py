"""The generated reference pages say what the code says."""

from pathlib import Path
from typing import get_args

import pytest

from headway.core.choices import CHOICES, TITLES
from headway.core.reference import PAGES, algorithms_page
from headway.core.sections import Algorithm, Correction

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run 'make docs'"


def test_the_tables_of_algorithms_are_up_to_date() -> None:
    page = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    assert page == algorithms_page(page), "run 'make docs'"


@pytest.mark.parametrize("key", CHOICES)
def test_every_value_of_a_choice_is_explained(key: str) -> None:
    values = get_args(Correction) if key == "correction" else get_args(Algorithm.model_fields[key].annotation)
    assert set(CHOICES[key]) == set(values)
    assert key in TITLES
