"""How a person reaches a running run: a mailbox beside its driver, and the client that writes to it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from headway.cluster.joining import CONTROL, join, namespace
from headway.core.errors import ClusterError, HeadwayError, Starved, UserError

CLUSTER_FILE = "cluster.json"
"""In the folder of a running run: `address` of the cluster, `namespace` of the run, `pid` of its driver."""
ANSWER_DEADLINE_S = 30.0
"""A driver that does not answer for this long is taken for dead."""
CALL_DEADLINE_S = 10.0
SMALLEST_GPU_SHARE = 0.01


class Mailbox:
    """Requests to a run's driver, and its answers. A plain class; whoever runs it decides where."""

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._requests: list[tuple[int, str, Any]] = []
        self._arrived = asyncio.Event()
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, kind: str, value: Any) -> int:
        """Leaves a request for the driver; returns the ticket for its answer."""
        ticket = next(self._tickets)
        self._answers[ticket] = asyncio.get_running_loop().create_future()
        self._requests.append((ticket, kind, value))
        self._arrived.set()
        return ticket

    async def take(self, timeout_s: float) -> list[tuple[int, str, Any]]:
        """For the driver: all requests since the last call, in order; waits for one, up to `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return []
        self._arrived.clear()
        requests, self._requests = self._requests, []
        return requests

    async def answer(self, ticket: int, value: Any) -> None:
        """For the driver. A ticket that nobody waits for any more is no error."""
        answer = self._answers.get(ticket)
        if answer is not None and not answer.done():
            answer.set_result(value)

    async def result(self, ticket: int, timeout_s: float) -> Any:
        """The driver's answer, once. Raises `Starved` after `timeout_s`, and forgets the ticket either way."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answers[ticket]
        except TimeoutError:
            raise Starved(f"the driver did not answer in {timeout_s:g} s") from None
        finally:
            del self._answers[ticket]


def scale(
    target: str | None, address: str | None, group: str, replicas: int, gpus: float | None = None
) -> dict[str, Any]:
    """Asks a running run for another number of replicas of a group, and for engines with another number of `gpus` each
    (None: as many as now); returns the driver's answer.

    `target`: a run folder, or a run's name; None: the only run on the cluster. `address`: of the cluster; None: the
    one that the run folder names, else RAY_ADDRESS, else the one on this machine. Raises `UserError` for a target that
    is no run or not the only one, and what the driver refuses; `ClusterError` when there is no cluster, no run on it,
    or no answer.
    """
    if replicas < 1:
        raise UserError(f"{group}={replicas}: a run needs at least one")
    if gpus is not None and group != "generation":
        raise UserError(f"--gpus-per-replica is for generation: {group} keeps the GPUs that it has")
    if gpus is not None and (not gpus >= SMALLEST_GPU_SHARE or (gpus > 1 and gpus % 1)):
        raise UserError(
            f"--gpus-per-replica {gpus:g}: an engine takes a part of one GPU, at least {SMALLEST_GPU_SHARE:g}, or a whole "
            "number of them"
        )
    return request(target, address, "scale", (group, replicas, gpus))


def request(target: str | None, address: str | None, kind: str, value: Any) -> dict[str, Any]:
    """Sends one request to a run's driver and waits for the answer. Raises as `scale`."""
    with cluster_of(target, address) as run:
        _, mailbox = find(run)
        return ask(mailbox, kind, value)


@contextmanager
def cluster_of(target: str | None, address: str | None) -> Iterator[str | None]:
    """Joins the cluster of a run for a while; gives the run's name, None for the only one there. Raises as `scale`."""
    where = None if target is None else _run_folder(target)
    if where is not None:
        run = str(where["namespace"]).removeprefix(namespace(""))
        place = address or str(where["address"])
    else:
        run = target
        place = address or os.environ.get("RAY_ADDRESS") or "auto"
    if place.startswith(("http://", "https://")):
        raise UserError(
            f"{place} is the address of a dashboard; --address (or RAY_ADDRESS) must be the cluster's, as in HEAD:6379"
        )
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    join(place, "headway")
    try:
        yield run
    finally:
        ray.shutdown()


def _run_folder(target: str) -> dict[str, Any] | None:
    """What the run folder of this path, or of this name under `runs/`, says; None when there is no such folder."""
    for folder in (Path(target), Path("runs") / target):
        try:
            where = json.loads((folder / CLUSTER_FILE).read_text(encoding="utf-8"))
            if not isinstance(where, dict) or not {"address", "namespace"} <= where.keys():
                raise ValueError("it names no cluster")
            return where
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / CLUSTER_FILE} cannot be read: {error}") from error
    if Path(target).is_dir():
        raise UserError(f"the run in {target} is not running: it has no {CLUSTER_FILE}")
    return None


def find(run: str | None) -> tuple[str, Any]:
    """Name and mailbox of a run, None: of the only one on the cluster. Raises as `scale`."""
    actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    runs: list[str] = sorted(
        actor["namespace"].removeprefix(namespace(""))
        for actor in actors
        if actor["name"] == CONTROL and actor["namespace"].startswith(namespace(""))
    )
    names = ", ".join(runs) or "none"
    if run is None:
        if not runs:
            raise ClusterError(
                "no run is running on this cluster; name a run folder, or the cluster with --address"
            )
        if len(runs) > 1:
            raise UserError(f"several runs are running on this cluster, name one: {names}")
        (run,) = runs
    try:
        return run, ray.get_actor(CONTROL, namespace(run))
    except ValueError:
        raise ClusterError(f"run {run!r} is not running on this cluster; running: {names}") from None


def ask(mailbox: Any, kind: str, value: Any) -> dict[str, Any]:
    """The driver's answer to a request. Raises what it answers, and `ClusterError` when it does not."""
    get: Any = ray.get
    try:
        ticket = get(mailbox.ask.remote(kind, value), timeout=CALL_DEADLINE_S)
        answer = get(
            mailbox.result.remote(ticket, ANSWER_DEADLINE_S), timeout=ANSWER_DEADLINE_S + CALL_DEADLINE_S
        )
    except RayTaskError as error:
        raise ClusterError(f"{error.cause}: it is gone, or starts still and will do it then") from None
    except RayActorError:
        raise ClusterError("the run ended before it answered") from None
    except TimeoutError:
        raise ClusterError("the run's mailbox does not answer") from None
    if isinstance(answer, HeadwayError):
        raise answer
    return answer
