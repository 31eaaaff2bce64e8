"""Limits of cores and memory: those of the job or the container, and not of the machine."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.launch import machine
from lm.runtime.rendezvous import choose_n_threads
from tests.support import REPOSITORY

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GIB = 2**30

Tree = Callable[..., None]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Make cgroups of this process: its line in /proc/self/cgroup, and files in /sys/fs/cgroup."""

    def make(membership: str, **files: str) -> None:
        (tmp_path / "membership").write_text(membership)
        for name, content in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    return make


SLURM = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"
JOB = "system.slice/slurmstepd.scope/job_7"


def test_host_memory_of_a_slurm_job_is_its_cgroups(tree: Tree) -> None:
    tree(SLURM, **{f"{JOB}/memory.max": f"{GIB}\n", f"{JOB}/step_0/memory.max": "max\n"})
    total, available = machine.host_memory()
    assert total == GIB
    assert available <= GIB


def test_host_memory_is_the_smallest_limit_on_the_path(tree: Tree) -> None:
    tree(SLURM, **{f"{JOB}/memory.max": f"{2 * GIB}\n", f"{JOB}/step_0/memory.max": f"{GIB}\n"})
    assert machine.host_memory()[0] == GIB


def test_host_memory_without_a_limit_is_the_machines(tree: Tree) -> None:
    tree("4:memory:/a\n0::/\n", **{"memory/a/memory.limit_in_bytes": "9223372036854771712\n"})
    assert machine.host_memory()[0] == MACHINE
    tree("0::/gone\n")
    assert machine.host_memory()[0] == MACHINE


def test_cgroup_limits_of_a_container(tree: Tree) -> None:
    files = {"memory/memory.limit_in_bytes": f"{GIB}\n", "cpu/cpu.cfs_quota_us": "150000\n"}
    tree(
        "4:memory:/docker/1f\n2:cpu,cpuacct:/docker/1f\n",
        **files,
        **{"cpu/cpu.cfs_period_us": "100000\n"},
    )
    assert machine.host_memory()[0] == GIB
    assert machine.cpu_quota() == 1.5
    assert machine.usable_cores() == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cpu.max", ""),
        ("cpu.max", "100000\n"),
        ("cpu.max", "-1 0\n"),
        ("cpu.cfs_quota_us", "100000\n"),  # without cpu.cfs_period_us
    ],
)
def test_cgroup_quota_of_an_unknown_format_is_none(name: str, text: str, tree: Tree) -> None:
    tree("0::/c\n2:cpu:/c\n", **{f"c/{name}": text, f"cpu/c/{name}": text})
    assert machine.cpu_quota() == math.inf


def test_cgroup_quota_of_a_mount_without_links(tree: Tree) -> None:
    files = {"c/cpu.cfs_quota_us": "200000\n", "c/cpu.cfs_period_us": "100000\n"}
    tree("2:cpu,cpuacct:/c\n", **{f"cpu,cpuacct/{name}": text for name, text in files.items()})
    assert machine.cpu_quota() == 2.0


@pytest.mark.parametrize(("limit", "quota"), [("max 100000\n", math.inf), ("400000 100000\n", 4.0)])
def test_cgroup_quota_of_a_pod(limit: str, quota: float, tree: Tree) -> None:
    tree("0::/kubepods/pod1/c\n", **{"kubepods/pod1/cpu.max": limit})
    assert machine.cpu_quota() == quota
    assert machine.usable_cores() == min(4, len(machine.cpu_affinity()))


@pytest.mark.parametrize(
    ("quota", "neighbors", "threads"),
    [(math.inf, 1, 8), (4.0, 1, 4), (4.0, 2, 2), (4.0, 8, 1), (math.inf, 2, 4), (0.5, 1, 1)],
)
def test_cores_of_a_rank_are_its_share_of_the_node(
    quota: float, neighbors: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.runtime.rendezvous.cpu_quota", lambda: quota)
    cores = set(range(8))
    assert choose_n_threads(cores, [cores] * neighbors) == threads


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_share_cores_keeps_the_users_choice(
    given: dict[str, str], spin_count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    machine.share_cores()
    assert os.environ.get("GOMP_SPINCOUNT") == spin_count
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)


REPORT = """
import os, sys
for directory in sys.argv[1:]:
    with open(f"{directory}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
from lm.launch import machine
print(machine.host_memory()[0], machine.cpu_quota(), machine.usable_cores())
"""


def test_cgroup_limits_of_a_real_cgroup() -> None:
    version2 = (machine.CGROUPS / "cgroup.controllers").exists()
    mounts = (
        [machine.CGROUPS] * 2
        if version2
        else [machine.CGROUPS / name for name in ("cpu", "memory")]
    )
    cpu, memory = (mount / f"lm-test-{os.getpid()}" for mount in mounts)
    limits = {cpu / "cpu.max": "50000 100000", memory / "memory.max": str(GIB)}
    if not version2:
        limits = {cpu / "cpu.cfs_quota_us": "50000", memory / "memory.limit_in_bytes": str(GIB)}
    try:
        for directory in {cpu, memory}:
            directory.mkdir()
        for file, limit in limits.items():
            file.write_text(limit)
    except OSError as error:
        pytest.skip(f"this user cannot make a cgroup with limits: {error}")
    else:
        command = [sys.executable, "-c", REPORT, *map(str, {cpu, memory})]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.stdout.split() == [str(GIB), "0.5", "1"], done.stderr
    finally:
        for directory in {cpu, memory}:
            if directory.exists():
                directory.rmdir()
