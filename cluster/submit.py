"""Sends a training run to a Ray cluster as a job: exactly this code, the resolved configuration, and the prompt files
that it names. All of it, and all questions beforehand, go through the cluster's dashboard."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, TypeVar

from headway.cluster import code
from headway.core import datasets
from headway.core.config import Config
from headway.core.errors import ClusterError, ConfigError
from headway.core.sections import MODELS

LARGEST_SHIPPED_FILE = 50 << 20
POLL_S = 1.0
AGENT_DEADLINE_S = 60.0
REQUEST_DEADLINE_S = 60.0
LOST_AFTER_S = 300.0
SHARE_OF_READING = 0.1
"""Of the time that a log is followed: each look at it reads all of it."""
SHOWN_LINES = 10
"""Of what a job has printed before someone takes its log up again."""
FULL_PERCENT = 95.0
"""Ray writes no objects to a disk that is fuller."""
EVERYTHING = 10_000
"""The longest list that a dashboard gives."""
INSTEAD = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
RUN = "headway_run"
"""In a job's metadata: the run's name."""
STOP_S = "headway_stop_s"
"""In a job's metadata: seconds that it may take to stop."""
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
        for package in (root / name for name in code.PACKAGES):
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
    for section, key in MODELS:
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
    config: Config,
    address: str,
    *,
    submission_id: str | None,
    resume: bool,
    overwrite: bool,
    say: Callable[[str], None],
) -> tuple[Any, str]:
    """Submits the run, once the cluster is known to take it; returns the client and the job's id. `say` is told what is no
    reason to refuse. Raises `ClusterError`, `ConfigError`."""
    from headway.cluster.run import CLOSE_DEADLINE_S
    from headway.cluster.session import CHECKPOINT_DEADLINE_S

    flags = [flag for flag, on in (("--resume", resume), ("--overwrite", overwrite)) if on]
    stop_s = round(config.learner.step_deadline_s + CHECKPOINT_DEADLINE_S + CLOSE_DEADLINE_S)
    with tempfile.TemporaryDirectory() as scratch:
        folder, package = Path(scratch) / "job", Path(scratch) / "package"
        folder.mkdir()
        job_folder(config, folder)
        with reaching(address):
            client = connect(address)
            python = check_cluster(client, config, say)
            job = free_id(client, address, config.run.name, submission_id)
        with zipfile.ZipFile(build_wheel(Path(scratch))) as wheel:
            wheel.extractall(package)
        sent = code.of({name: package / "headway" / name for name in code.PACKAGES})
        with reaching(address):
            try:
                _submit_when_ready(
                    client,
                    # Drivers run on the head, where whoever started Ray need not have its Python on the path.
                    entrypoint=shlex.join(
                        ["exec", python, "-P", "-m", "headway.cluster.cli", "train", "config.json", *flags]
                    ),
                    submission_id=job,
                    runtime_env={
                        "working_dir": str(folder),
                        # Not the wheel itself: Ray would install it with all that it depends on, and, as it goes by a
                        # wheel's name, take an older one of the same version for it.
                        "py_modules": [str(part) for part in sorted(package.iterdir())],
                        # Ray's own patience with a job that is to stop is three seconds.
                        "env_vars": {code.SENT: sent, "RAY_JOB_STOP_WAIT_TIME_S": str(stop_s)},
                    },
                    metadata={RUN: config.run.name, STOP_S: str(stop_s)},
                )
            except (RuntimeError, ValueError):
                free_id(client, address, config.run.name, job)  # someone else may have been faster
                raise
    return client, job


def connect(address: str) -> Any:
    """Ray's client for jobs, with a deadline for each request; by itself it waits for ever for a lost answer."""
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )
    from ray.job_submission import JobSubmissionClient

    if not address.startswith(("http://", "https://")):
        raise ClusterError(f"--address={address}: give the address of the dashboard, as in http://HEAD:8265")
    # With a token at hand the client must be told to send it, whatever the cluster's default is.
    logging.getLogger("ray").setLevel(logging.ERROR)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    for uploads in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
        logging.getLogger(uploads).setLevel(logging.WARNING)

    class Client(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=REQUEST_DEADLINE_S, **options)

    with reaching(address), _nothing_in_its_place():
        return Client(address)


