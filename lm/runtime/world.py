"""The processes as one group: device, process group, device mesh, and Core API's view of them.

Two groups of processes are kept apart: the default one carries tensors (NCCL on GPUs, gloo on CPUs), and
`World.control`, always gloo, carries Python objects and decisions, so that neither ever waits in the
other's queue.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from lm.errors import ConfigError, RankError, RunError
from lm.launch.environment import Launch

T = TypeVar("T")


def choose_device(launch: Launch) -> torch.device:
    """The GPU of this rank, or the CPU where the machine has none.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names a GPU that PyTorch cannot use, or a node has more ranks than GPUs.
    """
    asked = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not torch.cuda.is_available():
        if asked not in ("", "-1", "NoDevFiles"):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={asked} asks for a GPU, but PyTorch {torch.__version__} sees none: check"
                " nvidia-smi and that this PyTorch is a CUDA build, or unset the variable to train on the CPU"
            )
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 1 and launch.launcher not in (None, "torchrun"):
        return torch.device("cuda", 0)  # srun and mpiexec may show each rank its own alone; NCCL refuses a shared one
    if launch.local_size > gpus:
        raise ConfigError(
            f"{launch.local_size} processes on a machine with {gpus} visible GPUs: start at most {gpus} per machine"
        )
    return torch.device("cuda", launch.local_rank)


@dataclass(frozen=True)
class World:
    """All processes of the run, as seen from one of them."""

    launch: Launch
    device: torch.device
    control: dist.ProcessGroup
    saver: dist.ProcessGroup
    """gloo group of all ranks for the thread that writes checkpoints"""
    node: dist.ProcessGroup
    """gloo group of the ranks on this machine"""
    store: dist.Store
    """key-value store that all ranks reach"""
    timeout: timedelta
    """longest wait for another rank in a collective"""

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def size(self) -> int:
        return self.launch.world_size

    def mesh(self, replicate: int, shard: int) -> DeviceMesh:
        """The ranks as `replicate` rows of `shard` neighbours, dimensions "replicate" and "shard"."""
        mesh = init_device_mesh(self.device.type, (replicate, shard), mesh_dim_names=("replicate", "shard"))
        for group in mesh.get_all_groups():  # those that it makes would wait for half an hour
            _set_pg_timeout(self.timeout, group)
        return mesh

    def all_gather_object(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Every rank's `value` (any picklable object), in order of rank, on every rank.

        Args:
            group: `saver` in the thread that writes checkpoints; by default `control`.
        """
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=group or self.control)
        return values

    def all_or_none(self, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        """Run `action` on every rank; where it fails on one, fail on all, with the lowest rank's error.

        Raises:
            RunError: what the lowest failing rank raised, if it was a RunError.
            Exception: `action`'s own exception here, or RuntimeError naming the rank that failed.
        """
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        known = failure if isinstance(failure, RunError) else None
        reports = self.all_gather_object(failure and (known, f"{type(failure).__name__}: {failure}"), group)
        for rank, report in enumerate(reports):
            if report is not None:
                if report[0] is not None:
                    raise report[0]
                raise failure or RuntimeError(f"rank {rank} failed: {report[1]}")
        return result  # type: ignore[return-value]  # no failure: action returned it

    def require_equal(self, what: str, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `facts`, if they are the same on every rank: machines may have files of their own.

        Raises:
            ConfigError: naming what differs, the first rank on which it does, and both values.
        """
        first, *rest = self.all_gather_object(facts)
        for rank, others in enumerate(rest, 1):
            problems = [
                f"{what}: {key} is {first.get(key)!r} on rank 0 and {others.get(key)!r} on rank {rank}; give all"
                " machines the same files and arguments"
                for key in first.keys() | others.keys()
                if first.get(key) != others.get(key)
            ]
            if problems:
                raise ConfigError(*sorted(problems))
        return facts

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone; every rank gets its result, or its error."""
        return self.all_gather_object(self.all_or_none(lambda: action() if self.rank == 0 else None))[0]  # type: ignore[return-value]


@contextmanager
def join_world(launch: Launch, timeout: float) -> Iterator[World]:
    """Meet the other processes, and part from them at the end.

    Args:
        timeout: seconds that a rank waits for another, here and in every later collective.

    Raises:
        ConfigError: from `choose_device`.
        RankError: the port is taken, not all ranks came in time, or, inside, the memory did not suffice.
    """
    device = choose_device(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.local_size == launch.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    patience = timedelta(seconds=timeout)
    where = f"rank {launch.rank} of {launch.world_size}, rendezvous at {launch.address}:{launch.port}"
    try:
        store = _store(launch, patience)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=None if store else f"tcp://{launch.address}:{launch.port}",
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=patience,
            device_id=device if device.type == "cuda" else None,
        )
    except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            raise RankError(f"{where}: the port is taken by another process; choose another MASTER_PORT") from None
        raise RankError(
            f"{where}: not all ranks came within {timeout:g} s (collective_timeout); check that WORLD_SIZE is what"
            f" was started and that this machine reaches {launch.address}"
        ) from None
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise ConfigError(
            f"{where}: another rank uses its GPU, too: start at most as many ranks as a machine has GPUs, and let each"
            " see its own (srun: --gpus-per-task=1) or all (--gpus-per-node)"
        ) from None
    whole = False
    try:
        control, saver = (_gloo_group(range(launch.world_size), patience) for _ in range(2))
        nodes: list[Any] = [None] * launch.world_size
        dist.all_gather_object(nodes, launch.node_rank, group=control)
        groups = {  # every rank has to make every group, in the same order
            node: _gloo_group([rank for rank, where in enumerate(nodes) if where == node], patience)
            for node in sorted(set(nodes))
        }
        yield World(launch, device, control, saver, groups[launch.node_rank], _get_default_store(), patience)
        whole = True
    except (RuntimeError, MemoryError) as error:
        signs = torch.OutOfMemoryError, MemoryError
        if not isinstance(error, signs) and "can't allocate memory" not in str(error):
            raise
        raise RankError(
            f"rank {launch.rank}: out of memory ({str(error).splitlines()[0]}); less is needed with a smaller"
            " batch_size (total_batch_size can stay), activation_checkpointing: full, activation_offload: true,"
            " cpu_offload: true, more ranks and sharding: full-shard, or a smaller d_model or n_layers"
        ) from error
    finally:
        if whole or device.type == "cpu":  # NCCL would wait for what a rank that is gone has left undone
            dist.destroy_process_group()


def _store(launch: Launch, timeout: timedelta) -> dist.Store | None:
    """Where the ranks of one machine find each other, out of reach of others; None = where the launcher says."""
    if launch.world_size == 1:
        return dist.HashStore()  # opens no port
    if launch.local_size < launch.world_size:
        return None
    assert launch.port is not None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's, which outlives its workers
        assert launch.address is not None
        agents = dist.TCPStore(launch.address, launch.port, launch.world_size, False, timeout)
        return dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", agents)
    address, is_first = "127.0.0.1", launch.rank == 0
    # Left to itself, TCPStore listens on all interfaces.
    listener = socket.create_server((address, launch.port)).detach() if is_first else None
    return dist.TCPStore(address, launch.port, launch.world_size, is_first, timeout, master_listen_fd=listener)


def _gloo_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(list(ranks), backend="gloo", timeout=timeout))
