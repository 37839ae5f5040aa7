"""What a run holds on a cluster, and how it comes to hold nothing: its driver ends it, or, where the driver is gone, what
carries the run's name is removed."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.state import actors as actor_table
from ray._private.state import jobs as job_table
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from headway.cluster import submit
from headway.cluster.control import ask, cluster_of, find
from headway.cluster.joining import PROBE_DEADLINE_S, namespace
from headway.cluster.placement import POLL_S
from headway.cluster.run import CLOSE_DEADLINE_S
from headway.cluster.session import CHECKPOINT_DEADLINE_S
from headway.core.errors import ClusterError, Starved
from headway.core.metrics import ROLES

CLEANING_S = 15.0
"""For the cluster itself to take what a driver had that is gone."""
REMOVAL_S = 60.0
"""For what was removed to be gone."""
STOP_S = 3600.0
"""For a job to end that does not say how long that may take."""
JOB_OF_ID = slice(-8, None)
"""Hexadecimal digits of an actor's or placement group's id that name the job, one per driver, which made it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A placement group of a run."""

    identity: str
    """Hexadecimal."""
    name: str
    """`RUN-learner` or `RUN-ROLE-REPLICA`."""
    role: str
    is_placed: bool
    nodes: tuple[str, ...]
    """Addresses, one per bundle; of a group that waits for its place none."""
    bundles: tuple[dict[str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Holdings:
    """What carries a run's name on the cluster, and the actors of the driver that made it."""

    run: str
    groups: tuple[Group, ...]
    named: tuple[str, ...]
    """Actors in the run's namespace."""
    num_actors: int
    """With those that have no name."""
    jobs: frozenset[str]
    """Ids of the drivers that made all that."""
    driver: str
    """Where it is; empty when it is gone."""

    def __bool__(self) -> bool:
        return bool(self.groups or self.named or self.num_actors)

    def __str__(self) -> str:
        groups = ", ".join(group.name for group in self.groups) or "none"
        return f"{self.num_actors} actor(s), placement groups: {groups}"


