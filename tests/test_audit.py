from __future__ import annotations

import json
import math
import random

from headway.cluster.audit import Audit


def test_distance_of_two_distributions_by_hand() -> None:
    audit = Audit()
    assert audit.length_ks() == audit.reward_ks() == audit.task_distance() == 0.0
    audit.train("a", [2, 4], [1.0])
    audit.train("a", [4], [1.0])
    audit.drop([1], [0.0, 0.0])
    # Cumulative shares at 1, 2, 4: sampled 1/4, 1/2, 1; trained 0, 1/3, 1.
    assert audit.length_ks() == 0.25
    assert audit.reward_ks() == 0.5  # at 0: 2/4 of the sampled, none of the trained
    assert audit.record() == {
        "length_ks": 0.25,
        "reward_ks": 0.5,
        "task_distance": 0.0,
        "sampled_mean": 11 / 4,
        "trained_mean": 10 / 3,
        "unfinished": 0,
    }


def test_equal_distributions_have_no_distance_whatever_their_sizes() -> None:
    audit = Audit()
    audit.train("a", [3, 5], [0.0, 1.0])
    audit.drop([3, 5] * 10, [0.0, 1.0] * 10)
    assert audit.length_ks() == audit.reward_ks() == 0.0


def test_answers_given_up_before_they_ended_are_longer_than_all_others() -> None:
    # 4 responses of 1 to 4 tokens are trained, 4 were given up: below any length that finished lies half of the sampled.
    audit = Audit()
    audit.train("a", [1, 2, 3, 4], [])
    assert audit.length_ks() == 0.0
    audit.give_up(4)
    assert audit.length_ks() == 0.5
    assert audit.record()["unfinished"] == 4 and audit.record()["sampled_mean"] == 2.5


def test_distance_of_tasks_is_the_share_that_would_have_to_move() -> None:
    audit = Audit()
    for task in ("sum", "sum", "proof", "proof"):
        audit.dispatch(task)
    audit.train("sum", [], [])
    assert audit.task_distance() == 0.5  # (|1/2 - 1| + |1/2 - 0|) / 2
    audit.train("proof", [], [])
    assert audit.task_distance() == 0.0


def test_continuous_values_do_not_make_it_grow() -> None:
    audit, rng = Audit(), random.Random(0)
    for _ in range(20_000):
        audit.train("a", [rng.randint(1, 30_000)], [rng.random(), -rng.random()])
    # Two digits: 90 values in each of the decades from 0.1 to 1 and 0.01 to 0.1, fewer below, of either sign.
    assert len(audit.sampled_rewards) < 2 * 90 * 6
    # 9 values up to 9, 90 in each of the decades up to 9,900, and 21 up to 30,000.
    assert len(audit.sampled_lengths) <= 9 + 3 * 90 + 21


def test_means_are_exact_although_lengths_are_rounded() -> None:
    audit = Audit()
    audit.train("a", [1004, 1003], [])
    assert audit.trained_lengths == {1000: 2} and audit.record()["trained_mean"] == 1003.5


def test_a_reward_that_is_no_number_has_no_place_in_an_order() -> None:
    audit = Audit()
    audit.train("a", [1], [math.nan, 0.5, math.inf])
    audit.drop([1], [math.nan])
    assert audit.sampled_rewards == {0.5: 1, math.inf: 1}


def test_it_goes_on_after_a_resume() -> None:
    audit = Audit()
    audit.dispatch("a")
    audit.train("a", [3, 5], [0.25])
    audit.drop([5], [1.0])
    audit.give_up(2)
    again = Audit.resume(json.loads(json.dumps(audit.state())))
    assert again == audit and again.record() == audit.record()
    again.dispatch("b")
    assert again.dispatched_tasks == {"a": 1, "b": 1} and again.task_distance() == 0.5
