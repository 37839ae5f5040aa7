"""The folder of a run: whether it may be used, and what it is resumed from."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headway.core.config import Config
from headway.core.errors import ConfigError
from headway.core.sections import Algorithm
from headway.learner import checkpoint

INPUTS = "inputs.json"
WRITTEN_FIRST = ("config.json", "rows.parquet", "demonstrations.parquet")
"""One of them is in every folder that a run has written to."""
MAY_CHANGE = (
    "run.steps",
    "run.checkpoint_every",
    "run.no_progress_deadline_s",
    "run.max_restarts",
    "run.save_rollouts",
    "run.folder",
    "offline.rounds",
    "lag.straggler_deadline_s",
    *(
        f"{role}.{key}"
        for role in ("learner", "reference", "critic", "judge", "reward_model")
        for key in ("replicas", "cpus", "gpus", "threads", "labels", "microbatch_tokens")
    ),
    "judge.deadline_s",
    "judge.max_concurrent_requests",
    "judge.gpu_memory_utilization",
    "judge.kv_cache_gib",
    "learner.activation_checkpointing",
    "learner.bucket_mib",
    "learner.step_deadline_s",
)
MAY_CHANGE_SECTIONS = ("generation", "verifiers", "queue", "metrics", "cluster")
"""What a resumed run may set anew: nothing that decides which data the weights have seen, and how."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Makes the folder, if it is not there, and keeps other drivers of this machine out of it. Raises `ConfigError` when one
    is in it, and where there can be none. A folder that is still empty at the end is taken away."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"run folder {folder} cannot be made: {error.strerror}; set run.folder") from error
    try:
        # A network file system may have no such locks; on a cluster the names of the run's actors are taken as well.
        with suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"run folder {folder} is in use: a run is training in it; wait for its end, stop it, or set run.name"
                ) from None
        yield
    finally:
        os.close(lock)
        with suppress(OSError):
            folder.rmdir()


def prepare_folder(config: Config, *, resume: bool, overwrite: bool) -> Path | None:
    """Makes the run folder, which is there, ready; returns the checkpoint to resume from, None for the start. Raises
    `ConfigError`."""
    folder = config.run_folder
    if resume and overwrite:
        raise ConfigError("--resume goes on with the run that --overwrite would replace; give one of them")
    if resume:
        checkpoints = folder / "checkpoints"
        newest = checkpoint.newest_complete(checkpoints)
        if newest is None and checkpoint.was_complete(checkpoints):
            raise ConfigError(
                f"--resume: no checkpoint in {checkpoints} is whole ({'; '.join(checkpoint.passed_over(checkpoints))}); "
                "restore what is missing, or remove it and lose its steps"
            )
        if newest is None and not (folder / "config.json").exists():
            raise ConfigError(f"--resume: {folder} holds no run; start without --resume")
        # A run that ended before its first checkpoint goes on from its start.
        check_same_run(config, newest or folder)
        return newest and newest.resolve()  # actors work in another directory
    if any(folder.iterdir()):
        if not overwrite:
            raise ConfigError(
                f"run folder {folder} exists; go on with --resume, replace it with --overwrite, or set run.name"
            )
        if not any((folder / name).exists() for name in WRITTEN_FIRST):
            raise ConfigError(
                f"--overwrite: {folder} holds other things than a run; set run.name or run.folder"
            )
        for each in folder.iterdir():
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
    return None


def check_same_run(config: Config, saved: Path) -> None:
    """Refuses to go on with other data, another model or another algorithm. A key that the run was not written with, because
    it is newer, was as it is by itself. Raises `ConfigError` naming the keys."""
    try:
        tree = json.loads((saved / "config.json").read_text(encoding="utf-8"))
        if missing := {"run", "model", "data", "algorithm"} - tree.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        before = _flat(tree)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{saved} holds no readable config.json ({error}); it cannot be resumed") from error
    now = _flat(json.loads(config.model_dump_json()))
    preset = Algorithm(preset=config.algorithm.preset)
    by_itself = _flat(json.loads(Config().model_copy(update={"algorithm": preset}).model_dump_json()))
    before = by_itself | before
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


def check_same_inputs(folder: Path, inputs: dict[str, str], *, resume: bool) -> None:
    """Keeps the fingerprints of model and data in the run folder, and refuses to go on with others under the same
    names. Raises `ConfigError`."""
    file = folder / INPUTS
    if resume:
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{folder} holds no readable {INPUTS} ({error}); it cannot be resumed"
            ) from error
        if changed := [key for key in inputs if before.get(key) != inputs[key]]:
            raise ConfigError(
                f"--resume: the content of {' and '.join(changed)} is not what it was; put it back, or start a new run "
                "(run.name)"
            )
    file.write_text(json.dumps(inputs), encoding="utf-8")


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and key != "params":
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
