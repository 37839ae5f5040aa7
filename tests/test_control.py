"""The mailbox of a run, and whoever writes to it from another process."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from headway.cluster.control import CLUSTER_FILE, Mailbox, scale
from headway.cluster.joining import CONTROL, connect, disconnect
from headway.cluster.placement import Placement
from headway.core.config import parse_config
from headway.core.errors import ClusterError, Starved, UserError

CLIENT = """
import sys
from headway.cluster import control
from headway.core.errors import HeadwayError
control.ANSWER_DEADLINE_S = float(sys.argv[4])
target, address = (argument or None for argument in sys.argv[1:3])
try:
    print("answer", control.scale(target, address, "generation", int(sys.argv[3])))
except HeadwayError as error:
    print(type(error).__name__, error)
"""

HEADWAY = "from headway.cluster.cli import main; main()"

get: Any = ray.get


async def test_every_request_gets_its_own_answer_whatever_the_order() -> None:
    mailbox = Mailbox()
    first, second = await mailbox.ask("scale", 2), await mailbox.ask("scale", 3)
    assert await mailbox.take(1) == [(first, "scale", 2), (second, "scale", 3)]
    assert await mailbox.take(0.01) == []
    waiting = [asyncio.ensure_future(mailbox.result(ticket, 5)) for ticket in (first, second)]
    await asyncio.sleep(0)
    await mailbox.answer(second, "b")
    await mailbox.answer(first, "a")
    await mailbox.answer(first, "again")
    assert await asyncio.gather(*waiting) == ["a", "b"]


async def test_the_driver_is_woken_by_a_request() -> None:
    mailbox = Mailbox()
    taking = asyncio.ensure_future(mailbox.take(60))
    await asyncio.sleep(0)
    ticket = await mailbox.ask("scale", 1)
    async with asyncio.timeout(20):
        assert await taking == [(ticket, "scale", 1)]


async def test_a_driver_that_does_not_answer_is_named_and_the_ticket_forgotten() -> None:
    mailbox = Mailbox()
    ticket = await mailbox.ask("scale", 2)
    with pytest.raises(Starved, match=r"the driver did not answer in 0.01 s"):
        await mailbox.result(ticket, 0.01)
    await mailbox.answer(ticket, "late")  # no error
    assert not mailbox._answers


def test_what_is_wrong_without_any_cluster_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="verifiers=0: a run needs at least one"):
        scale(None, None, "verifiers", 0)
    with pytest.raises(UserError, match=r"^--gpus-per-replica is for generation: verifiers keeps the GPUs"):
        scale(None, None, "verifiers", 2, 1)
    for gpus in (0, -1, 1.5, 0.001, math.nan, math.inf):
        with pytest.raises(
            UserError, match=rf"^--gpus-per-replica {gpus:g}: an engine takes a part of one GPU"
        ):
            scale(None, None, "generation", 2, gpus)
    with pytest.raises(UserError, match=f"the run in {tmp_path} is not running: it has no {CLUSTER_FILE}"):
        scale(str(tmp_path), None, "generation", 2)
    with pytest.raises(UserError, match="is the address of a dashboard"):
        scale(None, "http://127.0.0.1:8265", "generation", 2)
    # A driver that was killed leaves the file behind.
    (tmp_path / CLUSTER_FILE).write_text(
        json.dumps({"address": "127.0.0.1:9", "namespace": "headway-x", "pid": 1})
    )
    with pytest.raises(ClusterError, match=r"no Ray cluster at '127.0.0.1:9'"):
        scale(str(tmp_path), None, "generation", 2)
    for text in ("{", "{}", "null"):
        (tmp_path / CLUSTER_FILE).write_text(text)
        with pytest.raises(UserError, match=rf"{CLUSTER_FILE} cannot be read"):
            scale(str(tmp_path), None, "generation", 2)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    connect(parse_config({"run": {"name": "first"}}))
    yield ray.get_runtime_context().gcs_address
    disconnect()


def mailbox_of(run: str, folder: Path) -> Any:
    return Placement(parse_config({"run": {"name": run}}), folder).spawn(Mailbox, CONTROL, 0, 100, ())


async def client(
    target: str, address: str, replicas: int = 3, deadline_s: float = 60, **environment: str
) -> str:
    """What a person sees."""
    return await python(CLIENT, target, address, str(replicas), str(deadline_s), **environment)


async def python(code: str, *arguments: str, **environment: str) -> str:
    """What it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", code, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"} | environment,
    )
    async with asyncio.timeout(120):
        out, _ = await process.communicate()
    return out.decode().strip()


async def test_people_reach_the_run_that_they_mean(address: str, tmp_path: Path) -> None:
    assert await client("", address) == (
        "ClusterError no run is running on this cluster; name a run folder, or the cluster with --address"
    )
    first = mailbox_of("first", tmp_path)
    # The only run is found without a name, in its own folder or on the cluster that RAY_ADDRESS names.
    (tmp_path / CLUSTER_FILE).write_text(
        json.dumps({"address": address, "namespace": "headway-first", "pid": 1})
    )
    of_folder = ("--run", str(tmp_path), "--gpus-per-replica", "2")
    asking = [
        asyncio.ensure_future(client("", "", 4, RAY_ADDRESS=address)),
        asyncio.ensure_future(python(HEADWAY, "scale", "generation=500", *of_folder)),
        asyncio.ensure_future(python(HEADWAY, "scale", "generation=3", *of_folder)),
    ]
    requests: list[tuple[int, str, tuple[str, int, float | None]]] = []
    while len(requests) < len(asking):
        requests += await first.take.remote(30)
    assert sorted(value[1:] for *_, value in requests) == [(3, 2.0), (4, None), (500, 2.0)]
    for ticket, kind, (group, wanted, gpus) in requests:
        assert (kind, group) == ("scale", "generation")
        account = {"group": group, "before": 1, "target": wanted, "serving": 1, "gpus": gpus, "version": 7}
        await first.answer.remote(ticket, account if wanted < 9 else UserError(f"{wanted} are too many"))
    account = {"group": "generation", "before": 1, "target": 4, "serving": 1, "gpus": None, "version": 7}
    assert await asyncio.gather(*asking) == [
        f"answer {account}",
        "error: 500 are too many",
        "generation: 1 -> 3, with 2 GPU each (1 serve now, learner at version 7)",
    ]
    # Two runs: one has to be named.
    second = mailbox_of("second", tmp_path)
    await second.__ray_ready__.remote()
    named = asyncio.ensure_future(client("second", address))
    unnamed, unknown = (
        asyncio.ensure_future(client("", address)),
        asyncio.ensure_future(client("third", address)),
    )
    ((ticket, _, _),) = await second.take.remote(30)
    await second.answer.remote(ticket, {"target": 3})
    assert await asyncio.gather(named, unnamed, unknown) == [
        "answer {'target': 3}",
        "UserError several runs are running on this cluster, name one: first, second",
        "ClusterError run 'third' is not running on this cluster; running: first, second",
    ]
    # A driver that hangs, and one that ends.
    hanging, ending = (
        asyncio.ensure_future(client("first", address, deadline_s=1)),
        asyncio.ensure_future(client("second", address)),
    )
    await second.take.remote(30)
    ray.kill(second)
    assert (
        await hanging
        == "ClusterError the driver did not answer in 1 s: it is gone, or starts still and will do it then"
    )
    assert await ending == "ClusterError the run ended before it answered"