def holdings(run: str, jobs: frozenset[str] = frozenset()) -> Holdings:
    """What this run holds on the cluster that this process has joined. `jobs`: drivers that are known to be its own."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    pattern = re.compile(rf"{re.escape(run)}-(?:(learner)|({'|'.join(ROLES)})-\d+)")
    groups: list[Group] = []
    table: dict[str, Any] = placement_group_table()
    for row in table.values():
        match = pattern.fullmatch(row["name"])
        if match is None or row["state"] == "REMOVED":
            continue
        is_placed = row["state"] == "CREATED"
        nodes = row["bundles_to_node_id"].values() if is_placed else ()
        groups.append(
            Group(
                identity=row["placement_group_id"],
                name=row["name"],
                role=match[1] or match[2],
                is_placed=is_placed,
                nodes=tuple(addresses.get(node, node) for node in nodes),
                bundles=tuple(row["bundles"].values()),
            )
        )
    groups.sort(key=lambda group: group.name)
    everyone: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    named = tuple(actor["name"] for actor in everyone if actor["namespace"] == namespace(run))
    handles = [ray.get_actor(name, namespace(run)) for name in named]
    made = [group.identity for group in groups] + [handle._actor_id.hex() for handle in handles]
    jobs |= {identity[JOB_OF_ID] for identity in made}
    alive = [actor for actor in actor_table().values() if actor["State"] != "DEAD"]
    living = [job for job in job_table() if job["JobID"] in jobs and not job["IsDead"]]
    return Holdings(
        run=run,
        groups=tuple(groups),
        named=named,
        num_actors=sum(actor["JobID"] in jobs for actor in alive),
        jobs=jobs,
        driver=f"process {living[0]['DriverPid']} on {living[0]['DriverIPAddress']}" if living else "",
    )


def cluster_address() -> str:
    """Of the cluster that this process has joined."""
    return ray.get_runtime_context().gcs_address


def is_there(gcs: str) -> bool:
    """Whether a cluster listens at its address. Ray itself waits a while for one that is gone."""
    host, _, port = gcs.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_DEADLINE_S).close()
    except OSError:
        return False
    return True


def stop(
    target: str | None,
    address: str | None,
    *,
    at_once: bool,
    timeout_s: float | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Ends a run and returns once it holds nothing; `say` is told what happens. `timeout_s`: for its driver to end it;
    None: as long as a step and a checkpoint may take. What a driver that is gone has left is removed, nothing else.
    `address` may also be that of the cluster's dashboard: then the run is one that was submitted there as a job, and `target`
    its name or the job's id. Raises as `scale`, and `Starved` after the time-out."""
    if address is not None and address.startswith(("http://", "https://")):
        return _stop_job(target, address, at_once=at_once, timeout_s=timeout_s, say=say)
    with cluster_of(target, address) as run:
        gcs = cluster_address()
        try:
            run, mailbox = find(run)
        except ClusterError:
            if run is None or not holdings(run):
                raise
            return _remove(run, say)
        held = holdings(run)
        if not held.driver:
            return _remove(run, say)
        try:
            answer = ask(mailbox, "stop", at_once)
        except ClusterError as silence:
            return _without_answer(held, silence, at_once=at_once, say=say)
        say(f"run {run!r} ends {_how(answer, at_once)}")
        working_s = 0 if at_once else answer["step_deadline_s"] + CHECKPOINT_DEADLINE_S
        deadline_s = CLOSE_DEADLINE_S + working_s if timeout_s is None else timeout_s
        if not answer["own_ray"]:
            _wait(held, deadline_s)
    if answer["own_ray"]:  # which ends with it, and takes who is still connected along
        _wait_for_end_of(gcs, run, deadline_s)
    return {
        "run": run,
        "version": answer["version"],
        "checkpoint": answer["checkpoint"],
        "actors": held.num_actors,
        "groups": [group.name for group in held.groups],
        "removed": False,
    }


