"""Where tensors lie in the buckets, and that a digest tells one bit from another."""

from __future__ import annotations

from headway.core.weights import ALIGNMENT_BYTES, Manifest, digest, layout


def test_tensors_lie_aligned_and_never_across_buckets() -> None:
    entries, sizes = layout(
        [("a", "float32", (3,)), ("b", "bfloat16", (5, 2)), ("big", "float32", (100,)), ("c", "float32", ())],
        max_bucket_bytes=256,
    )
    assert [(e.name, e.bucket, e.offset, e.num_bytes) for e in entries] == [
        ("a", 0, 0, 12),
        ("b", 0, 64, 20),
        ("big", 1, 0, 400),  # larger than a bucket: one of its own
        ("c", 2, 0, 4),
    ]
    assert sizes == (128, 448, 64)
    assert all(size % ALIGNMENT_BYTES == 0 for size in sizes)
    assert Manifest(version=1, entries=entries, bucket_bytes=sizes).num_bytes == 640


def test_one_bit_changes_the_digest() -> None:
    data = bytearray(1000)
    before = digest(bytes(data))
    data[500] ^= 1
    assert digest(bytes(data)) != before
    assert len(before) == 32
