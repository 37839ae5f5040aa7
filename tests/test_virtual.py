"""Virtual time, and virtual actors whose times can be computed by hand."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.actors.generation_rows import GroupRequest
from headway.cluster.crew import Crew
from headway.cluster.scenario import Failure, Scenario
from headway.cluster.virtual import VirtualCrew
from headway.cluster.virtual_clock import Deadlock, run_virtual
from headway.core.config import parse_config
from headway.core.errors import (
    ActorDied,
    ClusterError,
    ConfigError,
    HandedBack,
    HeadwayError,
    Lost,
    RolloutFailed,
    StoreFull,
    WeightUpdateFailed,
)
from headway.core.prompts import Prompt

# ---- the clock ---------------------------------------------------------------------------------------------


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_passes_at_once_and_in_order():
    async def main() -> list[tuple[str, float]]:
        seen = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, now()))

        await asyncio.gather(sleeper("day", 86400), sleeper("second", 1), sleeper("hour", 3600))
        return seen

    began = time.monotonic()
    assert run_virtual(main()) == [("second", 1.0), ("hour", 3600.0), ("day", 86400.0)]
    assert time.monotonic() - began < 10


def test_work_for_threads_takes_no_virtual_time_and_is_done_before_time_moves():
    async def main() -> tuple[float, list[str]]:
        done: list[str] = []

        async def other() -> None:
            await asyncio.sleep(0.001)
            done.append("timer")

        task = asyncio.ensure_future(other())
        await asyncio.to_thread(lambda: (time.sleep(0.05), done.append("thread")))
        at = now()
        await task
        return at, done

    assert run_virtual(main()) == (0.0, ["thread", "timer"])


def test_what_a_thread_raises_reaches_who_awaits_it():
    async def main() -> None:
        await asyncio.to_thread(lambda: {}["nothing"])

    with pytest.raises(KeyError, match="nothing"):
        run_virtual(main())


def test_deadlines_are_virtual():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(500):
                await asyncio.get_running_loop().create_future()
        return now()

    assert run_virtual(main()) == 500.0


def test_a_deadlock_is_an_error_that_names_who_waits():
    async def wait_for_nobody() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(7)
        task = asyncio.create_task(wait_for_nobody(), name="the one")
        await task

    with pytest.raises(
        Deadlock, match=r"(?s)at virtual time 7.000 s .* the one in .*wait_for_nobody at test_virtual"
    ):
        run_virtual(main())


def test_what_a_timer_raises_ends_the_run():
    async def main() -> None:
        asyncio.get_running_loop().call_later(5, lambda: 1 // 0)
        await asyncio.sleep(10)

    with pytest.raises(ZeroDivisionError):
        run_virtual(main())


def test_timers_of_one_time_run_in_the_order_in_which_they_were_set():
    async def main() -> list[int]:
        seen: list[int] = []
        for number in range(100):
            asyncio.get_running_loop().call_at(3.0, seen.append, number)
        for _ in range(2000):
            asyncio.get_running_loop().call_at(2.0, seen.append, -1).cancel()
        await asyncio.sleep(3.0)
        return seen

    assert run_virtual(main()) == list(range(100))


def test_time_is_exact_over_a_million_seconds_of_thirds():
    async def main() -> float:
        for _ in range(3000):
            await asyncio.sleep(1000 / 3)
        return now()

    assert run_virtual(main()) == pytest.approx(1e6, rel=1e-12)


# ---- actors ------------------------------------------------------------------------------------------------

EVEN = Scenario(
    length_median=10,
    length_sigma=0,
    prefill_s=0,
    decode_s=1,
    decode_request_s=1,
    engine_start_s=0,
    update_s=4,
    pause_s=2,
    score_s=0,
    start_s=0,
    step_s=3,
    token_s=0.1,
    publish_s=0,
    detect_s=1,
)
"""Two responses of 10 tokens: 3 s a token alone, 5 s beside another group."""
PROMPT = Prompt(prompt_id="p", content="", gold=None, verifier="math")


def config(**overrides: Any):
    tree: dict[str, Any] = {
        "sampling": {"group_size": 2, "max_new_tokens": 100},
        "learner": {"groups_per_step": 1},
        "lag": {"max_version_lag": 1},
        "generation": {"replicas": 2, "max_concurrent_requests": 8},
    }
    for key, value in overrides.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    return parse_config(tree)


def request(group_id: int, deadline_s: float = 1000.0, group_size: int = 2) -> GroupRequest:
    return GroupRequest(
        group_id=group_id,
        prompt=PROMPT,
        group_size=group_size,
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=100,
        deadline_s=deadline_s,
    )


async def ready(scenario: Scenario = EVEN, engines: int = 1, **overrides: Any) -> VirtualCrew:
    """A crew at version 0 whose engines serve; 4 s have passed, which is what the updates take."""
    crew = VirtualCrew(config(**overrides), scenario)
    as_the_driver_sees_it: Crew = crew
    await as_the_driver_sees_it.open()
    await crew.start_learner()
    release = await crew.publish(0)
    for replica in range(engines):
        assert await crew.start_engine(replica) == 1
    await asyncio.gather(*(crew.update_engine(replica, release) for replica in range(engines)))
    return crew


async def finish(crew: VirtualCrew, pending: Any) -> float:
    """When the group is in the queue, in seconds after the crew was ready."""
    await crew.put(pending)
    return now() - 4


def test_engines_share_their_speed_among_requests():
    async def main() -> list[float]:
        crew = await ready()
        first = asyncio.ensure_future(finish(crew, crew.sample(0, request(0))))
        await asyncio.sleep(15)
        second = asyncio.ensure_future(finish(crew, crew.sample(0, request(1))))
        return list(await asyncio.gather(first, second))

    # The first group: 5 tokens at 3 s, 5 at 5 s. The second: 5 tokens at 5 s, and 5 at 3 s.
    assert run_virtual(main()) == pytest.approx([40, 55])


def test_engines_decode_no_more_than_they_may_at_a_time():
    async def main() -> float:
        crew = await ready(generation__max_concurrent_requests=2, sampling__group_size=4)
        return await finish(crew, crew.sample(0, request(0, group_size=4)))

    assert run_virtual(main()) == pytest.approx(60)  # two and two, 30 s each


def test_prefill_and_scoring_come_before_and_after():
    async def main() -> float:
        crew = await ready(replace(EVEN, prefill_s=2, score_s=0.5))
        return await finish(crew, crew.sample(0, request(0)))

    assert run_virtual(main()) == pytest.approx(32.5)


def test_a_weight_update_stops_the_engine_and_its_groups_go_on_under_the_new_version():
    async def main() -> tuple[float, int, int]:
        crew = await ready()
        await trained(crew, 0)
        began = now() - 4
        done = asyncio.ensure_future(crew.put(crew.sample(0, request(1))))
        await asyncio.sleep(6)
        await crew.update_engine(0, await crew.publish(1))
        receipt = await done
        return now() - 4 - began, receipt.oldest_version, receipt.newest_version

    assert run_virtual(main()) == (pytest.approx(32), 0, 1)


async def trained(crew: VirtualCrew, *group_ids: int) -> None:
    """Samples the groups on engine 0 and trains a step on each."""
    for group_id in group_ids:
        await crew.put(crew.sample(0, request(group_id)))
        await crew.train(crew.version, [group_id])
        await crew.release([group_id])


def test_groups_that_are_handed_back_go_on_where_they_stopped():
    async def main() -> tuple[float, int, int]:
        crew = await ready(engines=2)
        await trained(crew, 0)
        began = now()
        pending = crew.sample(0, request(1))
        await asyncio.sleep(15)
        await crew.hand_back(0)
        with pytest.raises(HandedBack):
            await crew.put(pending)
        kept = await crew.take_back(0, 1)
        assert kept.remaining == (5, 5)
        await crew.stop_engine(0)
        await crew.update_engine(1, await crew.publish(1))
        receipt = await crew.put(crew.sample(1, request(1), kept))
        return now() - began, receipt.oldest_version, receipt.newest_version

    assert run_virtual(main()) == (pytest.approx(15 + 4 + 15), 0, 1)


def test_the_engine_keeps_the_deadline_of_a_group_and_its_place_is_free_again():
    async def main() -> tuple[float, float]:
        crew = await ready()
        late = crew.sample(0, request(0, deadline_s=20))
        other = asyncio.ensure_future(finish(crew, crew.sample(0, request(1))))
        with pytest.raises(RolloutFailed, match="straggler"):
            await crew.put(late)
        return now() - 4, await other

    assert run_virtual(main()) == (
        20,
        pytest.approx(20 + 6 * 3),
    )  # 4 tokens in 20 s beside the other, 6 alone


def test_a_dead_engine_takes_its_groups_along_and_is_reported_once():
    async def main() -> None:
        crew = await ready(replace(EVEN, failures=(Failure(time_s=10, event="generation"),)))
        with pytest.raises(ActorDied) as death:
            await crew.put(crew.sample(0, request(0)))
        assert (now(), death.value.role, death.value.replica, death.value.incarnation) == (
            10,
            "generation",
            0,
            1,
        )
        reported = await crew.next_death()
        assert (now(), str(reported), reported.incarnation) == (11, "generation 0 died", 1)
        with pytest.raises(ActorDied):
            await crew.put(crew.sample(0, request(0)))
        with pytest.raises(ActorDied):
            await crew.report(0)
        assert await crew.start_engine(0) == 2

    run_virtual(main())


def test_a_restarted_engine_samples_nothing_before_its_first_version():
    async def main() -> tuple[float, int]:
        crew = await ready()
        await trained(crew, 0)
        await crew.start_engine(0)
        began = now()
        done = asyncio.ensure_future(crew.put(crew.sample(0, request(1))))
        await asyncio.sleep(100)
        await crew.update_engine(0, await crew.publish(1))
        receipt = await done
        return now() - began, receipt.oldest_version

    assert run_virtual(main()) == (pytest.approx(100 + 4 + 30), 1)


def test_a_node_dies_with_its_engines():
    async def main() -> list[bool]:
        crew = await ready(
            replace(EVEN, engines_per_node=2, failures=(Failure(time_s=5, event="node"),)),
            engines=3,
        )
        await asyncio.sleep(2)
        return [crew.engines[replica].alive for replica in range(3)]

    assert run_virtual(main()) == [False, False, True]


def test_a_stalled_engine_neither_answers_nor_samples_nor_dies():
    async def main() -> None:
        crew = await ready(replace(EVEN, failures=(Failure(time_s=5, event="stall"),)))
        pending = crew.sample(0, request(0))
        await asyncio.sleep(5)
        for call in (crew.report(0), crew.put(pending), crew.update_engine(0, await crew.publish(0))):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1e6):
                    await call
        assert await crew.start_engine(0) == 2
        with pytest.raises(ActorDied):
            await crew.put(pending)

    run_virtual(main())


def test_half_an_update_is_an_error_and_samples_no_more():
    async def main() -> None:
        crew = await ready(replace(EVEN, failures=(Failure(time_s=5, event="bad_update"),)))
        pending = crew.sample(0, request(0))
        await asyncio.sleep(3)
        with pytest.raises(WeightUpdateFailed, match="half of version 0"):
            await crew.update_engine(0, await crew.publish(0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1e6):
                await crew.put(pending)

    run_virtual(main())


def test_rows_outlive_the_verifier_that_scores_them():
    """Odd groups are scored by verifier 1, which dies four seconds into it: only its own work is done again."""

    async def main() -> None:
        scenario = replace(EVEN, score_s=10, failures=(Failure(time_s=58, event="verifiers", replica=1),))
        crew = await ready(scenario, verifiers__replicas=2)
        rows = crew.sample(0, request(1))
        even = asyncio.ensure_future(crew.put(crew.sample(0, request(2))))
        with pytest.raises(ActorDied, match="verifiers 1 died"):
            await crew.put(rows)
        assert now() == 58
        with pytest.raises(ActorDied, match="verifiers 1 died: it is dead"):
            await crew.put(rows)
        assert now() == 58
        await crew.replace("verifiers", 1)
        assert crew.incarnation("verifiers", 1) == 2
        again = now()
        assert (await crew.put(rows)).group_id == 1
        assert now() == again + 10
        assert (await even).group_id == 2
        with pytest.raises(Lost):
            await crew.replace("learner", 0)

    run_virtual(main())


def test_the_queue_dies_with_what_it_holds_and_rows_on_their_way_survive():
    async def main() -> None:
        crew = await ready(replace(EVEN, failures=(Failure(time_s=40, event="queue"),)))
        await crew.put(crew.sample(0, request(0)))
        rows = crew.sample(0, request(1))
        with pytest.raises(ActorDied, match="queue 0 died: it is dead"):
            await crew.put(rows)
        assert now() == 64
        await crew.start_queue()
        again = now()
        assert (await crew.put(rows)).group_id == 1
        assert now() == again + EVEN.score_s
        with pytest.raises(HeadwayError, match=r"does not hold groups \[0\]"):
            await crew.train(0, [0])

    run_virtual(main())


def test_a_full_store_refuses_for_a_while():
    async def main() -> float:
        crew = await ready(replace(EVEN, store_full_s=20, failures=(Failure(time_s=30, event="store_full"),)))
        pending = crew.sample(0, request(0))
        with pytest.raises(StoreFull):
            await crew.put(pending)
        await asyncio.sleep(16)
        await crew.put(pending)
        return now()

    assert run_virtual(main()) == pytest.approx(50)


def test_a_learner_that_dies_under_its_step_raises_at_once():
    async def main() -> float:
        crew = await ready(replace(EVEN, failures=(Failure(time_s=35, event="learner"),)))
        await crew.put(crew.sample(0, request(0)))
        with pytest.raises(ActorDied, match="learner 0 died"):
            await crew.train(0, [0])
        return now()

    assert run_virtual(main()) == 35  # the step would have ended at 34 + 3 + 20 * 0.1


def test_the_learner_takes_a_fixed_time_and_one_by_tokens():
    async def main() -> tuple[float, int]:
        crew = await ready()
        await crew.put(crew.sample(0, request(0)))
        began = now()
        done = await crew.train(0, [0])
        return now() - began, done.stats[0].version

    assert run_virtual(main()) == (pytest.approx(3 + 20 * 0.1), 1)


def test_no_group_is_trained_twice_and_none_beyond_the_bound():
    async def twice() -> None:
        crew = await ready()
        await trained(crew, 0)
        await crew.put(crew.sample(0, request(0)))
        await crew.train(1, [0])

    async def late() -> None:
        crew = await ready()
        await crew.put(crew.sample(0, request(9)))
        await trained(crew, 0, 1)
        await crew.train(2, [9])

    async def too_few() -> None:
        crew = await ready()
        await crew.train(0, [])

    async def wrong_version() -> None:
        crew = await ready()
        await crew.put(crew.sample(0, request(0)))
        await crew.train(1, [0])

    for run, what in (
        (twice, "trained twice"),
        (late, "beyond the bound"),
        (too_few, "0 groups in a batch of 1"),
        (wrong_version, "the learner is at 0"),
    ):
        with pytest.raises(AssertionError, match=what):
            run_virtual(run())


def test_rows_of_weights_that_were_lost_are_not_trained(tmp_path: Path):
    """The learner goes back to version 1 and takes another second step: version 2 is another one then."""

    async def main() -> None:
        crew = await ready()
        await trained(crew, 0)
        await crew.save(tmp_path)
        await trained(crew, 1)
        await crew.update_engine(0, await crew.publish(2))
        await crew.put(crew.sample(0, request(5)))
        await crew.put(crew.sample(0, request(6)))
        await crew.start_learner()
        assert await crew.load(tmp_path) == 1
        rows = crew.sample(0, request(7))
        with pytest.raises(AssertionError, match="from the future of version 1"):
            await crew.train(1, [5])
        await crew.update_engine(0, await crew.publish(1))
        await crew.put(crew.sample(0, request(8)))
        await crew.put(rows)
        await crew.train(1, [8])
        with pytest.raises(AssertionError, match="not this learner's version 2"):
            await crew.train(2, [6])

    run_virtual(main())


def test_weights_are_the_history(tmp_path: Path):
    async def train(*group_ids: int) -> str:
        crew = await ready(lag__max_version_lag=3)
        await trained(crew, *group_ids)
        return crew.weights

    assert run_virtual(train(0, 1)) == run_virtual(train(0, 1)) != run_virtual(train(1, 0))

    async def resumed() -> str:
        crew = await ready(lag__max_version_lag=3)
        await trained(crew, 0)
        await crew.put(crew.sample(0, request(1)))
        await crew.save(tmp_path)
        await crew.save_queue(tmp_path / "queue.parquet")
        await crew.close()
        again = VirtualCrew(config(lag__max_version_lag=3), EVEN)
        await again.open()
        await again.start_learner()
        assert await again.load(tmp_path) == 1
        assert [receipt.group_id for receipt in await again.restore_queue(tmp_path / "queue.parquet")] == [1]
        await again.train(1, [1])
        return again.weights

    assert run_virtual(resumed()) == run_virtual(train(0, 1))


def test_engines_never_go_back():
    async def main() -> None:
        crew = await ready()
        old = await crew.publish(0)
        await trained(crew, 0)
        await crew.update_engine(0, await crew.publish(1))
        await crew.update_engine(0, old)

    with pytest.raises(AssertionError, match="back from 1 to 0"):
        run_virtual(main())


def test_the_cluster_may_have_no_room_for_another_engine():
    async def main() -> None:
        crew = await ready(replace(EVEN, engine_places=1))
        with pytest.raises(ClusterError, match="room for 1 engines"):
            await crew.start_engine(1)
        await crew.stop_engine(0)
        assert await crew.start_engine(1) == 1

    run_virtual(main())


def test_requests_to_scale_come_at_their_time():
    async def main() -> list[tuple[float, int]]:
        crew = await ready(replace(EVEN, scaling=((100, 4), (250, 2))))
        seen = []
        for _ in range(2):
            ticket, kind, (group, replicas) = await crew.next_request()
            assert (kind, group) == ("scale", "generation")
            await crew.answer(ticket, "done")
            seen.append((now(), replicas))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1e6):
                await crew.next_request()
        return seen

    assert run_virtual(main()) == [(100, 4), (250, 2)]


def test_a_closed_crew_answers_nobody_and_can_be_opened_again():
    async def main() -> None:
        crew = await ready()
        waiting = asyncio.ensure_future(crew.put(crew.sample(0, request(0))))
        await asyncio.sleep(1)
        await crew.close()
        with pytest.raises(ActorDied):
            await waiting
        await crew.open()
        await crew.start_learner()
        assert crew.incarnation("learner", 0) == 2
        assert await crew.start_engine(0) == 2

    run_virtual(main())


# ---- what is drawn -----------------------------------------------------------------------------------------


def test_lengths_belong_to_the_group_and_follow_the_distribution():
    scenario = Scenario(seed=3, length_median=200, length_sigma=0.8)
    groups = [scenario.draw_lengths(group_id, "p", 8, 100_000) for group_id in range(2000)]
    assert groups[7] == scenario.draw_lengths(7, "other", 8, 100_000)
    logs = [math.log(length) for group in groups for length in group]
    assert statistics.mean(logs) == pytest.approx(math.log(200), abs=0.03)
    assert statistics.stdev(logs) == pytest.approx(0.8, abs=0.02)
    assert max(scenario.draw_lengths(7, "p", 8, 100)) == 100
    assert Scenario(seed=4).draw_lengths(7, "p", 8, 1000) != Scenario(seed=5).draw_lengths(7, "p", 8, 1000)


def test_measured_lengths_are_drawn_as_they_are():
    drawn = [n for i in range(1000) for n in Scenario(lengths=(3, 3, 9)).draw_lengths(i, "p", 2, 100)]
    assert set(drawn) == {3, 9}
    assert drawn.count(9) / len(drawn) == pytest.approx(1 / 3, abs=0.04)


def test_a_share_of_the_prompts_has_long_answers():
    scenario = Scenario(length_median=10, length_sigma=0, straggler_share=0.1, straggler_factor=50)
    long = [prompt for prompt in map(str, range(5000)) if scenario.is_straggler(prompt)]
    assert len(long) / 5000 == pytest.approx(0.1, abs=0.02)
    assert scenario.draw_lengths(0, long[0], 2, 1000) == (500, 500)


def test_longer_answers_may_be_right_more_often():
    scenario = Scenario(length_sigma=1.0, reward_mean=0.5, reward_slope=0.2)
    pairs = [
        pair
        for group_id in range(2000)
        for lengths in [scenario.draw_lengths(group_id, "p", 4, 10_000)]
        for pair in zip(lengths, scenario.draw_rewards(group_id, lengths), strict=True)
    ]
    short = statistics.mean(reward for length, reward in pairs if length < 256)
    long = statistics.mean(reward for length, reward in pairs if length >= 256)
    assert long - short == pytest.approx(2 * 0.2 * math.sqrt(2 / math.pi), abs=0.04)  # E|z| on either side


def test_failures_come_at_their_rate():
    async def main() -> int:
        crew = await ready(replace(EVEN, rates={"generation": 60.0}), engines=4)
        deaths = 0
        while now() < 3600:
            death = await crew.next_death()
            deaths += 1
            await crew.start_engine(death.replica)
        return deaths

    # 4 engines, one death a minute each, and 1 s until it is noticed.
    assert run_virtual(main()) == pytest.approx(4 * 3600 / 61, abs=35)


def test_an_unknown_event_is_refused():
    with pytest.raises(ConfigError, match="unknown event 'gpu'"):
        Scenario(rates={"gpu": 1.0})
