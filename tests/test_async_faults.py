"""Faults that asynchronous training is prone to, one by one: the run as a whole on virtual time, and the tables and files
that its parts exchange."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import mmap
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from headway.actors.generation_rows import GroupRequest
from headway.cluster.crew import EngineReport, Release, Trained
from headway.cluster.ledger import trained_groups
from headway.cluster.queue import RolloutQueue, receipt_of
from headway.cluster.run import Run
from headway.cluster.scenario import Failure, Scenario
from headway.cluster.simulate import Silent, virtual_run
from headway.cluster.virtual import VirtualCrew
from headway.cluster.virtual_clock import run_virtual
from headway.core import rollouts
from headway.core.config import Config, parse_config
from headway.core.errors import SchemaError, Starved
from headway.core.prompts import Prompt, PromptStream
from headway.learner.batching import unpack
from headway.learner.checkpoint import CheckpointFailed, newest_complete, writing
from headway.learner.trainer import Trainer

GROUPS_PER_STEP = 4


def config(folder: Path, **overrides: Any) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "folder": str(folder), "steps": 8, "checkpoint_every": 2},
        "sampling": {"group_size": 2, "max_new_tokens": 400},
        "algorithm": {"dynamic_sampling": False},
        "lag": {"max_version_lag": 2},
        "learner": {"groups_per_step": GROUPS_PER_STEP},
        "generation": {"replicas": 2, "max_concurrent_requests": 8},
        "metrics": {"heartbeat_s": 5},
    }
    for key, value in overrides.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    tree["run"]["save_rollouts"] = False
    return parse_config(tree)


SCENARIO = Scenario(length_median=40, engine_start_s=10)


def now() -> float:
    return asyncio.get_running_loop().time()


def timed(run: Run) -> tuple[float, BaseException | None]:
    """When the run ended, in virtual seconds, and the first failure that ended it."""

    async def main() -> tuple[float, BaseException | None]:
        try:
            await run.execute()
        except Exception as error:
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            return now(), first
        return now(), None

    return run_virtual(main())


def resumed(settings: Config, crew: VirtualCrew) -> Run:
    newest = newest_complete(settings.run_folder / "checkpoints")
    assert newest is not None
    return virtual_run(settings, crew, resume_from=newest)


def all_dead(crew: VirtualCrew) -> bool:
    return not any(actor.alive for actor in (*crew._all_actors(), *crew.engines.values()))


# ---- who made the data fails -------------------------------------------------------------------------------


class Bug(Exception):
    """Not one of the failures that the driver knows how to answer."""


class Buggy(VirtualCrew):
    """One call of one method raises what nobody expects."""

    def __init__(self, settings: Config, method: str, number: int) -> None:
        super().__init__(settings, SCENARIO)
        self.left = number
        self.raised_at = math.inf
        whole = getattr(self, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.raised_at = now()
                raise Bug(method)
            return whole(*args, **kwargs)

        setattr(self, method, wrapped)


@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("sample", 4),
        ("sampled", 4),
        ("put", 4),
        ("train", 3),
        ("publish", 3),
        ("release", 3),
        ("save", 1),
        ("save_queue", 1),
        ("start_engine", 2),
        ("update_engine", 4),
        ("report", 3),
        ("scorer_updates", 2),
        ("show_metrics", 2),
        ("next_death", 1),
        ("next_request", 1),
    ],
)
def test_a_fault_in_any_call_ends_the_run_with_itself_and_at_once(
    method: str, number: int, tmp_path: Path
) -> None:
    settings = config(tmp_path)
    crew = Buggy(settings, method, number)
    ended, failure = timed(virtual_run(settings, crew))
    assert isinstance(failure, Bug) and str(failure) == method
    assert (
        ended - crew.raised_at <= SCENARIO.engine_start_s
    )  # engines that just start are let go at their end
    assert all_dead(crew)


class Deaf(VirtualCrew):
    """One call of one method is never answered."""

    def __init__(self, settings: Config, scenario: Scenario, method: str, number: int) -> None:
        super().__init__(settings, scenario)
        self.left = number
        self.since = math.inf
        whole = getattr(self, method)

        def wrapped(*args: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.since = now()
                return asyncio.sleep(1e9)
            return whole(*args)

        setattr(self, method, wrapped)


DEADLINES: dict[str, Any] = {
    "learner__step_deadline_s": 50,
    "generation__start_deadline_s": 40,
    "generation__update_deadline_s": 30,
    "generation__answer_deadline_s": 20,
    "cluster__placement_deadline_s": 10,
    "lag__straggler_deadline_s": 70,
    "run__no_progress_deadline_s": 900,
}


@pytest.mark.parametrize(
    ("call", "number", "waits_s", "goes_on", "event"),
    [
        ("open", 1, 90, False, None),
        ("serve_metrics", 1, 60, False, None),
        ("start_learner", 1, 40, False, None),
        ("start_engine", 1, 50, False, None),
        ("train", 3, 50, True, None),
        ("publish", 1, 60, True, None),
        ("publish", 3, 60, True, None),
        ("update_engine", 1, 30, True, None),
        ("update_engine", 5, 30, True, None),
        ("report", 3, 20, True, None),
        ("sampled", 5, 100, True, None),
        ("put", 5, 100, True, None),
        ("save", 1, 600, True, None),
        ("save_queue", 1, 600, False, None),
        ("release", 3, 60, False, None),
        ("show_metrics", 2, 60, True, None),
        ("scorer_updates", 2, 60, True, None),
        ("serve_metrics", 2, 60, True, "metrics"),
        ("answer", 1, 60, True, "scale"),
        ("start_queue", 1, 60, False, "queue"),
        ("restore_queue", 1, 60, False, "queue"),
        ("replace", 1, 40, False, "verifiers"),
        ("next_death", 1, 900, False, "verifiers"),
        ("hand_back", 1, 30, True, "scale"),
        ("take_back", 1, 30, True, "scale"),
        ("stop_engine", 1, 30, True, "scale"),
        ("close", 1, 60, True, None),
    ],
)
def test_no_call_is_waited_for_longer_than_its_deadline(
    call: str, number: int, waits_s: float, goes_on: bool, event: str | None, tmp_path: Path
) -> None:
    """The run goes on without the answer, or ends and says who did not give it."""
    settings = config(tmp_path, run__steps=20, generation__drain_s=0, **DEADLINES)
    scaling = ((30, 1),) if event == "scale" else ()
    failures = (Failure(time_s=60, event=event),) if event and not scaling else ()
    length = 200 if scaling else 40  # groups run on the engine that leaves
    scenario = Scenario(
        length_median=length, engine_start_s=10, step_s=10, failures=failures, scaling=scaling
    )
    crew = Deaf(settings, scenario, call, number)
    ended, failure = timed(virtual_run(settings, crew))
    assert crew.left <= 0
    if goes_on:
        assert ended >= crew.since + min(waits_s, 100)
        assert ended <= crew.since + waits_s + 300  # 20 steps of 10 s, and a new start from the checkpoint
        assert failure is None and crew.version == 20
        dropped = 1 if call in ("sampled", "put") else 0
        assert len(crew.trained) == 80 and max(crew.trained) == 79 + dropped
    else:
        assert isinstance(failure, Starved) and f" {waits_s} s" in str(failure)
        assert crew.since + waits_s <= ended <= crew.since + waits_s + 100
        assert all_dead(crew)


class NoWayBack(VirtualCrew):
    """Engines that died do not come back, and nothing says so."""

    async def start_engine(self, replica: int) -> int:
        if self.incarnation("generation", replica):
            await asyncio.sleep(1e9)
        return await super().start_engine(replica)


def test_a_learner_whose_producers_are_all_gone_does_not_wait_for_ever(tmp_path: Path) -> None:
    settings = config(tmp_path, run__steps=1000, run__no_progress_deadline_s=200)
    deaths = tuple(Failure(time_s=50, event="generation", replica=replica) for replica in range(2))
    crew = NoWayBack(settings, Scenario(length_median=40, engine_start_s=10, failures=deaths))
    ended, failure = timed(virtual_run(settings, crew))
    assert isinstance(failure, Starved) and "200" in str(failure)
    assert 250 < ended < 50 + 200 + 30
    assert all_dead(crew)


# ---- the queue is full -------------------------------------------------------------------------------------


class NeverDone(VirtualCrew):
    """The learner takes its third batch and does not come back from it."""

    stuck_at = 2

    async def train(self, version: int, group_ids: Sequence[int]) -> Trained:
        if version == self.stuck_at:
            await asyncio.sleep(1e9)
        return await super().train(version, group_ids)


def test_a_stop_ends_a_run_whose_queue_is_full_and_whose_learner_hangs(tmp_path: Path) -> None:
    """The step in progress has its deadline; what waits for room in the queue is no longer waited for."""
    few: dict[str, Any] = {"learner__groups_per_step": 1, "queue__max_groups": 2, "lag__max_version_lag": 5}
    settings = config(
        tmp_path,
        **few,
        learner__step_deadline_s=100,
        run__checkpoint_every=1,
        run__no_progress_deadline_s=1e4,
    )
    crew = NeverDone(settings, SCENARIO)
    run = virtual_run(settings, crew)
    seen: dict[str, Any] = {}

    async def main() -> float:
        running = asyncio.ensure_future(run.execute())
        await asyncio.sleep(60)
        session = run.session
        assert session is not None and session.version == 2
        seen["queued"] = session.groups.room.queued_groups
        seen["waits"] = {wait.what for wait in session.waits.open()}
        run.request_stop()
        await running
        return now()

    ended = run_virtual(main())
    assert seen["queued"] == 2 and "room in the queue (queue.max_groups, queue.max_mib)" in seen["waits"]
    assert ended < 60 + 100 + 30
    assert all_dead(crew)
    again = VirtualCrew(settings, SCENARIO)
    assert timed(resumed(settings, again))[1] is None
    assert sorted(again.trained) == list(range(8))


def test_a_stop_ends_a_run_at_once_that_waits_for_groups(tmp_path: Path) -> None:
    settings = config(tmp_path)
    crew = VirtualCrew(settings, Scenario(length_median=400, length_sigma=0, decode_s=1, engine_start_s=10))
    run = virtual_run(settings, crew)

    async def main() -> float:
        running = asyncio.ensure_future(run.execute())
        await asyncio.sleep(100)
        run.request_stop()
        await running
        return now()

    assert run_virtual(main()) == 100
    newest = newest_complete(settings.run_folder / "checkpoints")
    assert newest is not None and newest.name == "version-00000000"
    quick = VirtualCrew(settings, SCENARIO)
    assert timed(resumed(settings, quick))[1] is None
    assert sorted(quick.trained) == list(range(32))


@pytest.mark.parametrize("policy", ["pace", "drop", "withhold", "downweight"])
def test_a_queue_of_exactly_one_batch_is_enough(policy: str, tmp_path: Path) -> None:
    """Neither the learner nor an update ever waits for room that only the learner could make."""
    settings = config(
        tmp_path, run__steps=40, lag__policy=policy, learner__steps_per_batch=2, queue__max_groups=8
    )
    scenario = Scenario(
        length_median=20, length_sigma=0.3, straggler_share=0.1, straggler_factor=20, engine_start_s=10
    )
    crew = VirtualCrew(settings, scenario)
    run = virtual_run(settings, crew)
    assert timed(run)[1] is None
    assert crew.version == 40 and len(crew.trained) == 40 * GROUPS_PER_STEP
    assert {engine.version for engine in crew.engines.values()} <= {38, 40}


# ---- engines behind the learner ----------------------------------------------------------------------------


class Reports(VirtualCrew):
    """Counts the reports that an engine gives while it takes an update."""

    def __init__(self, settings: Config, scenario: Scenario) -> None:
        super().__init__(settings, scenario)
        self.updating: Counter[int] = Counter()
        self.during_an_update = 0

    async def update_engine(self, replica: int, release: Release) -> None:
        self.updating[replica] += 1
        try:
            await super().update_engine(replica, release)
        finally:
            self.updating[replica] -= 1

    async def report(self, replica: int) -> EngineReport:
        report = await super().report(replica)
        self.during_an_update += self.updating[replica]
        return report


def test_an_engine_that_takes_long_to_update_is_asked_meanwhile_and_not_taken_for_dead(
    tmp_path: Path,
) -> None:
    settings = config(tmp_path, generation__answer_deadline_s=10, generation__update_deadline_s=100)
    crew = Reports(settings, Scenario(length_median=40, engine_start_s=10, update_s=60, pause_s=55))
    assert timed(virtual_run(settings, crew))[1] is None
    assert crew.during_an_update >= 10
    assert [crew.incarnation("generation", replica) for replica in range(2)] == [1, 1]


def test_an_update_beyond_its_deadline_costs_that_engine_alone(tmp_path: Path) -> None:
    settings = config(tmp_path, generation__update_deadline_s=30, run__steps=40)
    stall = Failure(time_s=30, event="stall", replica=1)
    crew = VirtualCrew(settings, Scenario(length_median=40, engine_start_s=10, failures=(stall,)))
    assert timed(virtual_run(settings, crew))[1] is None
    assert [crew.incarnation("generation", replica) for replica in range(2)] == [1, 2]
    assert len(crew.trained) == 40 * GROUPS_PER_STEP


def test_data_of_older_versions_is_used_when_none_is_of_the_newest(tmp_path: Path) -> None:
    """An update takes longer than three steps: no engine ever serves the version that the learner is at."""
    settings = config(tmp_path, run__steps=40)
    scenario = Scenario(length_median=10, engine_start_s=10, step_s=1, publish_s=0, update_s=4)
    crew = VirtualCrew(settings, scenario)
    assert timed(virtual_run(settings, crew))[1] is None
    fresh = crew.lags[0]
    assert fresh <= 3 * GROUPS_PER_STEP  # those of the first version
    assert set(crew.lags) == {0, 1, 2} and crew.lags.total() == 40 * GROUPS_PER_STEP


def test_slow_scorers_leave_no_engine_idle(tmp_path: Path) -> None:
    """One group at a time for 10 s each, scored for 60 s: a step of four takes 40 s as long as the bound lets ten run."""
    settings = config(
        tmp_path,
        run__steps=40,
        lag__max_version_lag=4,
        generation__replicas=1,
        generation__max_concurrent_requests=2,
    )
    scenario = Scenario(
        length_sigma=0,
        length_median=100,
        prefill_s=0,
        decode_s=0.1,
        decode_request_s=0,
        engine_start_s=0,
        start_s=0,
        update_s=0,
        pause_s=0,
        publish_s=0,
        step_s=1,
        token_s=0,
        score_s=60,
    )
    ended, failure = timed(virtual_run(settings, VirtualCrew(settings, scenario)))
    assert failure is None
    assert ended == pytest.approx(40 * 4 * 10 + 60 + 1, abs=2)


class Sampled(VirtualCrew):
    """Writes down what engines were asked for, and what they served then."""

    def __init__(self, settings: Config, scenario: Scenario) -> None:
        super().__init__(settings, scenario)
        self.asked: list[tuple[int, int, int | None, int]] = []
        """(group, incarnation of its engine, version that it serves, the learner's)"""
        self.updates: list[int] = []
        self.tokens_before_load: float | None = None

    def sample(self, replica: int, request: GroupRequest, kept: Any = None) -> Any:
        engine = self.engines[replica]
        self.asked.append((request.group_id, engine.incarnation, engine.version, self.version))
        return super().sample(replica, request, kept)

    async def update_engine(self, replica: int, release: Release) -> None:
        self.updates.append(release.manifest.version)
        await super().update_engine(replica, release)

    async def load(self, folder: Path) -> int:
        assert not self.asked and not self.updates
        version = await super().load(folder)
        self.tokens_before_load = sum(engine.tokens for engine in self.engines.values())
        return version


def test_an_engine_that_was_replaced_serves_nothing_before_it_has_the_newest_weights(tmp_path: Path) -> None:
    settings = config(tmp_path, run__steps=30)
    death = Failure(time_s=35, event="generation", replica=0)
    crew = Sampled(settings, Scenario(length_median=40, engine_start_s=10, failures=(death,)))
    assert timed(virtual_run(settings, crew))[1] is None
    of_the_new = [entry for entry in crew.asked if entry[1] == 2]
    _, _, first, newest = of_the_new[0]
    assert first is not None and newest >= 7 and newest - 1 <= first <= newest
    assert all(version is not None and version >= first for _, _, version, _ in of_the_new)


class Overtaken(VirtualCrew):
    """The queue dies while a checkpoint is written, which so holds what the next queue has taken when it has hardly started."""

    saved: Sequence[int] = ()

    async def save_queue(self, file: Path) -> None:
        if not self.saved:
            self._strike("queue", 0)
        while not self.saved:
            await asyncio.sleep(0.1)
            self.saved = await self._queue.held() if self.incarnation("queue", 0) == 2 else ()
        await super().save_queue(file)


def test_a_group_that_finishes_while_the_queue_is_replaced_stays_in_it(tmp_path: Path) -> None:
    settings = config(tmp_path)
    crew = Overtaken(settings, Scenario(length_median=150, engine_start_s=10, start_s=10))
    assert timed(virtual_run(settings, crew))[1] is None
    assert crew.saved
    assert sorted(crew.trained) == list(range(8 * GROUPS_PER_STEP))


def test_an_engine_that_dies_while_the_run_starts_is_started_again(tmp_path: Path) -> None:
    settings = config(tmp_path, run__max_restarts=0)
    death = Failure(time_s=6, event="generation", replica=1)
    crew = VirtualCrew(settings, Scenario(length_median=40, engine_start_s=10, failures=(death,)))
    assert timed(virtual_run(settings, crew))[1] is None
    assert crew.incarnation("generation", 1) == 2
    assert sorted(crew.trained) == list(range(8 * GROUPS_PER_STEP))


# ---- resume ------------------------------------------------------------------------------------------------


class Stopped(Sampled):
    """Asks the run to stop once the learner has made a version."""

    run: Run
    at = -1

    async def train(self, version: int, group_ids: Sequence[int]) -> Trained:
        trained = await super().train(version, group_ids)
        if self.version == self.at:
            self.run.request_stop()
        return trained


def stop_at(settings: Config, version: int, scenario: Scenario = SCENARIO) -> Stopped:
    crew = Stopped(settings, scenario)
    crew.at, crew.run = version, virtual_run(settings, crew)
    assert timed(crew.run)[1] is None
    assert crew.version == version
    return crew


@pytest.mark.parametrize("lag", [0, 2])
def test_a_resumed_run_samples_nothing_again_and_nothing_before_its_version(lag: int, tmp_path: Path) -> None:
    settings = config(tmp_path, run__steps=12, lag__max_version_lag=lag)
    before = stop_at(settings, 5)
    after = Sampled(settings, SCENARIO)
    run = resumed(settings, after)
    assert timed(run)[1] is None
    assert after.tokens_before_load == 0
    assert after.updates[0] == 5
    groups = [group_id for group_id, *_ in after.asked]
    assert len(groups) == len(set(groups))  # no replay
    assert not set(groups) & set(before.trained)
    kept = set(range(12 * GROUPS_PER_STEP)) - set(groups) - set(before.trained)  # they lay in the queue
    assert len(kept) <= lag * GROUPS_PER_STEP
    at_first = [group_id for group_id, _, version, learner in after.asked if learner == 5]
    assert len(kept) + len(at_first) <= (lag + 1) * GROUPS_PER_STEP
    assert all(version is not None and version >= 5 for _, _, version, _ in after.asked)
    assert sorted(after.trained) == list(range(12 * GROUPS_PER_STEP))
    assert trained_groups(settings.run_folder / "ledger.jsonl") == after.trained


def over_few_prompts(settings: Config, crew: VirtualCrew, *, number: int, resume: bool = False) -> Run:
    prompts = tuple(
        Prompt(prompt_id=str(place), content="", gold=None, verifier="math") for place in range(number)
    )
    settings.run_folder.mkdir(parents=True, exist_ok=True)
    return Run(
        config=settings,
        crew=lambda: crew,
        prompts=PromptStream(prompts, settings.run.seed),
        longest_prompt=crew.scenario.prompt_tokens,
        progress=Silent(settings),
        resume_from=newest_complete(settings.run_folder / "checkpoints") if resume else None,
    )


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@pytest.mark.parametrize("lag", [0, 2])
def test_an_epoch_that_ends_at_a_resume_is_neither_repeated_nor_cut_short(
    stop: int, lag: int, tmp_path: Path
) -> None:
    """8 prompts, 4 a step: epochs end at versions 2, 4 and 6, and the run is stopped and resumed in between."""

    def settings_in(folder: Path) -> Config:
        return config(folder, run__steps=6, lag__max_version_lag=lag, generation__replicas=1)

    settings = settings_in(tmp_path)
    first = Stopped(settings, SCENARIO)
    first.at, first.run = stop, over_few_prompts(settings, first, number=8)
    assert timed(first.run)[1] is None
    second = VirtualCrew(settings, SCENARIO)
    run = over_few_prompts(settings, second, number=8, resume=True)
    assert timed(run)[1] is None
    trained = trained_groups(settings.run_folder / "ledger.jsonl")
    assert sorted(trained) == list(range(24))
    stream = run.prompts
    for epoch in range(3):
        ids = [stream.at(group_id).prompt_id for group_id in sorted(trained)[8 * epoch : 8 * epoch + 8]]
        assert sorted(ids) == list("01234567")
    if lag == 0:
        assert sorted(trained.items(), key=lambda item: (item[1], item[0])) == [
            (group_id, group_id // 4 + 1) for group_id in range(24)
        ]
        other = settings_in(tmp_path / "whole")
        whole = VirtualCrew(other, SCENARIO)
        assert timed(over_few_prompts(other, whole, number=8))[1] is None
        assert second.weights == whole.weights


# ---- a checkpoint that cannot be written -------------------------------------------------------------------


class FullDisk(VirtualCrew):
    """There is no room for the learner's part from the second checkpoint on."""

    saved = 0

    async def save(self, folder: Path) -> None:
        self.saved += 1
        if self.saved == 2:
            with writing(folder / "learner"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "learner"))
        await super().save(folder)


def test_a_disk_that_fills_up_ends_the_run_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    settings = config(tmp_path)
    crew = FullDisk(settings, SCENARIO)
    _, failure = timed(virtual_run(settings, crew))
    assert isinstance(failure, CheckpointFailed)
    assert str(failure).startswith(f"cannot write {settings.run_folder.resolve()}/checkpoints/")
    assert "No space left on device" in str(failure) and "bytes free" in str(failure)
    newest = newest_complete(settings.run_folder / "checkpoints")
    assert newest is not None and newest.name == "version-00000002" and crew.version == 4
    again = VirtualCrew(settings, SCENARIO)
    assert timed(resumed(settings, again))[1] is None
    assert trained_groups(settings.run_folder / "ledger.jsonl") == again.trained
    assert sorted(again.trained) == list(range(32))
    assert [p.name for p in (settings.run_folder / "checkpoints").iterdir()] == ["version-00000008"]


# ---- tables on their way -----------------------------------------------------------------------------------


def row(index: int = 0, group_id: int = 0, **over: Any) -> dict[str, Any]:
    return {
        "rollout_id": f"{group_id}/{index}",
        "group_id": group_id,
        "prompt_id": "p",
        "sample_index": index,
        "agent_id": "policy",
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "loss_mask": [1, 0, 1],
        "behavior_logprobs": [-0.5, -0.25, -2.0],
        "version_spans": [{"start": 0, "end": 3, "version": 0}],
        "finish_reason": "stop",
        "truncated": False,
        "text": "x",
        **over,
    }


NOTHING: dict[str, Any] = {"response_ids": [], "loss_mask": [], "behavior_logprobs": [], "version_spans": []}
CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "no reward anywhere": lambda index: {"reward": None},
    "whole numbers as rewards": lambda index: {"reward": index},
    "one reward missing": lambda index: {"reward": None if index else 0.5},
    "empty lists everywhere": lambda index: {"step_ends": [], "reward_parts": []},
    "an empty response": lambda index: NOTHING if index == 1 else {},
    "columns to come": lambda index: {"values": None, "advantages": None, "reference_logprobs": None},
    "bfloat16 and the smallest float32": lambda index: {
        "behavior_logprobs": [
            *torch.tensor([-0.1, -3.3], dtype=torch.bfloat16).tolist(),
            float(np.nextafter(np.float32(0), np.float32(-1))),
        ]
    },
    "a logprob that is no number": lambda index: {"behavior_logprobs": [math.nan, -math.inf, -0.0]},
    "text that is hard": lambda index: {"text": "\x00é\n", "extra": None, "verdict_reason": ""},
}


