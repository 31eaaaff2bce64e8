"""Choose the device of a rank and join the process groups of the run."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lm.errors import ConfigError, RunError
from lm.launch.launch import Launch, is_thread_count_set
from lm.launch.machine import cpu_affinity, cpu_quota
from lm.runtime.failures import as_run_error, is_disconnection
from lm.runtime.world import World
from lm.units import format_count

NCCL_MARGIN = timedelta(seconds=60)
"""by which collectives of NCCL may take longer: when they exceed their timeout, PyTorch ends the
process without naming a rank, so the watchdog comes first"""


def choose_device(launch: Launch) -> torch.device:
    """Return the GPU of this rank, or the CPU on a machine without GPUs.

    Raises:
        ConfigError: a GPU was meant, and this rank has none.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not torch.cuda.is_available():
        if visible not in ("", "-1", "NoDevFiles"):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={visible}: PyTorch {torch.__version__} finds no GPU; check"
                " nvidia-smi and that this PyTorch is a CUDA build, or unset the variable to train"
                " on the CPU"
            )
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 1 and launch.launcher not in (None, "torchrun"):
        return torch.device("cuda", 0)  # srun and mpiexec can show each rank only its own GPU
    if launch.local_size > gpus:
        visible = format_count(gpus, "visible GPU")
        problem = f"{launch.local_size} ranks on a node with {visible}"
        raise ConfigError(f"{problem}; start at most {gpus} per node")
    return torch.device("cuda", launch.local_rank)


