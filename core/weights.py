"""Manifest of one published weight version: what the flat buckets hold and how to know that it arrived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import xxhash

Dtype = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    """Parameter name as in the model's checkpoint."""
    dtype: Dtype
    shape: tuple[int, ...]
    bucket: int
    """Index of the flat byte buffer that holds it."""
    offset: int
    """First byte inside the bucket, a multiple of `ALIGNMENT_BYTES`."""
    digest: str = ""
    """`digest()` of its bytes; empty in a layout that has no content yet."""

    @property
    def num_bytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One complete weight version."""

    version: int
    """Optimizer steps applied."""
    entries: tuple[TensorEntry, ...]
    bucket_bytes: tuple[int, ...]
    """Size of each bucket."""
    adapter_scale: float | None = None
    """None: the entries are the weights. Else they are a low-rank adapter: for a linear weight `NAME.weight` [out, in]
    of the model folder, `NAME.lora_A` [rank, in] and `NAME.lora_B` [out, rank], which stand for the weight plus
    adapter_scale * lora_B @ lora_A; everything else is as in the model folder."""

    @property
    def num_bytes(self) -> int:
        return sum(self.bucket_bytes)

    @property
    def digests(self) -> dict[str, str]:
        return {entry.name: entry.digest for entry in self.entries}


def digest(data: memoryview | bytes) -> str:
    """XXH3-128 of the raw bytes: detects corruption and mix-ups; it is no cryptographic signature."""
    return xxhash.xxh3_128_hexdigest(data)


def layout(
    tensors: list[tuple[str, Dtype, tuple[int, ...]]], *, max_bucket_bytes: int
) -> tuple[tuple[TensorEntry, ...], tuple[int, ...]]:
    """Assigns tensors to buckets in order. A tensor larger than a bucket gets a bucket of its own."""
    entries: list[TensorEntry] = []
    bucket_bytes: list[int] = [0]
    for name, dtype, shape in tensors:
        entry = TensorEntry(
            name=name, dtype=dtype, shape=shape, bucket=len(bucket_bytes) - 1, offset=bucket_bytes[-1]
        )
        if entry.offset and entry.offset + entry.num_bytes > max_bucket_bytes:
            bucket_bytes.append(0)
            entry = TensorEntry(name=name, dtype=dtype, shape=shape, bucket=len(bucket_bytes) - 1, offset=0)
        entries.append(entry)
        end = entry.offset + entry.num_bytes
        bucket_bytes[-1] = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(entries), tuple(bucket_bytes)
