"""Requests to an engine and what it samples: continuations of token prefixes, whole or handed back."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import pyarrow as pa

from headway.core.rollouts import SCHEMA

KEPT_SCHEMA = pa.schema(
    [
        ("label", pa.string()),  # which sample of its group
        ("prefix", pa.int64()),  # digest of the tokens before it
        ("ids", SCHEMA.field("response_ids").type),
        ("logprobs", SCHEMA.field("behavior_logprobs").type),
        ("version_spans", SCHEMA.field("version_spans").type),
        ("finish_reason", SCHEMA.field("finish_reason").type),  # abort: unfinished
        ("truncated", SCHEMA.field("truncated").type),
    ]
)
"""What an engine has of a group that it handed back, one row per sample that has tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One continuation of a token prefix."""

    name: str
    """Whose it is, in errors."""
    prefix_ids: Sequence[int]
    seed: int
    temperature: float
    """0: greedy; the reported log-probabilities are then those at temperature 1."""
    top_p: float
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One continuation of a token prefix, whole or up to where an engine handed it back."""

    ids: list[int]
    """The sampled tokens, the final end-of-sequence token included; never empty."""
    logprobs: list[float]
    """Nats per token, under the distribution that was sampled from; NaN where the engine gave none."""
    version_spans: list[dict[str, int]]
    """`start`, `end` (half-open, tokens) and `version` of the weights that sampled them."""
    finish_reason: str
    """`stop` | `length`; `abort`: unfinished."""
    truncated: bool
    """The token budget ended it, not an end-of-sequence token."""
    prefix: int = 0
    """Digest of the tokens before it (`digest`), once it is kept."""

    @property
    def finished(self) -> bool:
        return self.finish_reason != "abort"

    def then(self, rest: Sample) -> Sample:
        """This unfinished sample and its continuation as one."""
        spans = [dict(span) for span in self.version_spans]
        append_spans(spans, rest.version_spans, shift=len(self.ids))
        return replace(
            rest, ids=[*self.ids, *rest.ids], logprobs=[*self.logprobs, *rest.logprobs], version_spans=spans
        )


def append_spans(spans: list[dict[str, int]], more: Sequence[Mapping[str, int]], *, shift: int) -> None:
    """Adds the version spans of what was sampled after `shift` tokens, those of one version merged."""
    for span in more:
        if spans and spans[-1]["version"] == span["version"]:
            spans[-1]["end"] = span["end"] + shift
        else:
            spans.append({**span, "start": span["start"] + shift, "end": span["end"] + shift})


def kept_table(samples: Mapping[str, Sample]) -> pa.Table:
    """Samples by label, as a table that travels (`KEPT_SCHEMA`)."""
    return pa.Table.from_pylist(
        [{"label": label, **asdict(sample)} for label, sample in samples.items()], schema=KEPT_SCHEMA
    )


def kept_samples(table: pa.Table) -> dict[str, Sample]:
    """The samples of `kept_table`; log-probabilities as float32 holds them."""
    return {row.pop("label"): Sample(**row) for row in table.to_pylist()}


def digest(ids: Sequence[int]) -> int:
    """Of tokens, 63 bits."""
    hashed = hashlib.blake2b(array("i", ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(hashed) >> 1
