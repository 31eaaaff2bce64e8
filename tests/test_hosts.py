"""Two hosts: namespaces of this machine, each with an address, a loopback and, where it matters, a disk of its own."""

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

from tests.support import EXACT, ROOT, TINY, checkpoints, reports, run

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
    """Two namespaces, alive as long as a process in each, joined by a cable whose ends are called `cable`."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        self.keepers = [subprocess.Popen(["unshare", "--net", "--mount", "sleep", "infinity"]) for _ in self.addresses]
        mine = Path("/proc/self/ns/net").readlink()
        for keeper in self.keepers:
            while Path(f"/proc/{keeper.pid}/ns/net").readlink() == mine:
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
        """`fsdp.py` with a rank per host, by torchrun or by hand."""
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
            # The working folder is chosen inside: one from outside would be on the outside's disk.
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
            pytest.skip(f"no {program} here (Debian: util-linux, iproute2)")
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    two = Hosts()
    yield two
    two.close()


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def test_a_cut_cable_ends_both_hosts_with_a_line_and_the_run_goes_on_when_it_is_started_again(
    hosts: Hosts, tmp_path: Path
) -> None:
    both = [hosts.start(host, tmp_path, "max_steps=100000") for host in (0, 1)]
    assert both[0].stdout is not None
    said = ""
    for line in both[0].stdout:
        said += line
        if line.startswith("checkpoint"):
            break
    assert both[0].poll() is None, said + both[0].communicate()[1]
    hosts.cable(1, "down")
    began = time.monotonic()
    seconds = {}
    for host, process in enumerate(both):
        _, errors = finish(process)
        seconds[host] = time.monotonic() - began
        other = 1 - host
        assert f"rank {host}, behind step " in errors
        assert f"waited 10 s (collective_timeout) for another: rank {other} does not answer" in errors
        assert process.returncode == 1
    print(f"from the cut to the end of torchrun: {seconds}")
    done = max(checkpoints(tmp_path))
    assert done % 4 == 0

    hosts.cable(1, "up")
    both = [hosts.start(host, tmp_path, f"max_steps={done + 8}") for host in (0, 1)]
    output, errors = finish(both[0])
    finish(both[1])
    assert [process.returncode for process in both] == [0, 0], errors
    assert f"step {done}\n" in output
    straight = run(tmp_path / "straight", f"max_steps={done + 8}", ranks=2, config=RUN)
    assert straight.returncode == 0, straight.stderr
    found, expected = reports(tmp_path), reports(tmp_path / "straight")
    for step, line in expected.items():
        assert {key: found[step][key] for key in EXACT} == {key: line[key] for key in EXACT}


def test_hosts_whose_disks_are_not_shared_are_refused(hosts: Hosts, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    hosts.on(1, "mount", "-t", "tmpfs", "none", str(runs))
    both = [hosts.start(host, tmp_path, torchrun=False) for host in (0, 1)]
    output, errors = finish(both[0])
    finish(both[1])
    assert [process.returncode for process in both] == [2, 2], errors
    line = errors.splitlines()[-1]
    assert line.startswith(f"{runs}/test: held by process ")
    assert " has another folder there, with no lock (No such file or directory); start from a folder that" in line
    assert "training" not in output


def test_a_host_that_sees_older_checkpoints_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    first = run(tmp_path, "max_steps=8", ranks=2, config=RUN)
    assert first.returncode == 0, first.stderr
    saved = checkpoints(tmp_path)
    assert sorted(saved) == [4, 8]
    seen = tmp_path / "runs" / "test" / "checkpoints"
    shutil.copytree(saved[4], tmp_path / "stale" / saved[4].name)
    hosts.on(1, "mount", "--bind", str(tmp_path / "stale"), str(seen))
    try:
        both = [hosts.start(host, tmp_path, "max_steps=10", torchrun=False) for host in (0, 1)]
        output, errors = finish(both[0])
        finish(both[1])
    finally:
        hosts.on(1, "umount", str(seen))
    assert [process.returncode for process in both] == [2, 2], errors
    assert errors == (
        f"{saved[8]}: this checkpoint is there for rank 0, and not for rank 1; it has to be in a folder that all"
        " machines share\n"
    )
    assert "training" not in output
    assert checkpoints(tmp_path) == saved
