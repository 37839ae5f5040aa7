"""What a run is doing: its driver's own account, and what its folder says when there is no driver."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from headway.cluster.watch import Wait
from headway.core.sections import Resources
from headway.learner import checkpoint

if TYPE_CHECKING:
    from headway.cluster.session import Session

FORMAT = 1
"""Of the account; keys are only ever added to one."""
RECENT_STEPS = 32
"""Optimizer steps that means and trends are taken over."""
MAX_WAITS = 12
TAIL_BYTES = 4 << 20
"""Of `metrics.jsonl`, in which the newest steps are looked for."""


def snapshot(session: Session) -> dict[str, Any]:
    """The run as its driver sees it now, as JSON values; null for what is not known yet. To be called on the run's loop,
    once the session's actors are there. Of a run that starts: without what there is to say of its work."""
    config, now = session.config, asyncio.get_running_loop().time()
    is_up, is_ending = session.is_up, session.stopping
    account = {
        "format": FORMAT,
        "run": config.run.name,
        "state": "stopping" if is_ending else "running" if is_up else "starting",
        "folder": str(session.folder),
        "driver": {"host": socket.gethostname(), "pid": os.getpid()},
        "uptime_s": round(now - session.started, 1),
        "version": session.version,
        "steps": config.run.steps,
        "checkpoint": session.saved,
        "restarts": int(session.totals.value("headway_run_restarts_total")),
        "metrics_port": session.port,
        "step_deadline_s": config.learner.step_deadline_s * config.learner.steps_per_batch,
        "own_ray": config.cluster.address == "local",
        "waits": _waits(session.waits.open(), now),
    }
    return account | _work(session, now) if is_up else account


def _work(session: Session, now: float) -> dict[str, Any]:
    config, crew, groups = session.config, session.crew, session.groups
    gauges = {(name, label): value for name, label, value in session.totals.state()["gauges"]}
    steps = summary(session.recent, selects=config.algorithm.dynamic_sampling)
    targets = {**crew.replicas, **session.scorers.targets, "generation": session.engines.target}
    live = {**crew.replicas, "generation": session.engines.serving}
    room = groups.room
    seconds = steps["step"]["seconds"]
    return {
        "since_progress_s": round(now - session.last_progress, 1),
        "left_s": None if seconds is None else round(seconds * (config.run.steps - session.version), 1),
        **steps,
        "lag": {
            **steps["lag"],
            "bound": config.lag.max_version_lag,
            "effective": groups.gate.bound,
            "policy": config.lag.policy,
        },
        "groups": {
            "running": groups.gate.running,
            "queued": room.queued_groups,
            "queued_bytes": room.queued_bytes,
            "queue_groups": room.max_groups,
            "queue_bytes": room.max_bytes,
            "issued": groups.ledger.issued,
            "trained": groups.ledger.trained,
            "dropped": dict(groups.ledger.dropped),
        },
        "roles": {
            role: {
                "live": live[role],
                "target": targets[role],
                "gpus": _gpus(session, role),
                "restarts": int(session.totals.value("headway_actor_restarts_total", role)),
            }
            for role in (
                "learner",
                "generation",
                *(role for role in live if role not in ("learner", "generation")),
            )
        },
        "engines": [
            {
                "replica": engine.replica,
                "version": engine.version,
                "gpus": session.engines.gpus_of[engine.replica],
                "groups": engine.running,
                "limit": engine.limit,
                "kv_cache": gauges.get(("headway_engine_kv_cache_usage_ratio", str(engine.replica))),
                "leaving": engine.leaving,
            }
            for engine in sorted(session.engines.all.values(), key=lambda engine: engine.replica)
        ],
    }


def _gpus(session: Session, role: str) -> float:
    """Of each replica; of each engine that starts from now on."""
    section = getattr(session.config, role, None)
    gpus = section.gpus if isinstance(section, Resources) else 0.0
    return session.engines.gpus if role == "generation" else gpus