def through_ipc(table: pa.Table) -> pa.Table:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def through_parquet(table: pa.Table, folder: Path) -> pa.Table:
    rollouts.write_parquet(table, folder / "t.parquet")
    return rollouts.read_parquet(folder / "t.parquet")


async def through_queue(table: pa.Table, folder: Path) -> pa.Table:
    one, other = (RolloutQueue(store=through_ipc, load=lambda t: t) for _ in range(2))
    await one.put(rollouts.build([row(group_id=8)]))
    await one.put(table)
    await one.put(rollouts.build([row(group_id=9)]))
    await one.save(str(folder / "queue.parquet"))
    await other.restore(str(folder / "queue.parquet"))
    return (await other.take([0]))[0]


def plain(table: pa.Table) -> str:
    """NaN is equal to itself here, and -0.0 is not 0.0."""
    return repr(table.to_pylist())


@pytest.mark.parametrize("case", CASES)
async def test_a_table_comes_out_as_it_went_in_whatever_way_it_takes(case: str, tmp_path: Path) -> None:
    table = rollouts.build([row(index, **CASES[case](index)) for index in range(3)])
    around = rollouts.build([row(7, **CASES[case](1))])
    sliced = pa.concat_tables([around, table, around]).slice(1, 3)
    assert plain(sliced) == plain(table)
    for way in (
        through_ipc(table),
        through_ipc(sliced),
        through_parquet(sliced, tmp_path),
        await through_queue(sliced, tmp_path),
        rollouts.replace_column(table, "reward", table.column("reward").to_pylist()),
    ):
        assert way.schema == table.schema == rollouts.SCHEMA
        assert plain(way) == plain(table)
        assert receipt_of(way) == receipt_of(table)
        for name in ("response_ids", "loss_mask", "behavior_logprobs", "versions", "rewards", "lengths"):
            left, right = getattr(unpack(way), name), getattr(unpack(table), name)
            assert left.dtype == right.dtype and left.tobytes() == right.tobytes()


