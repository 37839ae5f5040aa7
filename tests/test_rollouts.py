"""The rollout table: one schema, exact round trips, refusals that name the rollout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headway.core import rollouts
from headway.core.errors import SchemaError


def row(**over: Any) -> dict[str, Any]:
    return {
        "rollout_id": "0/0",
        "group_id": 0,
        "prompt_id": "p",
        "sample_index": 0,
        "agent_id": "policy",
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "loss_mask": [1, 1, 1],
        "behavior_logprobs": [-0.5, -0.25, float("nan")],
        "version_spans": [{"start": 0, "end": 1, "version": 7}, {"start": 1, "end": 3, "version": 9}],
        "finish_reason": "stop",
        "truncated": False,
        "text": "x",
        **over,
    }


def test_a_table_survives_parquet_with_nulls_and_nan(tmp_path: Path) -> None:
    table = rollouts.build([row(), row(rollout_id="0/1", sample_index=1, reward=-0.0)])
    rollouts.write_parquet(table, tmp_path / "t.parquet")
    back = rollouts.read_parquet(tmp_path / "t.parquet")
    assert back.schema == rollouts.SCHEMA
    first, second = back.to_pylist()
    assert first["reward"] is None and second["reward"] == 0.0
    assert math.isnan(first["behavior_logprobs"][2])
    assert first["version_spans"] == row()["version_spans"]
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_oldest_and_newest_version_are_over_all_tokens() -> None:
    one = [{"start": 0, "end": 3, "version": 4}]
    table = rollouts.build([row(), row(version_spans=one)])  # the first row spans versions 7 and 9
    assert (rollouts.oldest_version(table), rollouts.newest_version(table)) == (4, 9)
    nothing = rollouts.build([row(response_ids=[], loss_mask=[], behavior_logprobs=[], version_spans=[])])
    with pytest.raises(SchemaError, match="without sampled tokens has no version"):
        rollouts.newest_version(nothing)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"loss_mask": [1, 1]}, "differ in length"),
        ({"behavior_logprobs": [0.0] * 4}, "differ in length"),
        (
            {"version_spans": [{"start": 0, "end": 2, "version": 1}]},
            "0/0: version spans end at 2, response at 3",
        ),
        ({"version_spans": [{"start": 1, "end": 3, "version": 1}]}, "0/0: version spans do not tile"),
        ({"finish_reason": "tool_calls"}, "0/0: finish_reason 'tool_calls'"),
        ({"prompt_id": None}, "'prompt_id' holds nulls"),
        ({"response_ids": "abc"}, "do not fit"),
        ({"rewrad": 1.0}, r"unknown rollout columns \['rewrad'\]"),
    ],
)
def test_a_bad_row_is_refused_with_its_fault(over: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        rollouts.build([row(**over)])


def test_an_unknown_major_version_and_a_foreign_table_are_refused() -> None:
    table = rollouts.build([row()])
    newer = table.replace_schema_metadata({**table.schema.metadata, b"major": b"2"})
    with pytest.raises(SchemaError, match="rollout schema 2 is unknown; this version of headway reads 1"):
        rollouts.check_schema(newer.schema)
    with pytest.raises(SchemaError, match="not a rollout table"):
        rollouts.check_schema(pa.table({"a": [1]}).schema)


def test_a_stage_appends_its_column_and_changes_nothing_else() -> None:
    table = rollouts.build([row(behavior_logprobs=[-1, -2, -3]), row(behavior_logprobs=[-1, -2, -3])])
    scored = rollouts.replace_column(table, "reward", [1.0, None])
    assert scored.schema == rollouts.SCHEMA
    assert scored.column("reward").to_pylist() == [1.0, None]
    assert scored.drop_columns(["reward"]).equals(table.drop_columns(["reward"]))
    with pytest.raises(SchemaError, match="1 values of 'reward' for 2 rollouts"):
        rollouts.replace_column(table, "reward", [1.0])


def test_an_empty_response_list_and_a_slice_keep_their_types() -> None:
    table = rollouts.build(
        [
            row(response_ids=[], loss_mask=[], behavior_logprobs=[], version_spans=[]),
            row(behavior_logprobs=[-1, -2, -3]),
        ]
    )
    assert table.slice(1).column("response_ids").to_pylist() == [[3, 4, 5]]
    assert pa.concat_tables([table.slice(0, 1), table.slice(1)]).equals(table)
