"""Join and leave the process groups of a run: device, rendezvous, and errors that name the rank and the remedy."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lm.errors import ConfigError, RunError
from lm.launch.launch import Launch, is_thread_count_set
from lm.launch.machine import cpu_affinity, cpu_quota
from lm.runtime.failures import as_run_error
from lm.runtime.world import World


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
    except (RuntimeError, OSError) as error:
        if dist.is_initialized() and device.type == "cpu":
            dist.destroy_process_group()
        failure = as_run_error(error, launch.rank)
        if failure is None:
            raise
        raise failure from error


def _join(launch: Launch, device: torch.device, timeout: timedelta, cpu_offload: bool) -> World:
    store = _init_process_group(launch, device, timeout, cpu_offload)
    control: Any = dist.new_group(backend="gloo", timeout=timeout)
    saver: Any = dist.new_group(backend="gloo", timeout=timeout)
    cores = cpu_affinity()
    ranks: list[Any] = [None] * launch.world_size
    dist.all_gather_object(ranks, (launch.node_rank, cores), group=control)
    ranks_of_node: dict[int, list[int]] = {}
    for rank, (node_rank, _) in enumerate(ranks):
        ranks_of_node.setdefault(node_rank, []).append(rank)
    node: Any
    node, _ = dist.new_subgroups_by_enumeration(
        list(ranks_of_node.values()), timeout=timeout, backend="gloo"
    )
    if not is_thread_count_set():
        cores_of_neighbors = [ranks[rank][1] for rank in ranks_of_node[launch.node_rank]]
        torch.set_num_threads(n_threads(cores, cores_of_neighbors))
    return World(launch, device, control, saver, node, store, timeout)


def n_threads(cores: set[int], neighbors: list[set[int]]) -> int:
    """Return the threads of a rank that may run on `cores`, given the cores of each rank of its node, its own included.

    A core is divided by the ranks that may run on it, and the node's quota of CPU time by all
    ranks.
    """
    share = sum(1 / sum(core in others for others in neighbors) for core in cores)
    share = min(share, cpu_quota() / len(neighbors))
    return max(1, int(share + 1e-6))


def _init_process_group(
    launch: Launch, device: torch.device, timeout: timedelta, cpu_offload: bool
) -> dist.Store:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl" if cpu_offload else "nccl"
    where = (
        f"rank {launch.rank} of {launch.world_size}, rendezvous at {launch.address}:{launch.port}"
    )
    if not launch.is_on_one_node:
        _require_resolvable(launch, where)
    try:
        store = _make_store(launch, timeout)
        dist.init_process_group(
            backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            # Groups of a mesh are then split from this one, which PyTorch 2.11 cannot do with two
            # backends.
            device_id=device if backend == "nccl" else None,
        )
        return store
    except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
        found = re.search(r"code: -(\d+), name: E", str(error))  # of a socket of PyTorch
        number = int(found[1]) if found else getattr(error, "errno", None)
        if number == errno.EMFILE:
            raise
        if number is not None:
            problem = (
                "another process uses this port"
                if number == errno.EADDRINUSE
                else os.strerror(number)
            )
            raise RunError(
                f"{where}: {problem}; set a different MASTER_PORT", rank_local=True
            ) from None
        raise RunError(
            f"{where}: timed out after {timeout.total_seconds():g} s (collective_timeout) waiting for all ranks; check"
            f" that {launch.world_size} ranks (WORLD_SIZE) were started and that this machine can reach"
            f" {launch.address}",
            rank_local=True,
        ) from None
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise ConfigError(
            f"{where}: another rank uses the same GPU; start at most one rank per GPU, and make visible to each rank"
            " its own GPU (srun: --gpus-per-task=1) or all GPUs of the node (--gpus-per-node)",
            rank_local=True,
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
                raise RunError(
                    f"{problem}; set MASTER_ADDR to the name or address of rank 0's host"
                ) from None
        time.sleep(1)


def _make_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Return the key-value store of all ranks; other machines can reach it only if the run spans several."""
    if launch.world_size == 1:
        return dist.HashStore()  # opens no port
    assert launch.address is not None
    assert launch.port is not None
    if (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):  # torchrun's store, which outlives its workers
        agent_store = dist.TCPStore(launch.address, launch.port, launch.world_size, False, timeout)
        return dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", agent_store)
    is_host = launch.rank == 0
    if not launch.is_on_one_node:
        return dist.TCPStore(launch.address, launch.port, launch.world_size, is_host, timeout)
    address = "127.0.0.1"
    # By default, TCPStore listens on all interfaces.
    listener = socket.create_server((address, launch.port)).detach() if is_host else None
    return dist.TCPStore(
        address, launch.port, launch.world_size, is_host, timeout, master_listen_fd=listener
    )
