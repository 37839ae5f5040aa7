"""A score of several parts: a weighted mean that keeps them."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import DataError
from headway.verifiers.composite import combine, expand
from headway.verifiers.registry import verify
from headway.verifiers.verdict import Item, Verdict, correct, wrong

FORM = {"verifier": "tags", "weight": 1}
ANSWER = {"verifier": "regex", "weight": 3}
BOTH = {"answer": ANSWER, "form": FORM}
WELL_FORMED = "<think>6 + 2</think><answer>{}</answer>"


def test_the_score_is_the_weighted_mean_and_the_parts_are_kept() -> None:
    right = verify("weighted", "8", WELL_FORMED.format(8), {"parts": BOTH})
    assert right == Verdict(
        score=1.0, reason="correct", extracted="8", parts=(("answer", 1.0), ("form", 1.0))
    )
    formless = verify("weighted", "8", "8", {"parts": BOTH})
    assert formless == Verdict(
        score=0.75, reason="correct", extracted="8", parts=(("answer", 1.0), ("form", 0.0))
    )
    formal = verify("weighted", "8", WELL_FORMED.format(9), {"parts": BOTH})
    assert formal == Verdict(
        score=0.25, reason="wrong", extracted="9", parts=(("answer", 0.0), ("form", 1.0))
    )


def test_form_is_not_paid_for_a_wrong_answer_that_is_required() -> None:
    context = {"parts": BOTH, "require": ["answer"]}
    formal = verify("weighted", "8", WELL_FORMED.format(9), context)
    assert (formal.score, formal.reason, formal.parts) == (0.0, "wrong", (("answer", 0.0), ("form", 1.0)))
    assert verify("weighted", "8", "8", context).score == 0.75
    formless = verify("weighted", "8", "8", {"parts": BOTH, "require": ["form"]})
    assert (formless.score, formless.reason, formless.extracted) == (0.0, "tag_missing", "8")


def test_rewards_of_steps_keep_their_name() -> None:
    """The learner knows them by it (`algorithm.process_rewards`)."""
    item = Item(
        "weighted",
        "8",
        "8",
        {"parts": {"right": ANSWER, "process": {"verifier": "reward_model", "weight": 1}}},
    )
    steps = Verdict(score=0.5, reason="scored", parts=(("step", 0.9), ("step", 0.5)))
    verdict = combine(item, [correct("8"), steps])
    assert verdict.parts == (("right", 1.0), ("process", 0.5), ("step", 0.9), ("step", 0.5))


def test_a_part_without_weight_is_only_looked_at() -> None:
    parts = {"answer": ANSWER, "form": FORM | {"weight": 0}}
    verdict = verify("weighted", "8", "8", {"parts": parts})
    assert (verdict.score, verdict.parts) == (1.0, (("answer", 1.0), ("form", 0.0)))


def test_reason_and_answer_are_those_of_main() -> None:
    context = {"parts": {"form": FORM, "answer": ANSWER}}
    assert verify("weighted", "8", "9", context).reason == "tag_missing"
    verdict = verify("weighted", "8", "9", context | {"main": "answer"})
    assert (verdict.reason, verdict.extracted) == ("wrong", "9")


def test_a_part_has_its_own_options_and_gold_over_those_of_the_row() -> None:
    parts = {
        "number": {"verifier": "numeric", "weight": 1},
        "close": {"verifier": "numeric", "weight": 1, "relative_tolerance": 0.5},
        "other": {"verifier": "numeric", "weight": 2, "gold": "9"},
    }
    leaves = expand(
        Item("weighted", "8", "9", {"parts": parts, "relative_tolerance": 0, "task": "t"}, "6 + 2?")
    )
    assert leaves == [
        Item("numeric", "8", "9", {"relative_tolerance": 0, "task": "t"}, "6 + 2?"),
        Item("numeric", "8", "9", {"relative_tolerance": 0.5, "task": "t"}, "6 + 2?"),
        Item("numeric", "9", "9", {"relative_tolerance": 0, "task": "t"}, "6 + 2?"),
    ]
    verdict = verify("weighted", "8", "9", {"parts": parts})
    assert (verdict.score, verdict.parts) == (0.75, (("number", 0.0), ("close", 1.0), ("other", 1.0)))


def test_composites_in_composites_keep_the_inner_parts() -> None:
    style = {
        "verifier": "weighted",
        "weight": 1,
        "parts": {"form": FORM, "length": {"verifier": "length", "weight": 1, "max": 5}},
    }
    item = Item("weighted", "8", "8", {"parts": {"answer": ANSWER, "style": style}, "require": ["answer"]})
    assert [leaf.name for leaf in expand(item)] == ["regex", "tags", "length"]
    verdict = verify(*item)
    assert verdict.score == 0.875  # (3 * 1 + 1 * 0.5) / 4
    assert verdict.parts == (("answer", 1.0), ("style", 0.5), ("style.form", 0.0), ("style.length", 1.0))


def test_parts_scored_elsewhere_join() -> None:
    item = Item(
        "weighted",
        "8",
        "8",
        {"parts": {"answer": ANSWER, "taste": {"verifier": "a_judge_elsewhere", "weight": 1, "rubric": "?"}}},
    )
    first, second = expand(item)
    assert (second.name, second.context) == ("a_judge_elsewhere", {"rubric": "?"})
    judged = Verdict(score=0.2, reason="judged", parts=(("tone", 0.1), ("clarity", 0.3)))
    verdict = combine(item, [verify(*first), judged])
    assert verdict.score == pytest.approx(0.8)
    assert verdict.parts == (("answer", 1.0), ("taste", 0.2), ("taste.tone", 0.1), ("taste.clarity", 0.3))
    with pytest.raises(ValueError, match="1 verdicts for 2 parts"):
        combine(item, [judged])
    plain = Item("numeric", "8", "8")
    assert expand(plain) == [plain]
    assert combine(plain, [judged]) is judged


def test_one_unscored_part_leaves_the_whole_unscored() -> None:
    item = Item("weighted", "8", "8", {"parts": BOTH, "require": ["answer"]})
    dead = Verdict(score=None, reason="crash")
    verdict = combine(item, [wrong("8"), dead])
    assert verdict == Verdict(
        score=None, reason="crash", extracted="part 'form': crash", parts=(("answer", 0.0),)
    )
    with pytest.raises(DataError, match=r"^part 'answer': gold"):
        verify("weighted", "(", "8", {"parts": BOTH})


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({}, "parts None"),
        ({"parts": {}}, "parts {}"),
        ({"parts": [FORM]}, "parts "),
        ({"parts": {"a.b": FORM}}, "parts: 'a.b'"),
        ({"parts": {"a": "tags"}}, "parts.a 'tags'"),
        ({"parts": {"a": {"weight": 1}}}, "parts.a.verifier None"),
        ({"parts": {"a": {"verifier": "tags"}}}, "parts.a.weight None"),
        ({"parts": {"a": FORM | {"weight": 0}}}, "parts: all weights are 0"),
        ({"parts": {"a": FORM | {"weight": -1}}}, "parts.a.weight -1"),
        ({"parts": {"a": FORM | {"weight": True}}}, "parts.a.weight True"),
        ({"parts": {"a": FORM | {"weight": float("inf")}}}, "parts.a.weight inf"),
        ({"parts": {"a": FORM | {"weight": float("nan")}}}, "parts.a.weight nan"),
        ({"parts": {"a": FORM | {"weight": 10**400}}}, "parts.a.weight 1000"),
        ({"parts": {"a": FORM}, "main": "b"}, "main 'b'"),
        ({"parts": {"a": FORM}, "require": "a"}, "require 'a'"),
        ({"parts": {"a": FORM}, "require": ["a", "b"]}, r"require \['a', 'b'\]"),
        ({"parts": {"a": FORM | {"tags": 5}}}, "part 'a': tags 5"),
        ({"parts": {"a": FORM | {"verifier": "tagz"}}}, "part 'a': no verifier 'tagz'"),
    ],
)
def test_a_bad_context_is_named(context: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^{message}"):
        verify("weighted", "8", "8", context)


def nested(depth: int) -> dict[str, Any]:
    part: dict[str, Any] = dict(FORM)
    for _ in range(depth):
        part = {"verifier": "weighted", "weight": 1, "parts": {"a": part}}
    return part


def test_composites_stand_in_each_other_up_to_a_depth() -> None:
    assert verify("weighted", None, WELL_FORMED.format(8), nested(4)).score == 1
    with pytest.raises(DataError, match="4 deep"):
        verify("weighted", None, "8", nested(5))


_SCORES = st.lists(st.tuples(st.floats(0, 1), st.floats(0.001, 1000), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(scores=_SCORES, order=st.randoms(use_true_random=False))
def test_the_order_of_the_parts_changes_nothing_and_the_parts_make_the_score(
    scores: list[tuple[float, float, bool]], order: Any
) -> None:
    verdicts = {f"p{n}": Verdict(score=s, reason=f"r{n}") for n, (s, _, _) in enumerate(scores)}
    weights = {f"p{n}": w for n, (_, w, _) in enumerate(scores)}
    require = [f"p{n}" for n, (_, _, required) in enumerate(scores) if required]

    def combined(names: list[str]) -> Verdict:
        parts = {name: {"verifier": "elsewhere", "weight": weights[name]} for name in names}
        item = Item("weighted", None, "", {"parts": parts, "require": require, "main": "p0"})
        return combine(item, [verdicts[name] for name in names])

    names = list(verdicts)
    verdict = combined(names)
    order.shuffle(names)
    other = combined(names)
    assert verdict.score is not None
    assert 0 <= verdict.score <= 1
    assert other.score == verdict.score
    assert sorted(other.parts) == sorted(verdict.parts)
    if all(dict(verdict.parts)[name] == 1 for name in require):
        mean = sum(weights[name] * score for name, score in verdict.parts) / sum(weights.values())
        assert verdict.score == pytest.approx(mean)
        assert (other.reason, other.extracted) == (verdict.reason, verdict.extracted)
    else:
        assert verdict.score == 0


@settings(max_examples=100, deadline=None)
@given(
    response=st.one_of(st.text(max_size=60), st.sampled_from(["8", WELL_FORMED.format(8), "<think>"])),
    end=st.sampled_from(["\n", "  ", "\t\n \n"]),
)
def test_no_response_raises_and_white_space_at_the_end_changes_nothing(response: str, end: str) -> None:
    style = {"verifier": "repetition", "weight": 0.5}
    context = {"parts": {"answer": {"verifier": "exact", "weight": 2}, "form": FORM, "style": style}}
    verdict = verify("weighted", "8", response, context)
    assert verdict.score is not None
    assert verdict.reason != "exception"
    assert verify("weighted", "8", response + end, context) == verdict
    in_thread: list[Verdict] = []
    thread = threading.Thread(target=lambda: in_thread.append(verify("weighted", "8", response, context)))
    thread.start()
    thread.join(30)
    assert in_thread == [verdict]


@settings(max_examples=200, deadline=None)
@given(
    context=st.fixed_dictionaries(
        {},
        optional={
            "parts": st.dictionaries(
                st.sampled_from(["a", "b", ".", ""]),
                st.one_of(
                    st.just(FORM),
                    st.just(nested(2)),
                    st.none(),
                    st.dictionaries(st.sampled_from(["verifier", "weight", "gold"]), st.just(5)),
                ),
                max_size=3,
            ),
            "require": st.lists(st.sampled_from(["a", "b", 5]), max_size=2),
            "main": st.sampled_from(["a", "b", 5, []]),
        },
    )
)
def test_no_context_is_the_responses_fault(context: dict[str, Any]) -> None:
    with contextlib.suppress(DataError):
        assert verify("weighted", "8", WELL_FORMED.format(8), context).reason != "exception"


def test_a_whole_of_right_parts_is_1() -> None:
    weights = [0.1, 0.2, 0.3, 1 / 3, 7e5]
    parts = {f"p{n}": {"verifier": "elsewhere", "weight": w} for n, w in enumerate(weights)}
    assert combine(Item("weighted", None, "", {"parts": parts}), [correct("8")] * 5).score == 1.0