@contextmanager
def _nothing_in_its_place() -> Iterator[None]:
    """Without the variables that Ray would follow instead of the address that its client is given."""
    hidden = {name: os.environ.pop(name) for name in INSTEAD if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def reaching(address: str) -> Iterator[None]:
    """What can go wrong between here and the dashboard, as `ClusterError`."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        raise ClusterError(
            f"{address}: unauthorised; set RAY_AUTH_TOKEN to the cluster's token, or put it into ~/.ray/auth_token"
        ) from error
    except json.JSONDecodeError as error:
        raise ClusterError(f"{address}: what answers there is no dashboard of Ray") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(f"{address}: {str(error).splitlines()[0]}") from error


# ---- before anything is sent -------------------------------------------------------------------------------


def look(client: Any, path: str) -> Any:
    """What the dashboard says there. Raises `RuntimeError`."""
    answer = client._do_request("GET", path)
    if answer.status_code != 200:
        client._raise_error(answer)
    return answer.json()["data"]


def listed(client: Any, kind: str, **equal: str) -> list[dict[str, Any]]:
    """Entries of Ray's state, a `kind` such as `nodes`, whose columns have these values. Raises `RuntimeError`."""
    filters = "".join(
        f"&filter_keys={key}&filter_predicates=%3D&filter_values={value}" for key, value in equal.items()
    )
    return look(client, f"/api/v0/{kind}?detail=1&limit={EVERYTHING}{filters}")["result"]["result"]


def check_cluster(client: Any, config: Config, say: Callable[[str], None]) -> str:
    """Versions, resources and disks of the cluster against the run; returns the Python of its head. Nodes are not compared
    with one another: Ray lets none in that differs from the head. Raises `ClusterError`, a line for each fault."""
    from headway.cluster.room import can_grow, shortfalls

    head = look(client, "/api/v0/cluster_metadata")
    faults: list[str] = []
    if head["rayVersion"] != (own := package_version("ray")):
        faults.append(
            f"the cluster has Ray {head['rayVersion']}, this machine {own}; install the same on both"
        )
    if head["pythonVersion"].split(".")[:2] != (own := platform.python_version()).split(".")[:2]:
        faults.append(
            f"the cluster has Python {head['pythonVersion']}, this machine {own}; use the same on both"
        )
    end = time.monotonic() + AGENT_DEADLINE_S
    while not (alive := listed(client, "nodes", state="ALIVE")) and time.monotonic() < end:
        time.sleep(POLL_S)  # a cluster that has just started does not know its nodes yet
    nodes = [(node["resources_total"], node["labels"]) for node in alive]
    lacking = shortfalls(config, nodes)
    if lacking:
        status = look(client, "/api/cluster_status")["clusterStatus"]
        report = ((status or {}).get("autoscalerReport") or {}).get("nodeTypeMapping")
        if can_grow(report, (labels for _, labels in nodes)):
            for line in lacking:
                say(f"warning: {line} (or leave that to the autoscaler)")
        else:
            faults += lacking
    if faults:
        raise ClusterError("\n".join(faults))
    python = "python"
    for node in look(client, "/nodes?view=summary")["summary"]:
        about = node.get("raylet", {})
        disk = node.get("disk", {}).get(about.get("tempDir"))
        if disk and disk["percent"] > FULL_PERCENT:
            say(
                f"warning: {about['tempDir']} on node {node['ip']} is {disk['percent']:g}% full ({disk['free'] >> 30} GiB free); "
                f"Ray spills nothing to a disk over {FULL_PERCENT:g}%: make room, or start it there with another --temp-dir"
            )
        if about.get("isHeadNode"):
            for argument in node.get("cmdline", []):
                key, _, command = argument.partition("=")
                if key == "--python_worker_command":
                    python = shlex.split(command)[0]
    return python


def free_id(client: Any, address: str, run: str, wanted: str | None) -> str:
    """The id of a new job for this run: `wanted`, or `headway-RUN`, with a number from the second one on. Raises
    `ClusterError` when there is a job of this id, or one that works on this run."""
    jobs = {job.submission_id: job for job in client.list_jobs() if job.submission_id}
    for job in jobs.values():
        if run_of(job) == run and not job.status.is_terminal():
            raise ClusterError(
                f"run {run!r} is job {job.submission_id} on this cluster already ({job.status}); follow it with "
                f"'{attaching(job.submission_id, address)}', end it with '{stopping(job.submission_id, address)}', or give this "
                "one another run.name"
            )
    if wanted is None:
        names = (
            f"headway-{run}" + (f"-{number}" if number > 1 else "") for number in range(1, len(jobs) + 2)
        )
        return next(name for name in names if name not in jobs)
    if wanted in jobs:
        raise ClusterError(
            f"there is a job {wanted} on this cluster already ({jobs[wanted].status}); look at it with "
            f"'{attaching(wanted, address)}', or give another --submission-id"
        )
    return wanted


def attaching(job: str, address: str) -> str:
    """The command that follows a job."""
    return f"headway submit --attach {job} --address {address}"


def stopping(job: str, address: str) -> str:
    """The command that ends a job."""
    return f"headway stop {job} --address {address}"


def _submit_when_ready(client: Any, **job: Any) -> None:
    """A cluster that has just started answers for a while that it has no agent yet."""
    end = time.monotonic() + AGENT_DEADLINE_S
    while True:
        try:
            client.submit_job(**job)
            return
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(POLL_S)


# ---- following ---------------------------------------------------------------------------------------------


def attach(address: str, name: str) -> tuple[Any, str, int]:
    """A job that was submitted, by its id or its run's name: the client, its id, and where in its log the newest lines
    begin. Raises `ClusterError`."""
    client = connect(address)
    with reaching(address):
        job = find(client, name)
        logs = client.get_job_logs(job.submission_id)
    newest = "".join(logs.splitlines(keepends=True)[-SHOWN_LINES:])
    return client, job.submission_id, len(logs) - len(newest)


def find(client: Any, name: str | None) -> Any:
    """Ray's account of the job of this id, else of this run; None: of the only one that works on a run. Of several of a run
    the newest. Raises `ClusterError`."""
    jobs = sorted(
        (job for job in client.list_jobs() if job.submission_id), key=lambda job: job.start_time or 0
    )
    working = [job for job in jobs if run_of(job) and not job.status.is_terminal()]
    if name is None:
        if len(working) == 1:
            return working[0]
        names = ", ".join(job.submission_id for job in working) or "none"
        raise ClusterError(f"name a job; those that work on a run: {names}")
    # The id first: a run may be called as another run's job is.
    for called in (lambda job: job.submission_id, run_of):
        for job in reversed(jobs):
            if called(job) == name:
                return job
    names = ", ".join(job.submission_id for job in jobs) or "none"
    raise ClusterError(f"this cluster has no job {name!r}; jobs: {names}")


def run_of(job: Any) -> str | None:
    """The run that a job works on, if it was submitted here."""
    return (job.metadata or {}).get(RUN)


def follow(client: Any, job: str, seen: int = 0) -> Iterator[str]:
    """The job's log as it grows, from a place in it, until the job ends. Raises `ClusterError`."""
    while True:
        began = time.monotonic()
        # The status before the log: a log that was read after the end is whole.
        ended = _answer(job, lambda: client.get_job_status(job)).is_terminal()
        logs = _answer(job, lambda: client.get_job_logs(job))
        yield logs[seen:]
        # One that is not to be had for a moment is read as an empty one.
        seen = max(seen, len(logs))
        if ended:
            return
        time.sleep(max(POLL_S, (time.monotonic() - began) / SHARE_OF_READING))


def exit_code(client: Any, job: str) -> int:
    """Exit code of an ended job: its driver's own; 130 when it was stopped, 1 when there is none."""
    info = _answer(job, lambda: client.get_job_info(job))
    if info.status == "SUCCEEDED":
        return 0
    if info.status == "STOPPED":
        return 130
    own = info.driver_exit_code or 1
    return own if own > 0 else 128 - own  # ended by a signal


def _answer(job: str, ask: Callable[[], T]) -> T:
    """A lost connection is taken up again. Raises `ClusterError` after `LOST_AFTER_S` without an answer, and at once when the
    cluster does not know the job."""
    from ray.exceptions import AuthenticationError

    end, is_lost = time.monotonic() + LOST_AFTER_S, False
    while True:
        try:
            found = ask()
            if is_lost:
                print("the cluster answers again", file=sys.stderr)
            return found
        except AuthenticationError as error:
            raise ClusterError(
                f"the cluster does not take this token any more; job {job} may still be running"
            ) from error
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0]
            if "status code 404" in reason:
                raise ClusterError(
                    f"the cluster does not know job {job}: it was deleted, or the cluster started anew"
                ) from error
            if time.monotonic() > end:
                raise ClusterError(
                    f"the cluster did not answer for {LOST_AFTER_S:.0f} s; job {job} may still be running: {reason}"
                ) from error
            if not is_lost:
                print(f"no answer ({reason}); trying again for {LOST_AFTER_S:.0f} s", file=sys.stderr)
            is_lost = True
        time.sleep(POLL_S)