def summary(records: Sequence[dict[str, Any]], *, selects: bool) -> dict[str, Any]:
    """`reward`, `step` and `lag` of these lines of `metrics.jsonl`, the newest last. `selects`: of what is sampled not all
    is trained, so the reward is that of all that was sampled."""
    rewards = [
        reward
        for record in records
        if (reward := record.get("sampled_reward_mean") if selects else record["reward_mean"]) is not None
    ]
    half = len(rewards) // 2
    lags = [lag for record in records for lag in record["lag"]]
    total = sum(record["seconds"]["total"] for record in records)
    spent = {"waited": sum(record["waited_s"] for record in records)}
    for record in records:
        for stage, value in record["seconds"].items():
            if stage != "total":
                spent[stage] = spent.get(stage, 0.0) + value
    return {
        "reward": {
            "last": rewards[-1] if rewards else None,
            "mean": fmean(rewards) if rewards else None,
            "change": fmean(rewards[-half:]) - fmean(rewards[:half]) if half else None,
            "recent": [round(reward, 4) for reward in rewards],
        },
        "step": {
            "seconds": total / len(records) if records else None,
            "shares": {stage: round(value / total, 4) for stage, value in spent.items()} if total else {},
        },
        "lag": {"mean": fmean(lags) if lags else None, "max": max(lags, default=None)},
    }


def _waits(waits: list[Wait], now: float) -> list[dict[str, Any]]:
    """Open waits, the longest first; those that differ in numbers only count as one."""
    kinds: dict[tuple[str, ...], list[Wait]] = {}
    for wait in waits:
        kind = (wait.stage, re.sub(r"\d+", "N", wait.who), re.sub(r"\d+", "N", wait.what))
        kinds.setdefault(kind, []).append(wait)
    return [
        {
            "who": alike[0].who,
            "what": alike[0].what,
            "stage": alike[0].stage,
            "waited_s": round(now - alike[0].since, 1),
            "deadline_s": alike[0].deadline_s,
            "version": alike[0].version,
            "alike": len(alike),
        }
        for alike in list(kinds.values())[:MAX_WAITS]
    ]


# ---- a run without a driver --------------------------------------------------------------------------------


def of_folder(folder: Path, *, was_killed: bool) -> dict[str, Any] | None:
    """What a folder says of a run that nobody runs now; None when it holds none. `was_killed`: its driver went without
    closing it. `state`: finished, stopped (the newest step is in a checkpoint) or interrupted."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name, steps = config["run"]["name"], config["run"]["steps"]
        own_ray = config["cluster"]["address"] == "local"
        selects, bound = config["algorithm"]["dynamic_sampling"], config["lag"]["max_version_lag"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    records = _newest(folder / "metrics.jsonl")
    version = records[-1]["version"] if records else 0
    newest = checkpoint.newest_complete(folder / "checkpoints")
    saved = None if newest is None else int(re.sub(r"version-(\d+).*", r"\1", newest.name))
    state = "finished" if version >= steps and not was_killed else "interrupted"
    if state == "interrupted" and not was_killed and saved == version:
        state = "stopped"
    account = {
        "format": FORMAT,
        "run": name,
        "state": state,
        "folder": str(folder.resolve()),
        "was_killed": was_killed,
        "own_ray": own_ray,
        "version": version,
        "steps": steps,
        "checkpoint": saved,
        "checkpoint_folder": None if newest is None else str(newest.resolve()),
    }
    if config.get("stage", "rl") != "rl":
        return account
    found = summary(records, selects=selects)
    return account | {
        **found,
        "lag": {**found["lag"], "bound": bound},
        "groups": {"dropped": records[-1]["dropped"]} if records else {},
    }


def _newest(file: Path) -> list[dict[str, Any]]:
    """The newest steps; a line that was being written when the driver died is left out."""
    try:
        with file.open("rb") as lines:
            lines.seek(max(0, file.stat().st_size - TAIL_BYTES))
            whole = lines.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    records = []
    for line in whole[-RECENT_STEPS:]:
        try:
            record = json.loads(line)
        except ValueError:  # the first, from which the start is cut off
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