def test_groups_whose_columns_are_empty_in_different_ways_can_be_put_together() -> None:
    tables = [rollouts.build([row(index, **case(index)) for index in range(2)]) for case in CASES.values()]
    together = pa.concat_tables(tables)
    assert together.schema == rollouts.SCHEMA and together.num_rows == 2 * len(CASES)
    assert plain(together) == repr([each for table in tables for each in table.to_pylist()])


def test_putting_groups_together_moves_no_bytes_and_text_may_pass_2_gib() -> None:
    for name in ("text", "extra"):
        assert pa.types.is_large_string(rollouts.SCHEMA.field(name).type)
    tables = [rollouts.build([row(index, group_id) for index in range(2)]) for group_id in range(3)]
    together = pa.concat_tables(tables)
    for name in ("prompt_ids", "response_ids", "loss_mask", "behavior_logprobs", "version_spans", "text"):
        chunks = together.column(name).chunks
        own = [table.column(name).chunk(0) for table in tables]
        # 32-bit offsets of a group's own lists: they count that group's elements, however many groups there are.
        assert [chunk.buffers()[1].address for chunk in chunks] == [a.buffers()[1].address for a in own]


def test_offsets_of_text_beyond_2_gib_are_kept(tmp_path: Path) -> None:
    """Two texts of 1.5 GiB in a file of holes, of which no byte is ever touched."""
    size = 3 << 29
    with (tmp_path / "holes").open("w+b") as file:
        file.truncate(2 * size)
        memory = mmap.mmap(file.fileno(), 2 * size, access=mmap.ACCESS_READ)
    offsets = pa.array([0, size, 2 * size], pa.int64()).buffers()[1]
    text = pa.LargeStringArray.from_buffers(2, offsets, pa.py_buffer(memory))
    place = rollouts.SCHEMA.get_field_index("text")
    big = rollouts.build([row(0), row(1)]).set_column(place, rollouts.SCHEMA.field("text"), text)
    rollouts.validate(big)
    together = pa.concat_tables([big, big])
    assert together.nbytes > 4 * size
    assert pc.call_function("binary_length", [together.slice(3).column("text")]).to_pylist() == [size]


