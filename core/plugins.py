"""Users' own code by name: `package.module:attribute` or `path/to/file.py:attribute`."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.core.errors import DataError


@lru_cache(maxsize=64)
def load(name: str) -> Any:
    """What the name stands for; it has a colon. A file is run once in each process. Raises `DataError`."""
    place, _, attribute = name.rpartition(":")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        return getattr(module, attribute)
    except Exception as error:  # whatever a user's module does when it is imported
        raise DataError(f"{name!r} cannot be imported: {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # as for every name that ends with .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
