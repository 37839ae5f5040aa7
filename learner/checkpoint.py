"""Atomic checkpoints. `begin` gives a temporary folder beside the target, any process writes its part into it,
`commit` makes it the newest one. At every instant the newest complete checkpoint is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.core.errors import HeadwayError

MARKER = "COMPLETE"
_NAME = re.compile(r"version-(\d+)(?:\.(\d+))?")


class CheckpointFailed(HeadwayError):
    """A checkpoint, or another file of the run, could not be written. The previous checkpoint is intact."""


def begin(parent: Path, version: int) -> Path:
    """An empty folder `parent/.version-N.partial`; one that an interrupted save left is removed."""
    partial = parent / f".version-{version:08d}.partial"
    with writing(partial):
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    return partial


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failed write into `CheckpointFailed` with the path and the free space there."""
    try:
        yield
    except OSError as error:
        where = path if path.exists() else next(p for p in path.absolute().parents if p.exists())
        free = shutil.disk_usage(where).free
        raise CheckpointFailed(
            f"cannot write {error.filename or path}: {error.strerror or error} ({free:,} bytes free)"
        ) from error


def commit(partial: Path) -> Path:
    """Makes what `begin` gave the newest checkpoint and returns its folder `parent/version-N`.

    Order: files and folders to the disk, rename, completion marker to the disk, and only then the older
    checkpoints, and what interrupted saves left, are removed. One save at a time. Raises `CheckpointFailed`; a
    complete checkpoint is left then.
    """
    parent = partial.parent
    target = _free_name(parent, partial.name.removeprefix(".").removesuffix(".partial"))
    with writing(partial):
        sizes = {
            str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()
        }
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        if target.exists():
            shutil.rmtree(target)
        os.rename(partial, target)
        _sync(parent)
        marker = target / f".{MARKER}"
        marker.write_text(json.dumps(sizes, indent=1), encoding="utf-8")
        _sync(marker)
        os.rename(marker, target / MARKER)
        _sync(target)
        for other in (*_checkpoints(parent), *parent.glob(".version-*.partial")):
            if other != target:
                shutil.rmtree(other)
    return target


def newest_complete(parent: Path) -> Path | None:
    """The checkpoint of the highest version whose marker is there and whose files have the sizes it lists."""
    for folder in sorted(_checkpoints(parent), key=_order, reverse=True):
        if is_complete(folder):
            return folder
    return None


def is_complete(folder: Path) -> bool:
    return _fault(folder) is None


def passed_over(parent: Path) -> list[str]:
    """What is wrong with each checkpoint that is newer than the newest complete one, newest first."""
    newest = newest_complete(parent)
    faults = []
    for folder in sorted(_checkpoints(parent), key=_order, reverse=True):
        if folder == newest:
            break
        faults.append(f"{folder.name}: {_fault(folder)}")
    return faults


def was_complete(parent: Path) -> bool:
    """Whether a checkpoint was finished here once, and may be damaged now."""
    return any((folder / MARKER).exists() for folder in _checkpoints(parent))


def _fault(folder: Path) -> str | None:
    """What a checkpoint lacks; None when it is complete."""
    try:
        sizes = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        for name, size in sizes.items():
            if (found := (folder / name).stat().st_size) != size:
                return f"{name} has {found:,} of {size:,} bytes"
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        return "it was not finished" if missing == MARKER else f"{missing} is missing"
    except (OSError, ValueError) as error:
        return f"its {MARKER} is not readable ({error})"
    return None


def _checkpoints(parent: Path) -> list[Path]:
    return [p for p in parent.iterdir() if _NAME.fullmatch(p.name)] if parent.is_dir() else []


def _order(folder: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _free_name(parent: Path, name: str) -> Path:
    """`name`, or `name.1`, ... when a complete checkpoint of this version is there already (a run that was resumed
    and stopped at once): it stays until the new one is complete."""
    target, attempt = parent / name, 0
    while is_complete(target):
        attempt += 1
        target = parent / f"{name}.{attempt}"
    return target


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