def join_world(launch: Launch, timeout: float, cpu_offload: bool = False) -> World:
    """Join the process groups of the run; the end of a `with` block of the World leaves them.

    Args:
        timeout: seconds of the rendezvous and of every collective.
        cpu_offload: on GPUs, also reduce tensors in host memory, with gloo.

    Raises:
        RunError: the rendezvous failed.
    """
    device = choose_device(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.is_on_one_node:
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    try:
        return _join(launch, device, timedelta(seconds=timeout), cpu_offload)
    except (RuntimeError, MemoryError, OSError) as error:
        if dist.is_initialized() and device.type == "cpu":
            dist.destroy_process_group()
        failure = as_run_error(error, launch.rank)
        if failure is None and is_disconnection(error):
            problem = f"rank {launch.rank}: lost the connection to another rank in the rendezvous"
            failure = RunError(f"{problem}; see the error of that rank", rank_local=True)
        if failure is None:
            raise
        raise failure from error


class _Placement(NamedTuple):
    """Where a rank runs."""

    node_rank: int
    cores: set[int]


def _join(launch: Launch, device: torch.device, timeout: timedelta, cpu_offload: bool) -> World:
    tensor_timeout = timeout
    if device.type == "cuda":
        tensor_timeout += NCCL_MARGIN
    store = _init_process_group(launch, device, timeout, tensor_timeout, cpu_offload)
    control: Any = dist.new_group(backend="gloo", timeout=timeout)
    saver: Any = dist.new_group(backend="gloo", timeout=timeout)

    cores = cpu_affinity()
    placements: list[Any] = [None] * launch.world_size
    dist.all_gather_object(placements, _Placement(launch.node_rank, cores), group=control)
    neighbors: list[int] = []
    for rank, placement in enumerate(placements):
        if placement.node_rank == launch.node_rank:
            neighbors.append(rank)
    # By the ranks of the node alone. In a call of all ranks, those of other nodes would split
    # NCCL's communicator once per node, for a group that is not NCCL's.
    node: Any = dist.new_group(neighbors, timeout, "gloo", use_local_synchronization=True)

    if not is_thread_count_set():
        cores_of_neighbors = [placements[rank].cores for rank in neighbors]
        torch.set_num_threads(choose_n_threads(cores, cores_of_neighbors))
    return World(launch, device, control, saver, node, store, tensor_timeout)


def choose_n_threads(cores: set[int], cores_of_neighbors: list[set[int]]) -> int:
    """Return the number of threads of a rank that may run on `cores`.

    A core is divided by the ranks that may run on it, and the node's quota of CPU time by all
    ranks.

    Args:
        cores_of_neighbors: cores of each rank of the node, this rank included.
    """
    share_of_cores = 0.0
    for core in cores:
        n_ranks = sum(core in others for others in cores_of_neighbors)
        share_of_cores += 1 / n_ranks
    share_of_quota = cpu_quota() / len(cores_of_neighbors)
    share = min(share_of_cores, share_of_quota)
    return max(1, int(share + 1e-6))  # as 1/3 + 1/3 + 1/3 can be just below 1


def _init_process_group(
    launch: Launch,
    device: torch.device,
    timeout: timedelta,
    tensor_timeout: timedelta,
    cpu_offload: bool,
) -> dist.Store:
    where = (
        f"rank {launch.rank} of {launch.world_size}, rendezvous at {launch.address}:{launch.port}"
    )
    if not launch.is_on_one_node:
        _require_resolvable(launch, where)
    if device.type == "cpu":
        backend = "gloo"
    elif cpu_offload:
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "nccl"
    try:
        store = _make_store(launch, timeout)
        dist.init_process_group(
            backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=tensor_timeout,
            # Groups of a mesh are then split from this one, which PyTorch 2.11 cannot do with two
            # backends.
            device_id=device if backend == "nccl" else None,
        )
        return store
    except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
        number = _error_number(error)
        if number == errno.EMFILE:
            raise  # `as_run_error` knows the remedy
        if number is not None:
            problem = os.strerror(number)
            if number == errno.EADDRINUSE:
                problem = "another process uses this port"
            raise RunError(
                f"{where}: {problem}; set a different MASTER_PORT", rank_local=True
            ) from None
        raise RunError(
            f"{where}: timed out after {timeout.total_seconds():g} s (collective_timeout) waiting"
            f" for all ranks; check that {launch.world_size} ranks (WORLD_SIZE) were started and"
            f" that this machine can reach {launch.address}",
            rank_local=True,
        ) from None
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise ConfigError(
            f"{where}: another rank uses the same GPU; start at most one rank per GPU, and make"
            " visible to each rank its own GPU (srun: --gpus-per-task=1) or all GPUs of the node"
            " (--gpus-per-node)",
            rank_local=True,
        ) from None


def _error_number(error: Exception) -> int | None:
    """Return the errno of an error of a socket; None for a timeout."""
    in_message = re.search(r"code: -(\d+), name: E", str(error))  # of a socket of PyTorch
    if in_message:
        return int(in_message[1])
    if isinstance(error, OSError):
        return error.errno
    return None


def _require_resolvable(launch: Launch, where: str) -> None:
    """Raise RunError if no address of rank 0's host is found in 5 seconds.

    PyTorch would look for it until the timeout.
    """
    for seconds_left in reversed(range(6)):
        try:
            socket.getaddrinfo(launch.address, launch.port)
            return
        except (OSError, UnicodeError) as error:
            if seconds_left == 0:
                raise RunError(
                    f"{where}: this machine cannot resolve {launch.address} ({error}); set"
                    " MASTER_ADDR to the name or address of rank 0's host"
                ) from None
        time.sleep(1)


def _make_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Return the key-value store of all ranks.

    It is reachable from other machines only if the run spans several.
    """
    if launch.world_size == 1:
        return dist.HashStore()  # opens no port
    assert launch.address is not None
    assert launch.port is not None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun has a store, which outlives its workers: each attempt uses other keys.
        agent_store = dist.TCPStore(launch.address, launch.port, launch.world_size, False, timeout)
        return dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", agent_store)
    is_host = launch.rank == 0
    if not launch.is_on_one_node:
        return dist.TCPStore(launch.address, launch.port, launch.world_size, is_host, timeout)
    address = "127.0.0.1"
    listener = None
    if is_host:  # by default, TCPStore listens on all interfaces
        listener = socket.create_server((address, launch.port)).detach()
    return dist.TCPStore(
        address, launch.port, launch.world_size, is_host, timeout, master_listen_fd=listener
    )
