"""What errors of PyTorch and of the system mean for a run: which rank failed, and what to do."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lm.errors import ConfigError, RunError

_NO_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "Cuda failure 2 'out of memory'",
    "Failed to CUDA calloc",
)
"""parts of messages: of PyTorch in memory that is not pinned, and in pinned memory; of NCCL"""
_LESS_MEMORY = (
    "reduce memory with a smaller batch_size (total_batch_size can stay),"
    " activation_checkpointing: full, activation_offload: true, cpu_offload: true, more ranks with"
    " sharding: full-shard, or a smaller d_model or n_layers"
)
_DISCONNECTED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
)
"""parts of gloo's messages"""


def as_run_error(error: BaseException | None, rank: int) -> RunError | None:
    """Return the RunError that says what `error` means on `rank`; None if that is not known."""
    if not isinstance(error, (RuntimeError, MemoryError, OSError)):
        return None
    too_many_files = os.strerror(errno.EMFILE)
    if too_many_files.lower() in str(error).lower():
        remedy = "raise the limit of this shell: ulimit -n 65536"
        return RunError(f"rank {rank}: {too_many_files}; {remedy}", rank_local=True)
    if "Unable to find address for" in str(error):  # by gloo
        interface = os.environ.get("GLOO_SOCKET_IFNAME")  # on one machine set by `join_world`
        problem = f"GLOO_SOCKET_IFNAME={interface}: no network interface with an address here"
        remedy = f"use one that `ip address` lists, or: ip link set {interface} up"
        return ConfigError(f"rank {rank}: {problem}; {remedy}", rank_local=True)
    if "failed to map segment from shared object" in str(error):
        problem = f"nothing can be executed in {tempfile.gettempdir()} (noexec), where compile"
        remedy = "set TMPDIR to another directory, or compile=false"
        return ConfigError(f"rank {rank}: {problem} puts its code; {remedy}", rank_local=True)
    if isinstance(error, OSError):
        return RunError(f"rank {rank}: {error}; complete checkpoints are kept", rank_local=True)
    if is_out_of_memory(error):
        return _out_of_memory_error(error, rank)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the GPU's or the host's memory was too small."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return any(text in str(error) for text in _NO_MEMORY)


@contextmanager
def explaining_out_of_memory(
    rank: int, need: str | None = None, remedy: str = _LESS_MEMORY
) -> Iterator[None]:
    """Raise RunError if the block runs out of memory.

    Args:
        need: what the run needs; None = unknown.
        remedy: what needs less.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _out_of_memory_error(error, rank, need, remedy) from error


def _out_of_memory_error(
    error: BaseException, rank: int, need: str | None = None, remedy: str = _LESS_MEMORY
) -> RunError:
    first_line, _, _ = str(error).partition("\n")
    cause = first_line or type(error).__name__  # Python's own has no text
    if need is not None:
        cause = f"{cause}; {need}"
    return RunError(f"rank {rank}: out of memory ({cause}); {remedy}", rank_local=True)


def is_disconnection(error: BaseException | None) -> bool:
    """Return whether `error` says that gloo, or the store, lost another rank."""
    if isinstance(error, dist.DistNetworkError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return any(part in str(error) for part in _DISCONNECTED)
