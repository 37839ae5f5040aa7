"""Where Ray begins and ends for a process: an instance of its own, or a cluster that it joins."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray._private.authentication.grpc_authentication_client_interceptor import (
    _get_authentication_metadata_tuple as metadata_with_token,
)
from ray._private.services import canonicalize_bootstrap_address

from headway.cluster import code
from headway.cluster.room import needs
from headway.core.config import Config
from headway.core.errors import ClusterError

PROBE_DEADLINE_S = 5.0
SPARE_ENGINES = 4
"""Engines that `headway scale` may add to a run on a Ray instance of its own."""
FAILURE_DETECTION = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 6,
}
"""A node that is gone is known to be gone after about three seconds; Ray's defaults take fifteen, and much less would
take a node for gone whose cores are all busy."""
CONTROL = "control"
"""Name of a run's mailbox in its namespace."""


def namespace(run_name: str) -> str:
    """Ray namespace of a run."""
    return f"headway-{run_name}"


def connect(config: Config) -> None:
    """Starts a local Ray instance, or joins the one that the configuration names. Raises `ClusterError`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    address, run = config.cluster.address, namespace(config.run.name)
    if address != "local":
        join(address, run)
        code.check_sent(ray.util.get_node_ip_address())
        return
    # CPUs of an instance of our own are tickets, not silicon: a small machine may share its cores, and engines that
    # come later need tickets too. GPUs are what the machine has.
    generation = config.generation
    engines = max(generation.max_replicas or 0, generation.replicas + SPARE_ENGINES)
    groups = [
        need if need.role != "generation" else replace(need, replicas=engines) for need in needs(config)
    ]
    cpus = math.ceil(sum(need.replicas * need.bundle["CPU"] for need in groups))
    join(
        "local",
        run,
        include_dashboard=False,
        num_cpus=max(os.cpu_count() or 1, cpus + 1),
        _system_config=dict(FAILURE_DETECTION),  # Ray writes into it
    )


def join(address: str, run: str, **options: Any) -> None:
    """Connects this process to Ray, in a run's namespace. Raises `ClusterError`."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Whoever waits for a call is told how it fails. Ray would also print the traceback of one that was given up.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if address == "auto":
        address = _found()
    # Ray does not say that a cluster wants the token of this machine. Where it wants none, a driver that shows one cannot
    # be reached by its own actors.
    if address != "local" and wants_token(address):
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        if ":" in address and wants_token(address, metadata_with_token()):
            raise ClusterError(
                f"cannot join the Ray cluster at {address!r}: unauthorised; set RAY_AUTH_TOKEN to the cluster's token, or put "
                "it into ~/.ray/auth_token"
            )
    # Ray puts the driver's working directory first on every worker's import path. An empty folder keeps ours
    # from standing in for packages of the same name.
    neutral = Path(tempfile.gettempdir()) / f"headway-cwd-{os.getuid()}"
    neutral.mkdir(mode=0o700, exist_ok=True)
    before = os.getcwd()
    os.chdir(neutral)
    try:
        ray.init(address=address, namespace=run, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray raises whatever its parts do, and plain ones of its own
        ray.shutdown()  # what it had started by then
        what = "start Ray" if address == "local" else f"join the Ray cluster at {address!r}"
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ClusterError(f"cannot {what}: {reason or type(error).__name__}") from error
    finally:
        os.chdir(before)


def disconnect() -> None:
    """Leaves Ray; an instance that `connect` started ends with all its processes."""
    ray.shutdown()


def _found() -> str:
    """Where `auto` leads, so that it can be probed: a cluster that was killed leaves its address behind."""
    try:
        address = canonicalize_bootstrap_address("auto")
    except ConnectionError:
        address = None
    if address is None:
        raise ClusterError(
            "no Ray cluster on this machine; start one with 'ray start --head', or name one with RAY_ADDRESS=HEAD:6379"
        )
    return address


def wants_token(address: str, metadata: tuple[tuple[str, str], ...] = ()) -> bool:
    """Whether the cluster refuses whoever shows only this. Ray itself retries an address that nobody answers at for minutes;
    one plain call tells at once. Raises `ClusterError`."""
    import grpc

    place = address.removeprefix("ray://")
    if ":" not in place:
        return True
    with grpc.insecure_channel(place) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(
                b"", timeout=PROBE_DEADLINE_S, metadata=metadata
            )
        except grpc.RpcError as error:
            code: Any = error.code()  # pyright: ignore[reportAttributeAccessIssue]
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise ClusterError(
                    f"no Ray cluster at {address!r} ({code.name.lower()}); start one with 'ray start --head', or use "
                    "cluster.address=local"
                ) from error
            return code == grpc.StatusCode.UNAUTHENTICATED
    return False
