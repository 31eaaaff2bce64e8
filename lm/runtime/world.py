"""All ranks of a run: device, process groups, device mesh and collectives of Python objects.

The default process group carries tensors (NCCL on GPUs, gloo on CPUs, both for `cpu_offload`).
`World.control`, always gloo, carries Python objects, so that neither waits in the other's queue.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lm.context import ContextGroup, new_context_group
from lm.errors import ConfigError, RunError
from lm.launch.launch import Launch
from lm.runtime.failures import as_run_error

P = ParamSpec("P")
T = TypeVar("T")

POLL_SECONDS = 1.0
"""Interval at which a rank that waits for its thread asks whether another rank failed."""

ANSWER_TIMEOUT = timedelta(seconds=5)
"""in which rank 0's store tells the other ranks that they may end"""


class Vote(NamedTuple):
    """Flags of which all ranks are finding out whether they hold on any rank."""

    held: Tensor
    """int32, of every flag"""
    work: dist.Work

    def wait(self) -> list[bool]:
        """Return which flags hold on any rank."""
        self.work.wait()
        return [bool(flag) for flag in self.held.tolist()]


class MeshShape(NamedTuple):
    """Sizes of a device mesh of all ranks, which are numbered replica by replica."""

    replicate: int
    """number of replicas"""
    shard: int
    """number of shards of each replica"""


