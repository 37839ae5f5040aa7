"""Folder X is headway.X, and nothing else."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["core", "verifiers", "learner", "actors", "cluster"])
def test_folders_are_importable_only_under_their_full_name(name: str) -> None:
    assert importlib.util.find_spec(f"headway.{name}") is not None
    assert importlib.util.find_spec(name) is None


def test_every_package_is_listed_for_the_wheel(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.name for path in root.glob("*/__init__.py")}
    assert {name.removeprefix("headway.") for name in project["packages"]} == folders
    assert project["package-dir"] == {f"headway.{name}": name for name in folders}
    assert not list(root.glob("*/*/__init__.py"))  # packages stay flat: a nested one would miss the wheel
