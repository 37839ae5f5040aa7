"""Weights on their way out: parameters cast to the published dtype, in flat buckets with a digest per tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from headway.core import weights
from headway.core.weights import Dtype, Manifest, TensorEntry
from headway.learner.model import DTYPES, PolicyModel


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor lies; the same for every version of a model."""

    entries: tuple[TensorEntry, ...]
    bucket_bytes: tuple[int, ...]


def layout_of(model: PolicyModel, dtype: Dtype, max_bucket_bytes: int) -> Layout:
    """All parameters under their checkpoint names; a tied output layer is its embedding and is left out."""
    tensors: list[tuple[str, Dtype, tuple[int, ...]]] = [
        (name, dtype, tuple(master.shape)) for name, master in model.masters.items()
    ]
    return Layout(*weights.layout(tensors, max_bucket_bytes=max_bucket_bytes))


def buffers(layout: Layout) -> list[np.ndarray]:
    """One uint8 array per bucket, for `export`."""
    return [np.zeros(size, dtype=np.uint8) for size in layout.bucket_bytes]


@torch.no_grad()
def export(
    model: PolicyModel, layout: Layout, version: int, into: list[np.ndarray] | None = None
) -> tuple[Manifest, list[np.ndarray]]:
    """The current weights: a manifest, and one uint8 array per bucket.

    The arrays are new, or those of `into`, overwritten: memory that is touched anew for every version costs more
    than the copy itself, so a caller whose earlier buckets nobody reads any more hands them in again.
    """
    buckets = buffers(layout) if into is None else into
    live = dict(model.network.named_parameters())
    entries = []
    for entry in layout.entries:
        data = buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes]
        # The network's own copy where it is of the published type already: the same rounding of the same masters.
        source = (
            live[entry.name] if live[entry.name].dtype == DTYPES[entry.dtype] else model.masters[entry.name]
        )
        torch.from_numpy(data).view(DTYPES[entry.dtype]).copy_(source.flatten())
        entries.append(replace(entry, digest=weights.digest(data.data)))
    return Manifest(version=version, entries=tuple(entries), bucket_bytes=layout.bucket_bytes), buckets