def make_mesh(device_type: str, shape: MeshShape, timeout: timedelta | None = None) -> DeviceMesh:
    """Return a mesh of all ranks with the dimensions "replicate" and "shard".

    Without the first for a single replica: every rank would create a process group for it.

    Args:
        timeout: of the new process groups; None = PyTorch's default.
    """
    if shape.replicate == 1:
        everyone = dist.group.WORLD
        assert everyone is not None
        return DeviceMesh.from_group(everyone, device_type, mesh_dim_names=("shard",))
    ranks = torch.arange(shape.replicate * shape.shard).view(shape)
    groups: list[Any] = []
    for ranks_of_groups in (ranks.T, ranks):
        # `init_device_mesh` would set the default timeout of 30 minutes.
        group, _ = dist.new_subgroups_by_enumeration(ranks_of_groups.tolist(), timeout)
        groups.append(group)
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=shape._fields)


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
    rendezvous_store: dist.Store
    """key-value store of all ranks"""
    tensor_timeout: timedelta
    """of every collective of tensors"""

    def __enter__(self) -> World:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        """Leave the process groups.

        Raises:
            RunError: instead of an error that says nothing about the rank and a remedy.
        """
        try:
            failure = as_run_error(error, self.rank)
            if failure is not None:
                raise failure from error
        finally:
            # After a failure, NCCL would wait for collectives of lost ranks.
            if error is None or self.device.type == "cpu":
                dist.destroy_process_group()

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def size(self) -> int:
        return self.launch.world_size

    def device_mesh(self, shape: MeshShape) -> DeviceMesh:
        """Return the mesh of `shape`, with this world's timeout."""
        return make_mesh(self.device.type, shape, self.tensor_timeout)

    def context_group(self, size: int) -> ContextGroup:
        """Return the ranks that compute sequences together, `size` of them, as `device_mesh`."""
        return new_context_group(size, self.rank, self.size, self.tensor_timeout)

    def all_gather(self, values: Tensor) -> Tensor:
        """Return every rank's `values`, a tensor on the device, by rank: `(size, *shape)`."""
        gathered = values.new_zeros(self.size, *values.shape)
        gathered[self.rank] = values
        # An all-gather into one tensor has another name in PyTorch 2.11 than in 2.13.
        dist.all_reduce(gathered)
        return gathered

    def minimum(self, values: Tensor) -> Tensor:
        """Return the elementwise minimum of every rank's `values`, a tensor on the device."""
        smallest = values.clone()
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return smallest

    def broadcast(self, values: Tensor) -> None:
        """Fill every rank's `values`, a tensor on the device or the host, with those of rank 0."""
        dist.broadcast(values, 0)

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's `value`, any picklable object, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def all_gather_on_node(self, value: T) -> list[T]:
        """Return the `value` of every rank on this rank's node, any picklable object, by rank."""
        node_rank = self.launch.node_rank
        everyone = self.all_gather_object((node_rank, value))
        return [its_value for its_node, its_value in everyone if its_node == node_rank]

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A block that all ranks complete, or none: at its end, the ranks exchange their outcomes.

        If it fails on one rank, it fails on all, with the error of the lowest such rank.

        Raises:
            RunError: the lowest failing rank raised it.
            Exception: of the block on this rank, or a RuntimeError with the traceback of the rank
                that failed, which a launcher may stop before it prints that.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        outcome = None
        if failure is not None:
            shared = failure if isinstance(failure, RunError) else None  # others may not pickle
            outcome = shared, "".join(traceback.format_exception(failure))
        for rank, its_outcome in enumerate(self.all_gather_object(outcome)):
            if its_outcome is None:
                continue
            error, text = its_outcome
            if error is not None:
                error.rank_local = False  # from now on, all ranks know it
                raise error
            if failure is not None:
                raise failure
            raise RuntimeError(f"rank {rank} failed:\n{text}")

    def on_rank0(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` on rank 0 only; return its result, or raise its error, on every rank."""
        result: Any = None
        with self.all_or_none():
            if self.rank == 0:
                result = function(*args, **kwargs)
        return self.all_gather_object(result)[0]

    def start_any(self, *flags: bool) -> Vote:
        """Start to find out which of `flags` hold on any rank, while this rank computes on."""
        held = torch.tensor(flags, dtype=torch.int32)
        work = dist.all_reduce(held, dist.ReduceOp.MAX, group=self.control, async_op=True)
        return Vote(held, cast(dist.Work, work))

    def any_rank(self, flag: bool) -> bool:
        """Return on every rank whether `flag` holds on any rank."""
        (held,) = self.start_any(flag).wait()
        return held

    def wait_for(self, future: futures.Future[T]) -> T:
        """Return the result of this rank's `future` when those of all ranks are done.

        If one fails, it fails on all ranks.
        Unlike in one collective, ranks may wait longer than `timeout` for each other.
        """
        all_done = False
        while not all_done:
            futures.wait([future], POLL_SECONDS)
            done = future.done()
            with self.all_or_none():
                if done:
                    future.result()  # raises what the future raised
            all_done = all(self.all_gather_object(done))
        return future.result()

    def run_in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` on every rank like `all_or_none`; it may take longer than `timeout`."""
        return self._run_in_thread(True, function, *args, **kwargs)

    def run_in_thread_on_rank0(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Call `function` on rank 0, while the others wait; it may take longer than `timeout`.

        Returns:
            Its result on rank 0, None on others.
        """
        return self._run_in_thread(self.rank == 0, function, *args, **kwargs)

    def run_in_thread_on_each_node(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Call `function` on one rank of each node; it may take longer than `timeout`.

        Returns:
            Its result on that rank, None on others.
        """
        return self._run_in_thread(self.launch.local_rank == 0, function, *args, **kwargs)

    def _run_in_thread(
        self, here: bool, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        future: futures.Future[Any] = futures.Future()
        if here:
            # A daemon thread: if another rank fails, this one ends without waiting for its own.
            call = partial(function, *args, **kwargs)
            threading.Thread(target=_complete, args=(future, call), daemon=True).start()
        else:
            future.set_result(None)
        return self.wait_for(future)

    def for_saver(self) -> World:
        """Return the world for the thread that writes checkpoints, with another group."""
        return replace(self, control=self.saver)

    def wait_for_rank0(self) -> None:
        """Wait until rank 0 calls this, too, or has ended.

        It has then printed the error that ends all ranks. Launchers stop the other ranks when the
        first one has failed.
        """
        first, *others = [f"rank {rank} ends" for rank in range(self.size)]
        with suppress(RuntimeError):  # a rank has ended
            if self.rank == 0:
                self.rendezvous_store.set(first, "")
                # The store ends with this process.
                self.rendezvous_store.wait(others, ANSWER_TIMEOUT)
            else:
                self.rendezvous_store.wait([first])
                self.rendezvous_store.set(others[self.rank - 1], "")

    def require_equal(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raise ConfigError with both values of what differs if `facts` differ between ranks."""
        first, *rest = self.all_gather_object(facts)
        for rank, other in enumerate(rest, 1):
            problems = [
                f"{what}: {key} is {first.get(key)!r} on rank 0 but {other.get(key)!r} on rank"
                f" {rank}; start all ranks with the same files and arguments"
                for key in sorted(first.keys() | other.keys())
                if first.get(key) != other.get(key)
            ]
            if problems:
                raise ConfigError(*problems)


def _complete(future: futures.Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
