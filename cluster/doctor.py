"""Every check that can be made before a run: each says what it found, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from headway.cluster import doctor_cluster, doctor_files
from headway.cluster.doctor_facts import Facts, Row, Unknown, faults_of
from headway.core.config import load_config
from headway.core.errors import ConfigError, HeadwayError


def examine(path: Path, overrides: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of all checks, each as soon as it is known. A check that fails ends none but itself; without a
    configuration there is nothing else to check."""
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        yield from faults_of("configuration", error)
        return
    yield Row(
        check="configuration", state="ok", value=f"{path}: run {config.run.name!r}, {config.run.steps} steps"
    )
    from headway.cluster.preflight import cautions

    for caution in cautions(config):
        yield Row(check="configuration", state="warning", value=caution)
    facts = Facts(config)
    try:
        for name, check in CHECKS:
            if name in (OFFLINE_ONLY if config.stage == "rl" else RL_ONLY):
                continue
            try:
                yield from (replace(row, check=name) for row in check(facts))
            except Unknown as missing:
                yield Row(check=name, state="skipped", value=f"not looked at: needs {missing}")
            except HeadwayError as error:
                yield from faults_of(name, error)
    finally:
        from headway.cluster.joining import disconnect

        disconnect()


CHECKS = (*doctor_files.CHECKS, *doctor_cluster.CHECKS)
RL_ONLY = ("prompts", "golds", "scorers", "sandbox", "lengths", "queue", "object store")
"""Checks of what other stages do not have,"""
OFFLINE_ONLY = ("rows",)
"""and of what only they have."""
