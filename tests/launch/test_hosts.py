"""Runs on two hosts end together, resume exactly, and refuse directories that are not shared.

Hosts are Linux namespaces with separate addresses, loopback interfaces and mounts.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support import PATIENCE, REPOSITORY
from tests.support.forked import start_program
from tests.support.hyperparameters import TINY
from tests.support.launch_files import read_documents
from tests.support.runs import checkpoints_by_step, read_exact_metrics, read_reports, run_fsdp

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


def enter_host(keeper: int, folder: Path) -> None:
    """Move this process into the namespaces of another one, and to `folder` there."""
    libc = ctypes.CDLL(None, use_errno=True)
    for namespace in ("net", "mnt"):
        with Path(f"/proc/{keeper}/ns/{namespace}").open() as file:
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {namespace}")
    os.chdir(folder)


class Hosts:
    """Two namespaces, each kept by a process, connected by a pair of interfaces named `cable`."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        self.keepers = [
            subprocess.Popen(["unshare", "--net", "--mount", "sleep", "infinity"])
            for _ in self.addresses
        ]
        outside = Path("/proc/self/ns/net").readlink()
        for keeper in self.keepers:
            while Path(f"/proc/{keeper.pid}/ns/net").readlink() == outside:
                assert keeper.poll() is None
                time.sleep(0.01)
        first, second = (str(keeper.pid) for keeper in self.keepers)
        cable = [
            "ip",
            "link",
            "add",
            "cable",
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            second,
        ]
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

    def start(
        self, host: int, folder: Path, *overrides: str, torchrun: bool = True
    ) -> subprocess.Popen[str]:
        """Start `fsdp.py` with one rank per host, by torchrun or without a launcher."""
        folder.mkdir(exist_ok=True)
        (folder / "test.yaml").write_text(json.dumps({"hyperparameters": RUN}))
        env = {
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": "cable",
        }
        command = [sys.executable]
        if torchrun:
            command += [
                "-m",
                "torch.distributed.run",
                "--nnodes=2",
                f"--node-rank={host}",
                "--nproc-per-node=1",
            ]
            command += [f"--master-addr={self.addresses[0]}", "--master-port=29500"]
        else:
            env |= {
                "RANK": str(host),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
            }
            env |= {
                "GROUP_RANK": str(host),
                "MASTER_ADDR": self.addresses[0],
                "MASTER_PORT": "29500",
            }
        return self.run(
            host,
            folder,
            [*command, str(REPOSITORY / "fsdp.py"), "--config", "test.yaml", *overrides],
            env,
        )

    def run(
        self, host: int, folder: Path, command: list[str], env: dict[str, str]
    ) -> subprocess.Popen[str]:
        """Start a command in `folder`."""
        outside = {
            name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"
        }  # of other tests
        pipe = subprocess.PIPE
        enter = partial(enter_host, self.keepers[host].pid, folder)
        return start_program(command, outside | env, preexec_fn=enter, stdout=pipe, stderr=pipe)

    def names(self, folder: Path, first: str) -> None:
        """Make `first` the name of the first host; each host resolves its name as a pod does."""
        for host, address in enumerate(self.addresses):
            (folder / f"hosts{host}").write_text(
                f"{self.addresses[0]} {first}\n{address} {os.uname().nodename}\n"
            )
            self.on(host, "mount", "--bind", str(folder / f"hosts{host}"), "/etc/hosts")

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.kill()
            keeper.wait()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: util-linux, iproute2)")
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False
    )
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
            stdout, stderr = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        results.append((process.returncode, stdout, stderr))
    return results


@pytest.mark.slow
def test_disconnected_network_ends_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    both = [hosts.start(host, tmp_path, "max_steps=100000") for host in (0, 1)]
    assert both[0].stdout is not None
    for line in both[0].stdout:
        if line.startswith("checkpoint"):
            break
    assert both[0].poll() is None, both[0].communicate()[1]
    hosts.cable(1, "down")
    for host, (code, _, stderr) in enumerate(finish(both)):
        assert code == 1
        line = next(
            line
            for line in stderr.splitlines()
            if line.startswith(f"rank {host} (last completed step ")
        )
        assert re.search(rf"timed out after 10 s .*waiting for rank {1 - host}\b", line)
    step = max(checkpoints_by_step(tmp_path))
    assert step % 4 == 0

    hosts.cable(1, "up")
    results = finish([hosts.start(host, tmp_path, f"max_steps={step + 8}") for host in (0, 1)])
    assert [code for code, _, _ in results] == [0, 0], results[0][2]
    assert f"step {step}\n" in results[0][1]
    uninterrupted = run_fsdp(
        tmp_path / "uninterrupted", f"max_steps={step + 8}", ranks=2, config=RUN
    )
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    assert (
        read_exact_metrics(tmp_path / "uninterrupted").items()
        <= read_exact_metrics(tmp_path).items()
    )


