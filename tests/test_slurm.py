"""Under Slurm: a real controller and two nodes on this machine, whose addresses are 127.0.0.2 and 127.0.0.3."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lm.launch.spawn import free_port
from tests.support import EXACT, REQUEUED, ROOT, checkpoints, reports, run

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
MISSING = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed (Debian: slurm-wlm)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start Slurm's daemons"),
]
RUN = REQUEUED | {"max_steps": 12}
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
KillWait=20
NodeName=127.0.0.2 NodeAddr=127.0.0.2 NodeHostname={host} Port={ports[1]} CPUs=8
NodeName=127.0.0.3 NodeAddr=127.0.0.3 NodeHostname={host} Port={ports[2]} CPUs=8
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """What a person at a login node can do."""

    def __init__(self, folder: Path) -> None:
        self._env = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
            "PYTHONPATH": str(ROOT),
        }

    def command(self, *words: str, folder: Path | None = None, **env: str) -> str:
        done = subprocess.run(words, cwd=folder, env=self._env | env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, folder: Path, *arguments: str, options: tuple[str, ...] = (), **env: str) -> str:
        """`sbatch launch/slurm.sbatch` for two nodes with a rank each; returns the job's number."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fsdp.py").symlink_to(ROOT / "fsdp.py")
        if not (folder / "test.yaml").exists():
            (folder / "test.yaml").write_text(json.dumps({"hyperparameters": RUN}))
        small = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0", "--time=10")
        script = str(ROOT / "launch" / "slurm.sbatch")
        words = ("sbatch", "--parsable", *small, *options, script, "--config", "test.yaml", *arguments)
        return self.command(*words, folder=folder, **({"PYTHON": sys.executable} | env)).strip()

    def wait_for(self, job: str, text: str, folder: Path, times: int = 1) -> str:
        """Wait until the job's log holds `text` so many times; return the log."""
        log = folder / f"slurm-{job}.log"
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            found = log.read_text() if log.exists() else ""
            if len(re.findall(text, found, re.MULTILINE)) >= times:
                return found
            time.sleep(0.1)
        raise AssertionError(f"no {text!r} in\n{log.read_text()}\n{self.command('scontrol', 'show', 'job', job)}")

    def finish(self, job: str, folder: Path) -> tuple[dict[str, str], str]:
        """Wait for the end of the job: what Slurm says of it, and its log."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            shown = self.command("scontrol", "show", "job", job)
            facts = dict(re.findall(r"(\w+)=(\S*)", shown))
            if facts["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"):
                return facts, (folder / f"slurm-{job}.log").read_text()
            time.sleep(0.1)
        raise AssertionError((folder / f"slurm-{job}.log").read_text())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not below pytest's folder: the name of munged's socket would be too long, and its folder open to others.
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    folder.chmod(0o755)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, folder=folder, ports=[free_port() for _ in range(3)]))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    there = Cluster(folder)
    munge = [f"--{what}={folder}/{what}" for what in ("pid-file", "log-file", "seed-file")]
    munge = ["munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={folder}/munge.socket", *munge]
    nodes = [["slurmd", "-D", "-N", name] for name in ("127.0.0.2", "127.0.0.3")]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "log").open("w") as log:
            for command in (munge, ["slurmctld", "-D"], *nodes):
                daemons.append(subprocess.Popen(command, env=there._env, stdout=log, stderr=log))
                while len(daemons) == 1 and not (folder / "munge.socket").exists():
                    assert daemons[0].poll() is None, (folder / "log").read_text()
                    time.sleep(0.05)
            deadline = time.monotonic() + 120
            states = ["sinfo", "--noheader", "--Node", "--format=%T"]
            while subprocess.run(states, env=there._env, capture_output=True, text=True).stdout.split() != ["idle"] * 2:
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.1)
        yield there
        subprocess.run(["scancel", "--user=root"], env=there._env, check=False)
        deadline = time.monotonic() + 120
        while subprocess.run(["squeue", "--noheader"], env=there._env, capture_output=True).stdout:
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()
        shutil.rmtree(folder)


def losses(folder: Path) -> dict[int, Any]:
    return {step: {key: line[key] for key in EXACT} for step, line in reports(folder).items()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    done = run(folder, "total_batch_size=4", "batch_size=2", ranks=2, config=RUN)
    assert done.returncode == 0, done.stderr
    return folder


def python(folder: Path, before: str) -> str:
    """A Python that runs the program behind a few lines."""
    (folder / "before.py").write_text(
        f"import sys\n{before}\nsys.argv = sys.argv[1:]\nimport fsdp, os\nos._exit(fsdp.main())\n"
    )
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/before.py "$@"\n')
    path.chmod(0o755)
    return str(path)


NAME = "$(touch a)`touch b`;touch c;'\"$HOME"
UNTIL_TOLD = """
import time
from lm.data.loader import Loader
from lm.runtime.preemption import StopRequest

