"""Weights on their way out: trained parameters cast to the published dtype, in flat buckets with a digest per tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headway.core import weights
from headway.core.weights import Dtype, Manifest, TensorEntry
from headway.learner.model import DTYPES, PolicyModel
from headway.learner.sharding import whole


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor lies; the same for every version of a model."""

    entries: tuple[TensorEntry, ...]
    bucket_bytes: tuple[int, ...]


def layout_of(model: PolicyModel, dtype: Dtype, max_bucket_bytes: int) -> Layout:
    """All parameters under their checkpoint names; a tied output layer is its embedding and is left out. Of a model
    with an adapter only the adapter, in float32: it is small, and steps of it are smaller still."""
    if model.adapter_scale is not None:
        dtype = "float32"
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
    than the copy itself, so a caller whose earlier buckets nobody reads any more hands them in again. Of several ranks
    one calls this, and the others `contribute` at the same time.
    """
    buckets = buffers(layout) if into is None else into
    entries = []
    for entry in layout.entries:
        data = buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes]
        torch.from_numpy(data).view(DTYPES[entry.dtype]).copy_(_published(model, entry).flatten())
        entries.append(replace(entry, digest=weights.digest(data.data)))
    manifest = Manifest(
        version=version,
        entries=tuple(entries),
        bucket_bytes=layout.bucket_bytes,
        adapter_scale=model.adapter_scale,
    )
    return manifest, buckets


@torch.no_grad()
def contribute(model: PolicyModel, layout: Layout) -> None:
    """What every other rank does during one rank's `export`."""
    for entry in layout.entries:
        _published(model, entry)


def _published(model: PolicyModel, entry: TensorEntry) -> Tensor:
    """One whole tensor; its rounding comes before it is gathered. Where the network's own copy is of the published
    type already, it is the same rounding of the same master."""
    own = model.parameters[entry.name]
    dtype = DTYPES[entry.dtype]
    return whole((own if own.dtype == dtype else model.masters[entry.name]).detach().to(dtype))
