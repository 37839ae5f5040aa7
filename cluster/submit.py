"""Sends a training run to a Ray cluster as a job: exactly this code as a wheel, the resolved configuration, and the
prompt files that it names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from headway.core import datasets
from headway.core.config import Config
from headway.core.errors import ClusterError, ConfigError

LARGEST_SHIPPED_FILE = 50 << 20
POLL_S = 1.0
AGENT_DEADLINE_S = 60.0
REQUEST_DEADLINE_S = 60.0
LOST_AFTER_S = 300.0
T = TypeVar("T")


def build_wheel(target: Path) -> Path:
    """A wheel of the code that is running. Raises `ConfigError` when that is not a source tree."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        raise ConfigError(
            f"submit builds a wheel of headway's source tree, but {root} is none; install with pip install -e ."
        )
    with tempfile.TemporaryDirectory() as scratch:
        # A copy, so that building leaves nothing behind in the tree.
        for package in (path.parent for path in root.glob("*/__init__.py")):
            copy = Path(scratch) / package.name
            shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            if (root / name).is_file():
                shutil.copy(root / name, scratch)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        done = subprocess.run(
            [*command, "--wheel-dir", str(target), scratch], capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise ConfigError(f"building the wheel failed:\n{done.stderr[-2000:]}")
    return next(target.glob("headway-*.whl"))


def job_folder(config: Config, folder: Path) -> None:
    """What the job finds in its working directory: the configuration, and the prompts, files or folders, under
    their keys."""
    tree = json.loads(config.model_dump_json())
    tree["cluster"]["address"] = "auto"
    tree["run"]["folder"] = str(config.run.folder.resolve())
    for key, own in (("data.verifier", config.data.verifier), ("environment.name", config.environment.name)):
        if own and ".py:" in own and not Path(own).is_absolute():
            raise ConfigError(
                f"{key}={own} is a file here and not on the cluster; give an absolute path that every node can read, or a "
                "module that is installed there"
            )
    for section, key in (
        ("model", "path"),
        ("judge", "model"),
        ("reward_model", "path"),
        ("reference", "path"),
        ("critic", "path"),
    ):
        name = tree[section][key]
        if name is not None and Path(name).is_dir():  # models stay where they are, as the run's folder does
            tree[section][key] = str(Path(name).resolve())
    for key in ("source", "eval_source", "demonstrations"):
        source = tree["data"][key]
        if source is None or source.partition(":")[0] in ("reasoning_gym", *datasets.PACKAGED):
            continue
        path, split = datasets.place_of(source)
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        if files and sum(file.stat().st_size for file in files) <= LARGEST_SHIPPED_FILE:
            suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
            name = f"{key}{suffix}"  # two files of one name would overwrite one another
            if path.is_dir():
                shutil.copytree(path, folder / name)
            else:
                shutil.copy(path, folder / name)
            tree["data"][key] = f"{name}:{split}" if split else name
        elif not path.is_absolute():
            raise ConfigError(
                f"data.{key}={source} is missing here or over {LARGEST_SHIPPED_FILE >> 20} MiB, so it is not "
                "shipped; give an absolute path that every node can read"
            )
    (folder / "config.json").write_text(json.dumps(tree, indent=2), encoding="utf-8")


def submit(
    config: Config, address: str, *, submission_id: str | None, resume: bool, overwrite: bool
) -> tuple[Any, str]:
    """Submits the run; returns the client and the job's id. Raises `ClusterError`."""
    from ray.exceptions import AuthenticationError

    # With a token at hand the client must be told to send it, whatever the cluster's default is.
    if os.environ.get("RAY_AUTH_TOKEN") or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    flags = [flag for flag, on in (("--resume", resume), ("--overwrite", overwrite)) if on]
    with tempfile.TemporaryDirectory() as scratch:
        wheels, folder = Path(scratch) / "wheels", Path(scratch) / "job"
        wheels.mkdir()
        folder.mkdir()
        wheel = build_wheel(wheels)
        job_folder(config, folder)
        try:
            client = connect(address)
            job = _submit_when_ready(
                client,
                entrypoint=" ".join(["python -m headway.cluster.cli train config.json", *flags]),
                submission_id=submission_id or f"headway-{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}",
                runtime_env={"working_dir": str(folder), "py_modules": [str(wheel)]},
                metadata={"headway_run": config.run.name},
            )
        except AuthenticationError as error:
            raise ClusterError(
                f"cannot submit to {address}: unauthorised; set RAY_AUTH_TOKEN to the cluster's token, or put it into "
                "~/.ray/auth_token"
            ) from error
        except (OSError, RuntimeError, ValueError) as error:
            raise ClusterError(f"cannot submit to {address}: {str(error).splitlines()[0]}") from error
    return client, job


def connect(address: str) -> Any:
    """Ray's client for jobs, with a deadline for each request; by itself it waits for ever for a lost answer."""
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=REQUEST_DEADLINE_S, **options)

    return Client(address)


def _submit_when_ready(client: Any, **job: Any) -> str:
    """A cluster that has just started answers for a while that it has no agent yet."""
    end = time.monotonic() + AGENT_DEADLINE_S
    while True:
        try:
            return client.submit_job(**job)
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(POLL_S)


def follow(client: Any, job: str) -> Iterator[str]:
    """The job's log as it grows, until it ends."""
    seen = 0
    while True:
        # The status before the log: a log that was read after the end is whole.
        ended = _answer(job, lambda: client.get_job_status(job)).is_terminal()
        logs = _answer(job, lambda: client.get_job_logs(job))
        yield logs[seen:]
        seen = len(logs)
        if ended:
            return
        time.sleep(POLL_S)


def exit_code(client: Any, job: str) -> int:
    """Exit code of an ended job: its driver's own, 1 when it has none."""
    info = _answer(job, lambda: client.get_job_info(job))
    if info.status == "SUCCEEDED":
        return 0
    return info.driver_exit_code or 1


def _answer(job: str, ask: Callable[[], T]) -> T:
    """A lost connection is taken up again. Raises `ClusterError` after `LOST_AFTER_S` without an answer."""
    end = time.monotonic() + LOST_AFTER_S
    while True:
        try:
            return ask()
        except (RuntimeError, OSError) as error:
            if time.monotonic() > end:
                raise ClusterError(
                    f"the cluster did not answer for {LOST_AFTER_S:.0f} s; job {job} may still be running: "
                    f"{str(error).splitlines()[0]}"
                ) from error
        time.sleep(POLL_S)
