"""Core API `DistributedContext` over torch.distributed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from determined import core

from lm.launch.launch import Launch


class TorchDistributedContext(core.DistributedContext):
    """Core API `DistributedContext` whose collectives run on the process groups of the run.

    They have the timeout of these groups. Determined's own contexts have none, open a port on all
    interfaces, and unpickle what they receive there.

    Args:
        group: gloo group of all ranks for Core API's checkpoint context, the only part of it that
            calls collectives here. No other thread than the one that saves uses it meanwhile.
        node: gloo group of the ranks on this node.
    """

    def __init__(self, launch: Launch, group: dist.ProcessGroup, node: dist.ProcessGroup) -> None:
        # With more than one rank, the parent's constructor opens ports.
        super().__init__(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
        self._group = group
        self._node = node
        self.rank = launch.rank
        self.size = launch.world_size
        self.local_rank = launch.local_rank
        self.local_size = launch.local_size
        self.cross_rank = launch.node_rank
        self.cross_size = launch.world_size // launch.local_size

    def close(self) -> None:
        """Do nothing: `join_world` destroys the process groups."""

    # The collectives, which the base class documents.

    def allgather(self, stuff: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, stuff, group=self._group)
        return values

    def allgather_local(self, stuff: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(self._node)
        dist.all_gather_object(values, stuff, group=self._node)
        return values

    def gather(self, stuff: Any) -> list[Any] | None:
        values = self.allgather(stuff)
        if self.rank != 0:
            return None
        return values

    def gather_local(self, stuff: Any) -> list[Any] | None:
        values = self.allgather_local(stuff)
        if self.local_rank != 0:
            return None
        return values

    def broadcast(self, stuff: Any) -> Any:
        return self.allgather(stuff)[0]

    def broadcast_local(self, stuff: Any = None) -> Any:
        return self.allgather_local(stuff)[0]
