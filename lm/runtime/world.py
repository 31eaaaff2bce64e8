"""All ranks of a run: device, process groups, device mesh and collectives of Python objects.

The default process group carries tensors (NCCL on GPUs, gloo on CPUs, both for `cpu_offload`).
`World.control`, always gloo, carries Python objects, so that neither waits in the other's queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lm.errors import ConfigError, RunError
from lm.launch.launch import Launch

T = TypeVar("T")

POLL_SECONDS = 1.0
"""Interval at which a rank that waits for its thread asks whether another rank failed."""


class MeshShape(NamedTuple):
    """Sizes of a device mesh of all ranks: `replicate` replicas of `shard` shards each, numbered replica by replica."""

    replicate: int
    shard: int


@dataclass(frozen=True)
class World:
    """All ranks of the run, as seen from one of them."""

    launch: Launch
    device: torch.device
    control: dist.ProcessGroup
    """gloo group of all ranks"""
    saver: dist.ProcessGroup
    """gloo group of all ranks for the thread that writes checkpoints"""
    node: dist.ProcessGroup
    """gloo group of the ranks on this node"""
    store: dist.Store
    """key-value store of all ranks"""
    timeout: timedelta
    """of every collective"""
    memory_notes: list[Callable[[], str]] = field(default_factory=list)
    """return what an out-of-memory error says about the run's need"""

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def size(self) -> int:
        return self.launch.world_size

    def device_mesh(self, shape: MeshShape) -> DeviceMesh:
        """Return a mesh of all ranks with the dimension "shard" and, if there are several replicas, "replicate".

        Every rank would create a process group for a dimension "replicate" of size 1.
        """
        sizes: tuple[int, ...] = shape
        names: tuple[str, ...] = shape._fields
        if shape.replicate == 1:
            sizes, names = sizes[1:], names[1:]
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        for (
            group
        ) in mesh.get_all_groups():  # init_device_mesh sets PyTorch's default timeout of 30 minutes
            _set_timeout(self.timeout, group)
        return mesh

    def all_gather(self, values: Tensor) -> Tensor:
        """Return every rank's `values`, a tensor on the device, by rank: `(size, *shape)`."""
        gathered = values.new_zeros(self.size, *values.shape)
        gathered[self.rank] = values
        dist.all_reduce(
            gathered
        )  # an all-gather into one tensor has another name in PyTorch 2.11 than in 2.13
        return gathered

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's `value`, any picklable object, by rank; in the thread that saves, by its own group."""
        is_main = threading.current_thread() is threading.main_thread()
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control if is_main else self.saver)
        return values

    def all_or_none(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if it fails on one rank, fail on all, with the error of the lowest such rank.

        Raises:
            RunError: the lowest failing rank raised it.
            Exception: of `action` on this rank, or a RuntimeError that names the rank that failed.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        picklable = failure if isinstance(failure, RunError) else None
        outcomes = self.all_gather_object(
            failure and (picklable, f"{type(failure).__name__}: {failure}")
        )
        for rank, outcome in enumerate(outcomes):
            if outcome is None:
                continue
            error, text = outcome
            if error is None:
                raise failure or RuntimeError(f"rank {rank} failed: {text}")
            error.rank_local = False  # from now on, all ranks know it
            raise error
        return cast(T, result)

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 only; return its result, or raise its error, on every rank."""
        return cast(
            T,
            self.all_gather_object(self.all_or_none(lambda: action() if self.rank == 0 else None))[
                0
            ],
        )

    def wait_for(self, future: futures.Future[T]) -> T:
        """Return the result of this rank's `future` when those of all ranks are done; if one fails, fail on all.

        Unlike in one collective, ranks may wait longer than `timeout` for each other.
        """

        def poll() -> bool:
            futures.wait([future], POLL_SECONDS)
            if future.done():
                future.result()
            return future.done()

        while not all(self.all_gather_object(self.all_or_none(poll))):
            pass
        return future.result()

    def run_in_thread(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank like `all_or_none`; it may take longer than `timeout`."""
        with futures.ThreadPoolExecutor(1) as pool:
            return self.wait_for(pool.submit(action))

    def require_equal(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raise ConfigError with both values of what differs, unless `facts` are equal on all ranks."""
        first, *rest = self.all_gather_object(facts)
        for rank, other in enumerate(rest, 1):
            problems = [
                f"{what}: {key} is {first.get(key)!r} on rank 0 but {other.get(key)!r} on rank {rank}; start all ranks"
                " with the same files and arguments"
                for key in sorted(first.keys() | other.keys())
                if first.get(key) != other.get(key)
            ]
            if problems:
                raise ConfigError(*problems)


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    if hasattr(
        dist, "set_timeout"
    ):  # from PyTorch 2.14; the other branch waits for that to be the oldest one
        dist.set_timeout(timeout, group)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
