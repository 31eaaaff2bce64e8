"""A rank's shard of a tensor: its rows, and where they are in the full tensor."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import DTensor


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of `tensor`, in the same memory."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    local = tensor.detach()
    # torchao wraps weights that are all-gathered in float8, and has no public name for what it
    # wraps.
    return getattr(local, "_tensor", local)


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of `tensor`, and which row of the full tensor is the first of them.

    FSDP divides the rows like `torch.chunk`: each rank but the last ones has ceil(rows / shards),
    which may be none.
    """
    local = to_local(tensor)
    if not isinstance(tensor, DTensor):
        return local, 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    n_rows = len(tensor)
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_shard():
            rows_per_shard = math.ceil(n_rows / tensor.device_mesh.size(mesh_dim))
            first_row = coordinate[mesh_dim] * rows_per_shard
            return local, min(first_row, n_rows)
    return local, 0
