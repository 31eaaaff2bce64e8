"""What this process may use of its machine, as far as is known without PyTorch: cores, memory, GPUs, the allocator."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")

SPIN_COUNT = 10_000
"""how often a waiting thread looks before it sleeps"""

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def affinity() -> set[int]:
    """Return the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cpu_quota() -> float:
    """Return how many cores' time the cgroups of this process allow, e.g. of `docker run --cpus`; inf = no limit."""
    quota = math.inf
    for directory in _cgroup_directories("cpu"):
        version2 = directory / "cpu.max"
        version1 = directory / "cpu.cfs_quota_us"
        if version2.exists():
            allowed, period = version2.read_text().split()
        elif version1.exists():
            allowed = version1.read_text().strip()
            period = (directory / "cpu.cfs_period_us").read_text()
        else:
            continue
        if allowed.isdigit():  # no limit is "max" in version 2 and -1 in version 1
            quota = min(quota, int(allowed) / int(period))
    return quota


def usable_cores() -> int:
    """Return the number of cores that this process can keep busy: those of its affinity or its quota, at least 1."""
    return max(1, int(min(len(affinity()), cpu_quota())))


def host_memory() -> tuple[int, int]:
    """Return the bytes of memory of this machine, or of its job or container, and how many of them are available."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for directory in _cgroup_directories("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and of version 1
            limit = directory / name
            if limit.exists() and limit.read_text().strip().isdigit():
                total = min(total, int(limit.read_text()))
    if MEMINFO.exists():
        found = re.search(r"MemAvailable: +(\d+) kB", MEMINFO.read_text())
        if found:
            return total, min(total, int(found[1]) * 1024)
    return total, total


def _cgroup_directories(controller: str) -> list[Path]:
    """Return the directories of this process's cgroup and of its ancestors, all of whose limits hold.

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
        else:
            continue
        path = PurePosixPath(name)
        directories += [mount / part.relative_to("/") for part in (path, *path.parents)]
    return directories


def has_gpu() -> bool:
    """Return whether the machine has an NVIDIA or AMD GPU, or that of WSL 2."""
    return any(
        path for device in ("nvidia[0-9]*", "kfd", "dxg") for path in Path("/dev").glob(device)
    )


def share_cores() -> None:
    """Let OpenMP's threads sleep soon at a barrier, unless the user has chosen how they wait.

    By default they look at it 300,000 times, while the thread they wait for may need their core:
    with another process on the same cores, e.g. the next trial of a search, both are several times
    slower.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory if training runs on the CPU, to save page faults in every step."""
    if sys.platform != "linux" or has_gpu():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only in glibc
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
