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


@torch.no_grad()
def export(model: PolicyModel, layout: Layout, version: int) -> tuple[Manifest, list[np.ndarray]]:
    """The current weights: a manifest and one new uint8 array per bucket, which nobody else holds."""
    buckets = [np.zeros(size, dtype=np.uint8) for size in layout.bucket_bytes]
    entries = []
    for entry in layout.entries:
        data = buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes]
        torch.from_numpy(data).view(DTYPES[entry.dtype]).copy_(model.masters[entry.name].flatten())
        entries.append(replace(entry, digest=weights.digest(data.data)))
    return Manifest(version=version, entries=tuple(entries), bucket_bytes=layout.bucket_bytes), buckets
