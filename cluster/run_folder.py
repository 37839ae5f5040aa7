"""The folder of a run: whether it may be used, and what it is resumed from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from headway.core.config import Config
from headway.core.errors import ConfigError
from headway.learner import checkpoint

MAY_CHANGE = (
    "run.steps",
    "run.checkpoint_every",
    "run.no_progress_deadline_s",
    "run.save_rollouts",
    "run.folder",
)
MAY_CHANGE_SECTIONS = ("generation", "verifiers", "queue", "metrics", "cluster")
"""What a resumed run may set anew: nothing that decides which data the weights have seen, and how."""


def prepare_folder(config: Config, *, resume: bool, overwrite: bool) -> Path | None:
    """Makes the run folder ready; returns the checkpoint to resume from, None for the start. Raises `ConfigError`."""
    folder = config.run_folder
    if resume:
        newest = checkpoint.newest_complete(folder / "checkpoints")
        if newest is None and not (folder / "config.json").exists():
            raise ConfigError(f"--resume: {folder} holds no run; start without --resume")
        # A run that ended before its first checkpoint goes on from its start.
        check_same_run(config, newest or folder)
        return newest
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            raise ConfigError(
                f"run folder {folder} exists; go on with --resume, replace it with --overwrite, or set run.name"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return None


def check_same_run(config: Config, saved: Path) -> None:
    """Refuses to go on with other data, another model or another algorithm. Raises `ConfigError` naming the keys."""
    try:
        before = _flat(json.loads((saved / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{saved} holds no readable config.json ({error}); it cannot be resumed") from error
    now = _flat(json.loads(config.model_dump_json()))
    changed = [
        f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and key not in MAY_CHANGE
        and key.partition(".")[0] not in MAY_CHANGE_SECTIONS
    ]
    if changed:
        raise ConfigError(
            f"--resume goes on with the same run, but {'; '.join(changed)}; set it back, or start a new run (run.name)"
        )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and key != "params":
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