training, on_signal, told = Loader.training, StopRequest._on_signal, []

def hear(self, *signal):
    on_signal(self, *signal)
    told.append(signal)

def until_told(self, start):
    for step, batch in enumerate(training(self, start), start):
        while start == 0 and step == 5 and not told:
            time.sleep(0.01)
        yield batch

StopRequest._on_signal, Loader.training = hear, until_told
"""
"""Behind step 5, a run that goes on from nothing waits for a signal."""


def test_a_run_that_is_told_to_stop_queues_again_and_ends_as_if_nothing_had_been(
    cluster: Cluster, straight: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    env = {"TOTAL_BATCH_SIZE": "4", "BATCH_SIZE": "2", "PYTHON": python(tmp_path, UNTIL_TOLD)}
    job = cluster.submit(folder, "lr=1e-2", options=("--job-name", NAME), **env)
    cluster.wait_for(job, "^0: training", folder)
    cluster.command("scancel", "--batch", "--signal=USR2", job)  # as --signal=B:USR2@... does
    facts, log = cluster.finish(job, folder)
    assert (facts["JobState"], facts["Restarts"], facts["Requeue"]) == ("COMPLETED", "1", "1"), log
    assert "0: stopped behind step" in log
    assert log.count("full-shard over 2 x cpu") == 2
    assert log.count("queues again, after 0 times before (exit code 0)") == 1
    assert "0: going on from checkpoint" in log
    assert losses(folder) == losses(straight)
    assert {path.name for path in folder.iterdir()} == {"fsdp.py", "test.yaml", "runs", f"slurm-{job}.log"}
    assert "4 x 16 tokens a step" in log


def test_a_crash_loop_without_a_new_checkpoint_ends(cluster: Cluster, tmp_path: Path) -> None:
    """It saves behind step 5 and fails in step 8, at every start."""
    crash = python(
        tmp_path,
        "from lm.errors import RunError\nfrom lm.data.loader import Loader\n"
        "training = Loader.training\n"
        "def crash(self, start):\n"
        "    for step, batch in enumerate(training(self, start), start):\n"
        "        if step == 7: raise RunError('step 8 cannot be')\n"
        "        yield batch\n"
        "Loader.training = crash\n",
    )
    job = cluster.submit(tmp_path, "checkpoint_rate=5", "async_checkpoint=false", PYTHON=crash)
    facts, log = cluster.finish(job, tmp_path)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "1:0", "1"), log
    assert log.count("0: step 8 cannot be") == 2
    assert f"job {job}: queues again, after 0 times before (exit code 1)" in log
    assert f"job {job}: no new checkpoint since this start, so it does not queue again" in log
    assert list(checkpoints(tmp_path)) == [5]


def test_bad_input_does_not_queue_again(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, "batch_size=2", "n_heads=5", BATCH_SIZE="0")
    facts, log = cluster.finish(job, tmp_path)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0")
    assert "n_heads: 5 does not divide d_model 32" in log


def test_a_job_that_is_cancelled_saves_and_does_not_queue_again(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, "max_steps=100000")
    cluster.wait_for(job, "^0: training", tmp_path)
    cluster.command("scancel", job)
    log = cluster.wait_for(job, "^0: stopped behind step", tmp_path)
    facts, log = cluster.finish(job, tmp_path)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0"), log
    assert checkpoints(tmp_path)
