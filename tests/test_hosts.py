"""Runs on two hosts: Linux namespaces with separate addresses, loopback interfaces and mounts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Message
from tests.support import ROOT, TINY, checkpoints, exact, run

RUN = TINY | {
    "dropout": 0.1,
    "lr": 1e-2,
    "total_batch_size": 4,
    "report_rate": 1,
    "validation_rate": 1000,
    "validation_batches": 1,
    "checkpoint_rate": 4,
    "amp_dtype": None,
    "collective_timeout": 10,
}


class Hosts:
    """Two namespaces, each kept by a process, connected by a pair of interfaces named `cable`."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        self.keepers = [subprocess.Popen(["unshare", "--net", "--mount", "sleep", "infinity"]) for _ in self.addresses]
        outside = Path("/proc/self/ns/net").readlink()
        for keeper in self.keepers:
            while Path(f"/proc/{keeper.pid}/ns/net").readlink() == outside:
                assert keeper.poll() is None
                time.sleep(0.01)
        first, second = (str(keeper.pid) for keeper in self.keepers)
        cable = ["ip", "link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second]
        subprocess.run(cable, check=True)
        for host, address in enumerate(self.addresses):
            self.on(host, "ip", "address", "add", f"{address}/24", "dev", "cable")
            self.on(host, "ip", "link", "set", "lo", "up")
            self.cable(host, "up")

    def inside(self, host: int, *command: str) -> list[str]:
        return ["nsenter", f"--target={self.keepers[host].pid}", "--net", "--mount", *command]

    def on(self, host: int, *command: str) -> None:
        subprocess.run(self.inside(host, *command), check=True)

    def cable(self, host: int, state: str) -> None:
        self.on(host, "ip", "link", "set", "cable", state)

    def start(self, host: int, folder: Path, *overrides: str, torchrun: bool = True) -> subprocess.Popen[str]:
        """Start `fsdp.py` with one rank per host, by torchrun or without a launcher."""
        folder.mkdir(exist_ok=True)
        (folder / "test.yaml").write_text(json.dumps({"hyperparameters": RUN}))
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "cable"}
        command = [sys.executable]
        if torchrun:
            command += ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}", "--nproc-per-node=1"]
            command += [f"--master-addr={self.addresses[0]}", "--master-port=29500"]
        else:
            env |= {"RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            env |= {"GROUP_RANK": str(host), "MASTER_ADDR": self.addresses[0], "MASTER_PORT": "29500"}
        return subprocess.Popen(
            # A working directory set outside of the namespace would be on the mounts outside.
            self.inside(
                host, "env", f"--chdir={folder}", *command, str(ROOT / "fsdp.py"), "--config", "test.yaml", *overrides
            ),
            env=os.environ | env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.kill()
            keeper.wait()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: util-linux, iproute2)")
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"cannot create namespaces: {tried.stderr.strip()}")
    two = Hosts()
    yield two
    two.close()


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait for all processes; return their exit codes, stdout and stderr."""
    results = []
    for process in processes:
        try:
            stdout, stderr = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        results.append((process.returncode, stdout, stderr))
    return results


@pytest.mark.slow
def test_a_disconnected_network_ends_both_hosts_and_the_run_resumes_when_restarted(
    hosts: Hosts, tmp_path: Path, message: Message
) -> None:
    both = [hosts.start(host, tmp_path, "max_steps=100000") for host in (0, 1)]
    assert both[0].stdout is not None
    for line in both[0].stdout:
        if line.startswith("checkpoint"):
            break
    assert both[0].poll() is None, both[0].communicate()[1]
    hosts.cable(1, "down")
    for host, (code, _, stderr) in enumerate(finish(both)):
        assert code == 1
        line = next(line for line in stderr.splitlines() if line.startswith(f"rank {host} (last completed step "))
        assert f"rank {1 - host}" in line
        message(line, mask=r" \(last completed step \d+\)")
    step = max(checkpoints(tmp_path))
    assert step % 4 == 0

    hosts.cable(1, "up")
    results = finish([hosts.start(host, tmp_path, f"max_steps={step + 8}") for host in (0, 1)])
    assert [code for code, _, _ in results] == [0, 0], results[0][2]
    assert f"step {step}\n" in results[0][1]
    uninterrupted = run(tmp_path / "uninterrupted", f"max_steps={step + 8}", ranks=2, config=RUN)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    assert exact(tmp_path / "uninterrupted").items() <= exact(tmp_path).items()


@pytest.mark.slow
def test_hosts_without_a_shared_directory_are_refused(hosts: Hosts, tmp_path: Path, message: Message) -> None:
    (tmp_path / "runs").mkdir()
    hosts.on(1, "mount", "-t", "tmpfs", "none", str(tmp_path / "runs"))
    results = finish([hosts.start(host, tmp_path, torchrun=False) for host in (0, 1)])
    assert [code for code, _, _ in results] == [2, 2]
    assert "training" not in results[0][1]
    message(results[0][2].splitlines()[-1], mask=r"process .* since [-\d]+ [:\d]+|(?<=but )\S+")


@pytest.mark.slow
def test_a_host_that_sees_older_checkpoints_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    first = run(tmp_path, "max_steps=8", ranks=2, config=RUN)
    assert first.returncode == 0, first.stderr
    saved = checkpoints(tmp_path)
    assert sorted(saved) == [4, 8]
    seen = tmp_path / "runs" / "test" / "checkpoints"
    shutil.copytree(saved[4], tmp_path / "stale" / saved[4].name)
    hosts.on(1, "mount", "--bind", str(tmp_path / "stale"), str(seen))
    try:
        results = finish([hosts.start(host, tmp_path, "max_steps=10", torchrun=False) for host in (0, 1)])
    finally:
        hosts.on(1, "umount", str(seen))
    assert [code for code, _, _ in results] == [2, 2]
    stderr = results[0][2]
    assert len(stderr.splitlines()) == 1
    assert stderr.startswith(f"{saved[8]}: ")
    assert "rank 1" in stderr
    assert "training" not in results[0][1]
    assert checkpoints(tmp_path) == saved
