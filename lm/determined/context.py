"""Core API's `DistributedContext` over the run's process groups."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from determined import core

from lm.launch.environment import Launch


class TorchDistributedContext(core.DistributedContext):
    """Core API's `DistributedContext` over torch.distributed.

    The library's own opens a port on all interfaces, unpickles what it receives there and waits without a
    timeout. This one opens no port and fails after the process groups' timeout.

    Args:
        control: gloo group of all ranks.
        saver: gloo group of all ranks for the thread that writes checkpoints.
        node: gloo group of the ranks on this machine.
    """

    def __init__(
        self, launch: Launch, control: dist.ProcessGroup, saver: dist.ProcessGroup, node: dist.ProcessGroup
    ) -> None:
        # The parent's constructor opens ports for more than one rank.
        super().__init__(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
        self._control, self._saver, self._node = control, saver, node
        self.rank, self.size = launch.rank, launch.world_size
        self.local_rank, self.local_size = launch.local_rank, launch.local_size
        self.cross_rank, self.cross_size = launch.node_rank, launch.world_size // launch.local_size
        self._is_chief, self._is_local_chief = launch.rank == 0, launch.local_rank == 0
        self._thread = threading.local()

    def use_saver_group(self) -> None:
        """Run the calling thread's collectives on the saver group from now on."""
        self._thread.group = self._saver

    def close(self) -> None:
        """Do nothing: `join_world` owns the process groups."""

    def _allgather(self, stuff: Any, group: dist.ProcessGroup) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, stuff, group=group)
        return values

    def allgather(self, stuff: Any) -> list[Any]:
        """Return every rank's `stuff`, on every rank."""
        return self._allgather(stuff, getattr(self._thread, "group", self._control))

    def allgather_local(self, stuff: Any) -> list[Any]:
        """Return the `stuff` of every rank of this machine, on each of them."""
        return self._allgather(stuff, self._node)

    def gather(self, stuff: Any) -> list[Any] | None:
        """Return every rank's `stuff` on rank 0, None elsewhere."""
        values = self.allgather(stuff)
        return values if self._is_chief else None

    def gather_local(self, stuff: Any) -> list[Any] | None:
        """Return the `stuff` of this machine's ranks on its local rank 0, None elsewhere."""
        values = self.allgather_local(stuff)
        return values if self._is_local_chief else None

    def broadcast(self, stuff: Any) -> Any:
        """Return rank 0's `stuff`."""
        return self.allgather(stuff)[0]

    def broadcast_local(self, stuff: Any = None) -> Any:
        """Return the `stuff` of this machine's local rank 0."""
        return self.allgather_local(stuff)[0]