@pytest.mark.slow
def test_hosts_without_a_shared_directory_are_refused(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    hosts.on(1, "mount", "-t", "tmpfs", "none", str(tmp_path / "runs"))
    results = finish([hosts.start(host, tmp_path, torchrun=False) for host in (0, 1)])
    assert [code for code, _, _ in results] == [2, 2]
    assert "training" not in results[0][1]
    refused = f"{tmp_path}/runs/test: not the same directory .* locked by process "
    assert re.match(refused, results[0][2].splitlines()[-1])


@pytest.mark.slow
def test_host_that_sees_older_checkpoints_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    first = run_fsdp(tmp_path, "max_steps=8", ranks=2, config=RUN)
    assert first.returncode == 0, first.stderr
    saved = checkpoints_by_step(tmp_path)
    assert sorted(saved) == [4, 8]
    seen = tmp_path / "runs" / "test" / "checkpoints"
    shutil.copytree(saved[4], tmp_path / "stale" / saved[4].name)
    hosts.on(1, "mount", "--bind", str(tmp_path / "stale"), str(seen))
    try:
        results = finish(
            [hosts.start(host, tmp_path, "max_steps=10", torchrun=False) for host in (0, 1)]
        )
    finally:
        hosts.on(1, "umount", str(seen))
    assert [code for code, _, _ in results] == [2, 2]
    last_line = results[0][2].splitlines()[-1]
    assert last_line.startswith(f"{saved[8]}: ")
    assert "rank 1" in last_line
    assert "training" not in results[0][1]
    assert checkpoints_by_step(tmp_path) == saved


# ---- Kubernetes and SkyPilot

PROGRAMS = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
"""What a container's image sets."""


CREATE_BUCKET = """
import sys, time, urllib.request
for attempt in range(6000):
    try:
        urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="PUT"))
        break
    except OSError:  # the server is starting
        time.sleep(0.1)
"""


def package(folder: Path) -> Path:
    """Make a machine's copy of the package, with a small run in config.yaml."""
    folder.mkdir()
    (folder / "fsdp.py").symlink_to(REPOSITORY / "fsdp.py")
    (folder / ".venv").symlink_to(sys.prefix)
    hyperparameters = RUN | {"max_steps": 100000, "collective_timeout": 600}
    (folder / "config.yaml").write_text(json.dumps({"hyperparameters": hyperparameters}))
    return folder


@pytest.mark.slow
def test_trainjob_eviction_and_sky_resume(hosts: Hosts, tmp_path: Path) -> None:
    """With the variables of Kubeflow Trainer 2.3 and SkyPilot 0.14; machines share only S3."""
    env = PROGRAMS | {
        "PYTHONPATH": str(REPOSITORY),
        "AWS_ENDPOINT_URL": f"http://{hosts.addresses[0]}:5555",
    }
    env |= {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server = [sys.executable, "-m", "moto.server", "-H", hosts.addresses[0], "-p", "5555"]
    job = read_documents("trainjob.yaml")[1]
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    hosts.names(tmp_path, f"{name}-node-0-0.{name}")
    with (
        (tmp_path / "moto.log").open("w") as log,
        subprocess.Popen(hosts.inside(0, *server), stderr=log) as moto,
    ):
        try:
            hosts.on(0, sys.executable, "-c", CREATE_BUCKET, f"{env['AWS_ENDPOINT_URL']}/bucket")
            pods = []
            for host in (0, 1):
                injected = {
                    "PET_NNODES": "2",
                    "PET_NPROC_PER_NODE": "1",
                    "PET_NODE_RANK": str(host),
                }
                injected |= {
                    "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
                    "PET_MASTER_PORT": "29500",
                }
                injected |= {variable["name"]: variable["value"] for variable in trainer["env"]}
                command = [
                    *trainer["command"],
                    *trainer["args"],
                    "checkpoint_storage=s3://bucket/runs",
                ]
                pods.append(
                    hosts.run(host, package(tmp_path / f"pod{host}"), command, env | injected)
                )
            assert pods[0].stdout is not None
            for line in pods[0].stdout:
                if line.startswith("training"):
                    break
            pods[1].terminate()
            evicted = finish(pods)
            assert [code for code, _, _ in evicted] == [75, 1], "they start again"
            stopped = re.search(r"^stopped after step (\d+)/", evicted[0][1], re.MULTILINE)
            assert stopped, evicted
            step = int(stopped[1])

            task, machines = read_documents("sky.yaml")[0], []
            arguments = (
                f"--config config.yaml checkpoint_storage=s3://bucket/runs max_steps={step + 4}"
            )
            for host in (0, 1):
                injected = {
                    "SKYPILOT_NODE_IPS": "\n".join(hosts.addresses),
                    "SKYPILOT_NODE_RANK": str(host),
                }
                injected |= {
                    "SKYPILOT_NUM_NODES": "2",
                    "SKYPILOT_NUM_GPUS_PER_NODE": "1",
                    "ARGS": arguments,
                }
                folder = package(tmp_path / f"machine{host}")
                machines.append(
                    hosts.run(host, folder, ["bash", "-c", task["run"]], env | injected)
                )
            completed = finish(machines)
        finally:
            moto.kill()
    assert [code for code, _, _ in completed] == [0, 0], completed
    assert list(read_reports(tmp_path / "machine0", name="config")) == [*range(1, step + 5)]
