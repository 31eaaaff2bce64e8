"""Process groups, device, device mesh and collectives of Python objects.

The default process group carries tensors (NCCL on GPUs, gloo on CPUs, both for `cpu_offload`). `World.control`, always
gloo, carries Python objects, so that neither waits in the other's queue.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from lm.errors import ConfigError, RankError, RunError
from lm.launch.environment import Launch, threads_are_given

T = TypeVar("T")

POLL_SECONDS = 1.0
"""Interval at which a rank that waits for its thread asks whether another rank failed."""

DATA_PARALLEL = ("replicate", "shard")
"""mesh dimensions whose ranks train on different sequences"""

_MEMORY_KEYS = ("batch_size", "activation_checkpointing", "activation_offload", "cpu_offload")
_MEMORY_KEYS += ("sharding", "d_model", "n_layers")
_NO_HOST_MEMORY = ("can't allocate memory", "CUDA error: out of memory")
"""parts of PyTorch's messages: in memory that is not pinned, and in pinned memory"""


def choose_device(launch: Launch) -> torch.device:
    """Return the GPU of this rank, or the CPU on a machine without GPUs; raise ConfigError if its GPU is missing."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not torch.cuda.is_available():
        if visible not in ("", "-1", "NoDevFiles"):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={visible}: PyTorch {torch.__version__} finds no GPU; check nvidia-smi and that"
                " this PyTorch is a CUDA build, or unset the variable to train on the CPU"
            )
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 1 and launch.launcher not in (None, "torchrun"):
        return torch.device("cuda", 0)  # srun and mpiexec can show each rank only its own GPU
    if launch.local_size > gpus:
        problem = f"{launch.local_size} ranks on a node with {gpus} visible GPUs"
        raise ConfigError(f"{problem}; start at most {gpus} per node")
    return torch.device("cuda", launch.local_rank)


@dataclass(frozen=True)
class MeshLayout:
    """Position of a rank in a device mesh, in which ranks are numbered row by row.

    Data parallelism spans the dimensions "replicate" and "shard"; ranks that differ only in another one, e.g. "tensor",
    train on the same sequences.
    """

    dims: Mapping[str, int]
    """sizes of the named dimensions, outermost first"""
    rank: int

    @property
    def dp_size(self) -> int:
        """Number of ranks with different sequences."""
        return math.prod(size for name, size in self.dims.items() if name in DATA_PARALLEL)

    @property
    def dp_rank(self) -> int:
        """Index among the ranks with different sequences."""
        dp_rank, stride, outer = 0, 1, self.rank
        for name, size in reversed(list(self.dims.items())):
            outer, coordinate = divmod(outer, size)
            if name in DATA_PARALLEL:
                dp_rank += coordinate * stride
                stride *= size
        return dp_rank


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

    def device_mesh(self, dims: Mapping[str, int]) -> DeviceMesh:
        """Return a mesh of all ranks with the named dimensions `dims`, outermost first.

        It has no dimension "replicate" of size 1, for which every rank would create a process group.
        """
        dims = {name: size for name, size in dims.items() if (name, size) != ("replicate", 1)}
        mesh = init_device_mesh(self.device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        for group in mesh.get_all_groups():  # init_device_mesh sets PyTorch's default timeout of 30 minutes
            _set_timeout(self.timeout, group)
        return mesh

    def all_gather(self, values: Tensor) -> Tensor:
        """Return every rank's `values`, a tensor on the device, by rank: `(size, *shape)`."""
        gathered = values.new_zeros(self.size, *values.shape)
        gathered[self.rank] = values
        dist.all_reduce(gathered)  # an all-gather into one tensor has another name in PyTorch 2.11 than in 2.13
        return gathered

    def all_gather_object(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Return every rank's `value`, any picklable object, by rank; `group` is `saver` in a thread that saves."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=group or self.control)
        return values

    def all_or_none(self, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
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
        outcomes = self.all_gather_object(failure and (picklable, f"{type(failure).__name__}: {failure}"), group)
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                raise outcome[0] or failure or RuntimeError(f"rank {rank} failed: {outcome[1]}")
        return cast(T, result)

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 only; return its result, or raise its error, on every rank."""
        return cast(T, self.all_gather_object(self.all_or_none(lambda: action() if self.rank == 0 else None))[0])

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

    def require_equal(self, what: str, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `facts` if they are equal on all ranks, else raise ConfigError with both values of what differs."""
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
        return facts


@contextmanager
def join_world(launch: Launch, timeout: float, cpu_offload: bool = False) -> Iterator[World]:
    """Join the process groups of the run on entry and leave them on exit.

    Args:
        timeout: seconds of the rendezvous and of every collective.
        cpu_offload: on GPUs, also reduce tensors in host memory, with gloo.

    Raises:
        RankError: the rendezvous failed, or the body ran out of memory or could not use a file.
    """
    device = choose_device(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.local_size == launch.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    wait = timedelta(seconds=timeout)
    completed = False
    notes: list[Callable[[], str]] = []
    try:
        _init_process_group(launch, device, wait, cpu_offload)
        control, saver = (_gloo_group(range(launch.world_size), wait) for _ in range(2))
        nodes: list[Any] = [None] * launch.world_size
        dist.all_gather_object(nodes, launch.node_rank, group=control)
        groups = {  # new_group is a collective of all ranks, not only of the group's
            node: _gloo_group([rank for rank, its_node in enumerate(nodes) if its_node == node], wait)
            for node in sorted(set(nodes))
        }
        _set_threads(groups[launch.node_rank])
        yield World(launch, device, control, saver, groups[launch.node_rank], _get_default_store(), wait, notes)
        completed = True
    except (RuntimeError, MemoryError, OSError) as error:
        if (text := os.strerror(errno.EMFILE)) in str(error):
            raise RankError(f"rank {launch.rank}: {text}; raise the limit of this shell: ulimit -n 65536") from error
        if isinstance(error, OSError):
            raise RankError(f"rank {launch.rank}: {error}; the last checkpoint is kept") from error
        is_out = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not is_out and not any(text in str(error) for text in _NO_HOST_MEMORY):
            raise
        cause = str(error).splitlines()[0]
        with suppress(RuntimeError, MemoryError):  # where even that is too much
            cause = "; ".join([cause, *(note() for note in notes)])
        raise RankError(
            f"rank {launch.rank}: out of memory ({cause}); reduce memory with a smaller batch_size"
            " (total_batch_size can stay), activation_checkpointing: full, activation_offload: true, cpu_offload: true,"
            " more ranks with sharding: full-shard, or a smaller d_model or n_layers",
            keys=_MEMORY_KEYS,
        ) from error
    finally:
        # After a failure, NCCL would wait for collectives of lost ranks.
        if dist.is_initialized() and (completed or device.type == "cpu"):
            dist.destroy_process_group()


def _init_process_group(launch: Launch, device: torch.device, timeout: timedelta, cpu_offload: bool) -> None:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl" if cpu_offload else "nccl"
    where = f"rank {launch.rank} of {launch.world_size}, rendezvous at {launch.address}:{launch.port}"
    if launch.world_size > launch.local_size:
        _require_resolvable(launch, where)
    try:
        store = _local_store(launch, timeout)
        dist.init_process_group(
            backend,
            init_method=None if store else f"tcp://{launch.address}:{launch.port}",
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            # Groups of a mesh are then split from this one, which PyTorch 2.11 cannot do with two backends.
            device_id=device if backend == "nccl" else None,
        )
    except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            raise RankError(f"{where}: another process uses this port; set a different MASTER_PORT") from None
        raise RankError(
            f"{where}: timed out after {timeout.total_seconds():g} s (collective_timeout) waiting for all ranks; check"
            f" that {launch.world_size} ranks (WORLD_SIZE) were started and that this machine can reach"
            f" {launch.address}",
            keys=("collective_timeout",),
        ) from None
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise ConfigError(
            f"{where}: another rank uses the same GPU; start at most one rank per GPU, and make visible to each rank"
            " its own GPU (srun: --gpus-per-task=1) or all GPUs of the node (--gpus-per-node)"
        ) from None


def _require_resolvable(launch: Launch, where: str) -> None:
    """Raise RunError if no address of rank 0's host is found in 5 s; PyTorch would look for it until the timeout."""
    for seconds_left in reversed(range(6)):
        try:
            socket.getaddrinfo(launch.address, launch.port)
            return
        except (OSError, UnicodeError) as error:
            if not seconds_left:
                problem = f"{where}: this machine cannot resolve {launch.address} ({error})"
                raise RunError(f"{problem}; set MASTER_ADDR to the name or address of rank 0's host") from None
        time.sleep(1)


def _local_store(launch: Launch, timeout: timedelta) -> dist.Store | None:
    """Return a store that other machines cannot reach, or None if the run spans several machines."""
    if launch.world_size == 1:
        return dist.HashStore()  # opens no port
    if launch.local_size < launch.world_size:
        return None
    assert launch.port is not None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's store, which outlives its workers
        assert launch.address is not None
        agent_store = dist.TCPStore(launch.address, launch.port, launch.world_size, False, timeout)
        return dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", agent_store)
    address, is_host = "127.0.0.1", launch.rank == 0
    # By default, TCPStore listens on all interfaces.
    listener = socket.create_server((address, launch.port)).detach() if is_host else None
    return dist.TCPStore(address, launch.port, launch.world_size, is_host, timeout, master_listen_fd=listener)


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    if hasattr(dist, "set_timeout"):  # from PyTorch 2.14
        dist.set_timeout(timeout, group)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def _set_threads(node: dist.ProcessGroup) -> None:
    """Divide every core by the ranks of this node that may run on it."""
    if threads_are_given():
        return
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    ranks: list[Any] = [None] * dist.get_world_size(node)
    dist.all_gather_object(ranks, cores, group=node)
    share = sum(1 / sum(core in others for others in ranks) for core in cores)
    torch.set_num_threads(max(1, int(share + 1e-6)))


def _gloo_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(list(ranks), backend="gloo", timeout=timeout))
