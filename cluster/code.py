"""Which code a process runs, so that the processes of one run can tell whether it is the same on all machines."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from headway.core.errors import ClusterError

PACKAGES = ("actors", "cluster", "core", "learner", "verifiers")
SENT = "HEADWAY_CODE"
"""Environment variable of a submitted job: what `here` said where it was submitted."""
DIGEST_BYTES = 8


@cache
def here() -> str:
    """What this process imports, as in `0.1.0 (source 5f2ab1c09e77d4e3)`. What is edited later changes nothing: the process
    may have imported it before."""
    specs = {package: find_spec(f"headway.{package}") for package in PACKAGES}
    return of({package: Path(spec.origin).parent for package, spec in specs.items() if spec and spec.origin})


def of(folders: Mapping[str, Path]) -> str:
    """Version, and a digest of the modules in the folders of these packages."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for package, folder in sorted(folders.items()):
        for file in sorted(folder.glob("*.py")):
            content = file.read_bytes()
            digest.update(f"{package}/{file.name} {len(content)}\n".encode() + content)
    return f"{version('headway')} (source {digest.hexdigest()})"


def check(expected: str, node: str) -> None:
    """The driver runs `expected`: a version, or what `here` says there. Raises `ClusterError` where this process, on `node`,
    runs something else."""
    if expected not in (version("headway"), here()):
        raise ClusterError(difference(here(), expected, node))


def difference(found: str | None, expected: str, node: str) -> str:
    """One line that says so. `found`: None where there is no headway that could say what it is."""
    runs = f"runs headway {found}" if found else "has no headway, or a much older one"
    return f"node {node} {runs}, the driver {expected}; install the same on both, or use headway submit, which brings it along"


def check_sent(node: str) -> None:
    """The driver of a submitted job must run the code that was sent with it. Raises `ClusterError`."""
    sent = os.environ.get(SENT)
    if sent is not None and sent != here():
        raise ClusterError(
            f"the driver on node {node} runs headway {here()}, but {sent} was submitted; another one comes first on that "
            "node's import path (PYTHONPATH): take it away"
        )
