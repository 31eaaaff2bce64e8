"""What this process may use of its machine, without PyTorch: cores, memory, GPUs, the allocator."""

from __future__ import annotations

import ctypes
import math
import os
import re
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")

SPIN_COUNT = 10_000
"""How often a waiting thread looks before it sleeps."""

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
"""Parameters of mallopt, as in malloc.h."""


def cpu_affinity() -> set[int]:
    """Return the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cpu_quota() -> float:
    """Return how many cores' time this process may use, e.g. by `docker run --cpus`; inf = all."""
    quota = math.inf
    for directory in _cgroup_directories("cpu"):
        quota = min(quota, _cpu_limit(directory))
    return quota


def _cpu_limit(cgroup: Path) -> float:
    """Return how many cores' time is allowed by the files of one cgroup; inf = no limit."""
    with suppress(OSError, ValueError):  # no such files, or of another format
        version2 = cgroup / "cpu.max"
        if version2.exists():
            microseconds, period = version2.read_text().split()
        else:
            microseconds = (cgroup / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu.cfs_period_us").read_text()
        # No limit is "max" in version 2, which is a ValueError, and -1 in version 1.
        if int(microseconds) > 0 and int(period) > 0:
            return int(microseconds) / int(period)
    return math.inf


def usable_cores() -> int:
    """Return how many cores this process can keep busy by its affinity and quota, at least 1."""
    cores = min(len(cpu_affinity()), cpu_quota())
    return max(1, int(cores))


class HostMemory(NamedTuple):
    """Memory of this machine, or of the job or the container that this process belongs to."""

    total: int
    """bytes"""
    available: int
    """bytes"""


def host_memory() -> HostMemory:
    """Return the memory that this process may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for directory in _cgroup_directories("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and of version 1
            limit = directory / name
            if limit.exists() and limit.read_text().strip().isdigit():
                total = min(total, int(limit.read_text()))
    available = total
    if MEMINFO.exists():
        found = re.search(r"MemAvailable: +(\d+) kB", MEMINFO.read_text())
        if found:
            available = min(total, int(found[1]) * 1024)
    return HostMemory(total, available)


def _cgroup_directories(controller: str) -> list[Path]:
    """Return the directories of this process's cgroup and its ancestors, whose limits all hold.

    A container that shows the host's path has its own cgroup at the root of the mount.
    """
    if not MEMBERSHIP.exists():
        return []
    directories = []
    for line in MEMBERSHIP.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:  # version 2 has one hierarchy for all controllers
            mount = CGROUPS
        elif controller in controllers.split(","):
            mount = CGROUPS / controller
            if not mount.exists():  # a link to that of several, in most systems
                mount = CGROUPS / controllers
        else:
            continue
        path = PurePosixPath(name)
        directories += [mount / cgroup.relative_to("/") for cgroup in (path, *path.parents)]
    return directories


def has_gpu() -> bool:
    """Return whether the machine has an NVIDIA or AMD GPU, or that of WSL 2."""
    devices = Path("/dev")
    nvidia, amd, wsl = "nvidia[0-9]*", "kfd", "dxg"
    return any(any(devices.glob(pattern)) for pattern in (nvidia, amd, wsl))


def share_cores() -> None:
    """Let OpenMP's threads sleep soon at a barrier, unless the user has chosen how they wait.

    By default they look at it 300,000 times, while the thread they wait for may need their core:
    with another process on the same cores, e.g. the next trial of a search, both are several times
    slower.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory for training on the CPU, to save page faults in every step."""
    if sys.platform != "linux" or has_gpu():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only in glibc
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)  # no large block is mapped, and so unmapped when it is freed
        mallopt(M_TRIM_THRESHOLD, -1)  # the heap is never returned to the system


def describe_this_process() -> str:
    """Return what names this process to others as the holder of a lock or a lease."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {now}"