def test_no_stage_writes_into_rows_of_the_object_store(tiny_random: Path) -> None:
    """Their memory is read-only, which numpy knows and torch does not."""
    settings = parse_config(
        {
            "model": {"dtype": "float32"},
            "learner": {"groups_per_step": 2, "learning_rate": 1e-2},
            "run": {"steps": 10},
            "algorithm": {"correction": "tis_token", "dynamic_sampling": False},
        }
    )
    made = [
        rollouts.build([row(index, group_id, reward=float(index)) for index in range(2)])
        for group_id in range(2)
    ]
    sinks = []
    for table in made:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        sinks.append(sink.getvalue().to_pybytes())
    before = [hashlib.sha256(sink).digest() for sink in sinks]
    tables = [pa.ipc.open_stream(pa.py_buffer(sink)).read_all() for sink in sinks]
    assert not tables[0].column("response_ids").chunk(0).flatten().to_numpy().flags.writeable
    trainer = Trainer(settings, tiny_random)
    trainer.train(tables, 0)
    trainer.train([rollouts.replace_column(table, "reward", [1.0, 0.0]) for table in tables], 1)
    assert [hashlib.sha256(sink).digest() for sink in sinks] == before
    assert [plain(table) for table in tables] == [plain(table) for table in made]


def test_a_list_without_one_of_its_tokens_is_no_response() -> None:
    with pytest.raises(SchemaError, match="null elements"):
        unpack(rollouts.build([row(response_ids=[3, None, 5])]))
    with pytest.raises(SchemaError, match="null elements"):
        unpack(rollouts.build([row(loss_mask=[1, None, 1])]))
