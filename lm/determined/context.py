"""Core API `DistributedContext` over torch.distributed."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from determined import core

from lm.launch.launch import Launch


class TorchDistributedContext(core.DistributedContext):
    """Core API `DistributedContext` whose collectives run on the process groups of the run, with their timeout.

    Determined's own contexts open a port on all interfaces, unpickle what they receive there, and
    have no timeout. The process groups are those of `lm.runtime.world.World`: `control` in the main
    thread, `saver` in the thread that writes checkpoints.
    """

    def __init__(
        self,
        launch: Launch,
        control: dist.ProcessGroup,
        saver: dist.ProcessGroup,
        node: dist.ProcessGroup,
    ) -> None:
        # With more than one rank, the parent's constructor opens ports.
        super().__init__(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
        self._control, self._saver, self._node = control, saver, node
        self.rank, self.size = launch.rank, launch.world_size
        self.local_rank, self.local_size = launch.local_rank, launch.local_size
        self.cross_rank, self.cross_size = launch.node_rank, launch.world_size // launch.local_size
        self._is_chief, self._is_local_chief = launch.rank == 0, launch.local_rank == 0

    def close(self) -> None:
        """Do nothing: `join_world` destroys the process groups."""

    # The collectives, which the base class documents.

    def allgather(self, stuff: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        is_main = threading.current_thread() is threading.main_thread()
        group = group or (self._control if is_main else self._saver)
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, stuff, group=group)
        return values

    def allgather_local(self, stuff: Any) -> list[Any]:
        return self.allgather(stuff, self._node)

    def gather(self, stuff: Any) -> list[Any] | None:
        values = self.allgather(stuff)
        return values if self._is_chief else None

    def gather_local(self, stuff: Any) -> list[Any] | None:
        values = self.allgather_local(stuff)
        return values if self._is_local_chief else None

    def broadcast(self, stuff: Any) -> Any:
        return self.allgather(stuff)[0]

    def broadcast_local(self, stuff: Any = None) -> Any:
        return self.allgather_local(stuff)[0]
