"""The Arrow schema of a rollout table: one row per sampled response, one table per prompt group.

Every stage appends its own columns (`replace_column`); nothing else changes a table. The columns that
later stages fill are there from the start, null, so that a table has one schema all its life.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headway.core.errors import SchemaError

SCHEMA_ID = "headway.rollout"
SCHEMA_MAJOR = 1
FINISH_REASONS = ("stop", "length", "abort")

_SPAN = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.int64())])
_PART = pa.struct([("name", pa.string()), ("value", pa.float32())])
_TIMING = pa.struct([("started", pa.float64()), ("finished", pa.float64()), ("scored", pa.float64())])

SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("group_id", pa.int64()),
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),
        ("agent_id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),  # exactly the sampled tokens, the final EOS included
        ("loss_mask", pa.list_(pa.uint8())),  # [T] 1 on tokens that the policy sampled
        ("behavior_logprobs", pa.list_(pa.float32())),  # [T] nats, from the engine; NaN where it gave none
        ("version_spans", pa.list_(_SPAN)),  # half-open token ranges that cover [0, T)
        ("finish_reason", pa.string()),
        ("truncated", pa.bool_()),  # the token budget ended the response, not an end-of-sequence token
        ("text", pa.large_string()),
        ("reward", pa.float32()),  # null: unscored
        ("reward_parts", pa.list_(_PART)),
        ("verdict_reason", pa.string()),
        ("step_ends", pa.list_(pa.int32())),
        ("reference_logprobs", pa.list_(pa.float32())),
        ("proximal_logprobs", pa.list_(pa.float32())),
        ("values", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("timing", _TIMING),  # seconds since the epoch
        ("extra", pa.large_string()),  # JSON
    ],
    metadata={b"schema": SCHEMA_ID.encode(), b"major": str(SCHEMA_MAJOR).encode()},
)
"""Lists use 32-bit offsets: a table holds one group, and batches stay chunked (never `combine_chunks`), so
no single list buffer nears 2**31 elements. Text, which a person may concatenate, uses 64-bit offsets."""

REQUIRED = (
    "rollout_id",
    "group_id",
    "prompt_id",
    "sample_index",
    "prompt_ids",
    "response_ids",
    "loss_mask",
    "behavior_logprobs",
    "version_spans",
    "finish_reason",
    "truncated",
    "text",
)


def build(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """A validated table from one mapping per response; absent columns are null. Raises `SchemaError`."""
    rows = list(rows)
    for row in rows:
        if unknown := row.keys() - set(SCHEMA.names):
            raise SchemaError(f"unknown rollout columns {sorted(unknown)}")
    try:
        arrays = [pa.array([row.get(field.name) for row in rows], type=field.type) for field in SCHEMA]
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise SchemaError(f"rollout rows do not fit schema {SCHEMA_MAJOR}: {error}") from error
    table = pa.Table.from_arrays(arrays, schema=SCHEMA)
    validate(table)
    return table


def validate(table: pa.Table) -> None:
    """Checks schema, lengths and version spans of every row. Raises `SchemaError` naming the rollout."""
    check_schema(table.schema)
    for name in REQUIRED:
        if table.column(name).null_count:
            raise SchemaError(f"column {name!r} holds nulls")
    for name in ("prompt_ids", "response_ids", "loss_mask", "version_spans"):
        if any(chunk.flatten().null_count for chunk in table.column(name).chunks):
            raise SchemaError(f"column {name!r} holds null elements")
    num_tokens = lengths(table, "response_ids")
    for name in ("loss_mask", "behavior_logprobs"):
        if lengths(table, name) != num_tokens:
            raise SchemaError(f"{name!r} and 'response_ids' differ in length")
    columns = table.select(["rollout_id", "version_spans", "finish_reason"]).to_pydict()
    for rollout_id, spans, reason, length in zip(*columns.values(), num_tokens, strict=True):
        if reason not in FINISH_REASONS:
            raise SchemaError(f"rollout {rollout_id}: finish_reason {reason!r} is not in {FINISH_REASONS}")
        position = 0
        for span in spans:
            if span["start"] != position or span["end"] <= position or span["version"] is None:
                raise SchemaError(f"rollout {rollout_id}: version spans do not tile [0, {length}): {spans}")
            position = span["end"]
        if position != length:
            raise SchemaError(f"rollout {rollout_id}: version spans end at {position}, response at {length}")


def check_schema(schema: pa.Schema) -> None:
    """Refuses tables that are no rollouts, or of a major version that this code does not know."""
    metadata = schema.metadata or {}
    if metadata.get(b"schema") != SCHEMA_ID.encode():
        raise SchemaError(f"not a rollout table: metadata schema={metadata.get(b'schema')!r}")
    if (major := int(metadata.get(b"major", b"0"))) != SCHEMA_MAJOR:
        raise SchemaError(f"rollout schema {major} is unknown; this version of headway reads {SCHEMA_MAJOR}")
    if not schema.equals(SCHEMA):
        different = [
            field.name
            for field in SCHEMA
            if field.name not in schema.names or schema.field(field.name) != field
        ]
        raise SchemaError(f"rollout columns missing or of another type: {different}")


def replace_column(table: pa.Table, name: str, values: Sequence[Any]) -> pa.Table:
    """The table with one column filled in: how a stage appends its result."""
    if len(values) != table.num_rows:
        raise SchemaError(f"{len(values)} values of {name!r} for {table.num_rows} rollouts")
    field = SCHEMA.field(name)
    return table.set_column(SCHEMA.get_field_index(name), field, pa.array(values, type=field.type))


def judged_text(text: str, extra: str | None) -> str:
    """What of a response is judged: of an episode what its agent said last (`answer` in `extra`), else all of it."""
    return json.loads(extra or "{}").get("answer", text)


def oldest_version(table: pa.Table) -> int:
    """Oldest weight version that sampled a token of this table."""
    return min(_versions(table))


def newest_version(table: pa.Table) -> int:
    """Newest weight version that sampled a token of this table."""
    return max(_versions(table))


def _versions(table: pa.Table) -> list[int]:
    versions = [span["version"] for spans in table.column("version_spans").to_pylist() for span in spans]
    if not versions:
        raise SchemaError("a table without sampled tokens has no version")
    return versions


def lengths(table: pa.Table, name: str) -> list[int]:
    """Number of elements of a list column in each row."""
    return [length for chunk in table.column(name).chunks for length in chunk.value_lengths().to_pylist()]


def write_parquet(table: pa.Table, path: Path) -> None:
    """Writes whole or not at all: to a temporary name, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(table, temporary, compression="zstd")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def can_hold(text: str) -> bool:
    """Whether a table can hold it: not with half of a surrogate pair, which Python and JSON can spell."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def read_parquet(path: Path) -> pa.Table:
    """Reads a saved batch. Raises `SchemaError` when it is of another schema."""
    table = pq.read_table(path)
    check_schema(table.schema)
    return table