def _stop_job(
    target: str | None, address: str, *, at_once: bool, timeout_s: float | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """The driver is told by the signal that Ray's job server sends; its last words are passed on to `say`."""
    client = submit.connect(address)
    with submit.reaching(address):
        job = submit.find(client, target and Path(target).name)
        name = job.submission_id
        if job.status.is_terminal():
            raise ClusterError(f"job {name} does not run any more: it {job.status.lower()}")
        actors, groups = _of_job(client, job.job_id)
        seen = len(client.get_job_logs(name))
        client.stop_job(name)
        how = "at once" if at_once else "after the optimizer step in progress, with a checkpoint"
        say(f"job {name} is asked to end {how}")
        if at_once and job.driver_info is not None:
            # A run takes the second signal for that. The job server sends one only.
            client.submit_job(
                entrypoint=f"kill -TERM {job.driver_info.pid}",
                entrypoint_label_selector={"ray.io/node-id": job.driver_node_id},
            )
    if timeout_s is None:
        timeout_s = CLOSE_DEADLINE_S if at_once else float((job.metadata or {}).get(submit.STOP_S, STOP_S))
    end = time.monotonic() + timeout_s
    for text in submit.follow(client, name, seen):
        if text.strip():
            say(text.strip("\n"))
        if time.monotonic() > end:
            raise Starved(f"job {name} has not ended within {timeout_s:g} s")
    with submit.reaching(address):
        end = time.monotonic() + REMOVAL_S
        while left := _left(client, client.get_job_info(name).job_id, actors):
            if time.monotonic() > end:
                raise Starved(f"job {name} has ended, but after {REMOVAL_S:g} s there are still: {left}")
            time.sleep(POLL_S)
    return {
        "run": submit.run_of(job) or name,
        "job": name,
        "actors": len(actors),
        "groups": [group["name"] for group in groups],
        "removed": False,
    }


def _of_job(client: Any, driver: str | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Actors and placement groups of a job's driver, which has none before it has joined Ray."""
    if driver is None:
        return [], []
    actors = [actor for actor in submit.listed(client, "actors", job_id=driver) if actor["state"] != "DEAD"]
    groups = submit.listed(client, "placement_groups", creator_job_id=driver)
    return actors, [group for group in groups if group["state"] != "REMOVED"]


def _left(client: Any, driver: str | None, before: list[dict[str, Any]]) -> str:
    """What is there still of an ended job, of the processes of these actors too; empty when nothing is."""
    actors, groups = _of_job(client, driver)
    had = {(actor["node_id"], actor["pid"]) for actor in before}
    alive = submit.listed(client, "workers", is_alive="True")
    left = [f"actor {actor['class_name']}" for actor in actors] + [group["name"] for group in groups]
    left += [
        f"process {worker['pid']} on {worker['ip']}"
        for worker in alive
        if (worker["node_id"], worker["pid"]) in had
    ]
    return ", ".join(left)


def _how(answer: dict[str, Any], at_once: bool) -> str:
    version, saved = answer["version"], answer["checkpoint"]
    if answer["state"] == "starting":
        return "at once, while it starts" if at_once else "once it has started (--now: at once)"
    if not at_once:
        return f"after the optimizer step in progress (version {version} of {answer['steps']}), with a checkpoint"
    newest = "there is no checkpoint" if saved is None else f"the newest checkpoint is version {saved}"
    groups = answer["groups"]
    return (
        f"at once, at version {version} of {answer['steps']}: {newest}; lost are {version - (saved or 0)} optimizer step(s), the "
        f"one in progress, {groups['running']} groups in flight and {groups['queued']} in the queue"
    )


def _without_answer(
    held: Holdings, silence: ClusterError, *, at_once: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """The driver was there, and did not answer."""
    end = time.monotonic() + CLEANING_S
    while held and time.monotonic() < end:
        held = holdings(held.run, held.jobs)
        if held.driver and "ended before" not in str(silence):
            break
        time.sleep(POLL_S)
    if held.driver and not at_once:
        raise ClusterError(
            f"run {held.run!r}: {silence}. Its driver is {held.driver}; 'headway stop {held.run} --now' takes the run's groups "
            "from it"
        )
    if not held:
        say(f"run {held.run!r} has just ended by itself")
        return {"run": held.run, "actors": 0, "groups": [], "removed": False}
    return _remove(held.run, say)


def _remove(run: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Removes the placement groups and named actors of a run, and with the groups the actors in them. What its driver had
    besides goes with the driver."""
    held = holdings(run)
    if held.driver:
        say(f"the driver of run {run!r} does not answer; it is {held.driver}: end it there")
    else:
        say(f"the driver of run {run!r} is gone")
    for name in held.named:
        ray.kill(ray.get_actor(name, namespace(run)))
    for group in held.groups:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group.identity)))
    end = time.monotonic() + REMOVAL_S
    while (left := holdings(run)).groups or left.named:
        if time.monotonic() > end:
            raise Starved(
                f"what run {run!r} had was removed, but is still there after {REMOVAL_S:g} s: {left}"
            )
        time.sleep(POLL_S)
    names = [group.name for group in held.groups]
    say(f"removed: actors {', '.join(held.named) or 'none'}; placement groups {', '.join(names) or 'none'}")
    return {"run": run, "actors": held.num_actors, "groups": names, "removed": True}


def _wait(held: Holdings, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while held := holdings(held.run, held.jobs):
        if time.monotonic() > end:
            raise Starved(f"run {held.run!r} has not ended within {timeout_s:g} s; it holds still: {held}")
        time.sleep(POLL_S)


def _wait_for_end_of(gcs: str, run: str, timeout_s: float) -> None:
    """Until nobody listens at the address of a Ray instance any more."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if not is_there(gcs):
            return
        time.sleep(POLL_S)
    raise Starved(f"run {run!r} has not ended within {timeout_s:g} s")
