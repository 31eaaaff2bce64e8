"""A rank's shard of a tensor: its rows, and where they are in the full tensor."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of `tensor`, in the same memory."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    local = tensor
    if local.requires_grad:
        local = local.detach()
    # torchao wraps weights that are all-gathered in float8, and has no public name for what it
    # wraps.
    return getattr(local, "_tensor", local)


def shard_group(tensor: Tensor) -> ProcessGroup | None:
    """Return the ranks that have the other rows of `tensor`; None = this rank has all."""
    if isinstance(tensor, DTensor):
        for mesh_dim, placement in enumerate(tensor.placements):
            if placement.is_shard() and tensor.device_mesh.size(mesh_dim) > 1:
                return tensor.device_mesh.get_group(mesh_dim)
    return None


class Rows(NamedTuple):
    """Consecutive rows of a tensor in memory; a scalar is one row."""

    values: Tensor
    start: int
    """row of the full tensor that is the first one here"""


def local_rows(tensor: Tensor) -> Rows:
    """Return this rank's rows of `tensor`, in the same memory."""
    local = to_local(tensor)
    if not isinstance(tensor, DTensor):
        return Rows(local, 0)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_shard():
            n_shards = tensor.device_mesh.size(mesh_dim)
            return Rows(local, rows_of_shard(len(tensor), n_shards, coordinate[mesh_dim]).start)
    return Rows(local, 0)


def rows_of_shard(n_rows: int, n_shards: int, shard: int) -> range:
    """Return which of `n_rows` rows are in a shard.

    FSDP divides the rows like `torch.chunk`: each shard but the last ones has ceil(rows / shards);
    the last ones may have none.
    """
    rows_per_shard = math.ceil(n_rows / n_shards)
    start = min(shard * rows_per_shard, n_rows)
    end = min(start + rows_per_shard, n_rows)
    return range(start, end)
