"""launch/slurm.sbatch saves before its limit, and requeues what can resume, under real Slurm.

A controller and two nodes run here, 127.0.0.2 and 127.0.0.3.

Slurm takes eight links to /dev/null for the GPUs of each node.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lm.launch.spawn import reserve_port
from tests.support import REPOSITORY
from tests.support.hyperparameters import REQUEUED_RUN
from tests.support.runs import (
    checkpoints_by_step,
    read_exact_metrics,
    run_fsdp,
    wait_until,
    write_script,
)

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
MISSING = [
    name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
]
pytestmark = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"{', '.join(MISSING)} not installed (Debian: slurm-wlm)"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start Slurm's daemons"),
]
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
GresTypes=gpu
NodeName=127.0.0.2 NodeAddr=127.0.0.2 NodeHostname={host} Port={ports[1]} CPUs=64 Gres=gpu:8
NodeName=127.0.0.3 NodeAddr=127.0.0.3 NodeHostname={host} Port={ports[2]} CPUs=64 Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Slurm's commands, as on a login node."""

    def __init__(self, folder: Path) -> None:
        self._env = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
            "PYTHONPATH": str(REPOSITORY),
        }

    def command(self, *words: str, folder: Path | None = None, **env: str) -> str:
        done = subprocess.run(
            words, cwd=folder, env=self._env | env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(
        self, folder: Path, *arguments: str, options: tuple[str, ...] = (), **env: str
    ) -> str:
        """Submit launch/slurm.sbatch for two nodes with one rank each; return the job ID."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fsdp.py").symlink_to(REPOSITORY / "fsdp.py")
        if not (folder / "test.yaml").exists():
            (folder / "test.yaml").write_text(json.dumps({"hyperparameters": REQUEUED_RUN}))
        small = (
            "--nodes=2",
            "--ntasks-per-node=1",
            "--cpus-per-task=1",
            "--gpus-per-node=0",
            "--time=10",
        )
        words = (
            "sbatch",
            "--parsable",
            *small,
            *options,
            str(SCRIPT),
            "--config",
            "test.yaml",
            *arguments,
        )
        return self.command(*words, folder=folder, **({"PYTHON": sys.executable} | env)).strip()

    def log(self, job: str, folder: Path) -> str:
        path = folder / f"slurm-{job}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job: str, pattern: str, folder: Path) -> None:
        """Wait until a line of the job's log matches `pattern`."""
        wait_until(
            lambda: re.search(pattern, self.log(job, folder), re.MULTILINE) is not None,
            lambda: self.log(job, folder) + self.command("scontrol", "show", "job", job),
        )

    def finish(self, job: str, folder: Path) -> tuple[dict[str, str], str]:
        """Wait for the end of the job; return its fields in Slurm and its log."""

        def fields() -> dict[str, str]:
            return dict(re.findall(r"(\w+)=(\S*)", self.command("scontrol", "show", "job", job)))

        # A job that is requeued passes through others, such as REQUEUED and CONFIGURING.
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        wait_until(lambda: fields()["JobState"] in ended, lambda: self.log(job, folder))
        return fields(), self.log(job, folder)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not in pytest's folder nor in TMPDIR: paths of sockets could be too long, and the folder of
    # munged's is readable by others.
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(
        CONFIG.format(host=host, folder=folder, ports=[reserve_port() for _ in range(3)])
    )
    for gpu in range(8):
        (folder / f"gpu{gpu}").symlink_to(os.devnull)
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    cluster = Cluster(folder)
    munge = [f"--{what}={folder}/{what}" for what in ("pid-file", "log-file", "seed-file")]
    munge = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={folder}/key",
        f"--socket={folder}/munge.socket",
        *munge,
    ]
    nodes = [["slurmd", "-D", "-N", name] for name in ("127.0.0.2", "127.0.0.3")]
    states = ["sinfo", "--noheader", "--Node", "--format=%T"]
    log = folder / "log"
    daemons: list[subprocess.Popen[bytes]] = []

    def output(command: list[str]) -> list[str]:
        return subprocess.run(
            command, env=cluster._env, capture_output=True, text=True, check=False
        ).stdout.split()

    try:
        with log.open("w") as file:
            for command in (munge, ["slurmctld", "-D"], *nodes):
                daemons.append(
                    subprocess.Popen(command, env=cluster._env, stdout=file, stderr=file)
                )
                wait_until((folder / "munge.socket").exists, log.read_text)
            wait_until(lambda: output(states) == ["idle"] * 2, log.read_text)
        yield cluster
        output(["scancel", "--user=root"])
        wait_until(lambda: not output(["squeue", "--noheader"]), log.read_text)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()
        shutil.rmtree(folder)


SCRIPT = REPOSITORY / "launch" / "slurm.sbatch"


def list_commands() -> list[str]:
    """Return the sbatch commands that the script, README.md and docs/launching.md print."""
    commands: list[str] = []
    for page in (SCRIPT, REPOSITORY / "README.md", REPOSITORY / "docs" / "launching.md"):
        commands += re.findall(
            r"^(?:#   )?((?:\w+=.*|module .*; )?sbatch .*)$", page.read_text(), re.M
        )
    return commands


def test_slurm_commands_as_printed_can_start(cluster: Cluster) -> None:
    commands = list_commands()
    assert len(commands) > 8
    for command in commands:
        words = shlex.split(command.partition("sbatch ")[2], comments=True)
        cluster.command("sbatch", "--test-only", *words, folder=REPOSITORY)


def python(folder: Path, script: str) -> str:
    """Return an executable that runs `fsdp.py` after the Python lines `script`."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} {write_script(folder, script)} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


NAME = "$(touch a)`touch b`;touch c;'\"$HOME"
WAIT_FOR_SIGNAL = """
import time
from lm.data.loader import Loader
from lm.runtime.stop_signals import StopSignals

training, on_signal, received = Loader.training, StopSignals._on_signal, []

def record(self, *signal):
    on_signal(self, *signal)
    received.append(signal)

def wait(self, start):
    for step, batch in enumerate(training(self, start), start):
        while start == 0 and step == 5 and not received:
            time.sleep(0.01)
        yield batch

StopSignals._on_signal, Loader.training = record, wait
"""
"""After step 5 of its first start, the run waits for a signal."""


@pytest.mark.slow
def test_slurm_job_stopped_at_the_limit_resumes_exactly(cluster: Cluster, tmp_path: Path) -> None:
    run_fsdp(
        tmp_path / "uninterrupted",
        "total_batch_size=4",
        "batch_size=2",
        ranks=2,
        config=REQUEUED_RUN,
        code=0,
    )
    folder = tmp_path / "job"
    env = {
        "TOTAL_BATCH_SIZE": "4",
        "BATCH_SIZE": "2",
        "PYTHON": f"env {python(tmp_path, WAIT_FOR_SIGNAL)}",
    }
    job = cluster.submit(folder, "lr=1e-2", options=("--job-name", NAME), **env)
    cluster.wait_for(job, "^0: training", folder)
    cluster.command("scancel", "--batch", "--signal=USR2", job)  # as --signal=B:USR2@... does
    fields, log = cluster.finish(job, folder)
    assert (fields["JobState"], fields["Restarts"], fields["Requeue"]) == ("COMPLETED", "1", "1"), (
        log
    )
    assert log.count("requeue 1 (exit code 0)") == 1
    assert read_exact_metrics(folder) == read_exact_metrics(tmp_path / "uninterrupted")
    assert len(re.findall(r"^0: training +step +1\b", log, re.MULTILINE)) == 1, "resumed"
    assert {path.name for path in folder.iterdir()} == {
        "fsdp.py",
        "test.yaml",
        "runs",
        f"slurm-{job}.log",
    }


FAIL_IN_STEP_8 = """
from lm.errors import RunError
from lm.data.loader import Loader

training = Loader.training

def fail(self, start):
    for step, batch in enumerate(training(self, start), start):
        if step == 7:
            raise RunError("failed in step 8")
        yield batch

Loader.training = fail
"""


@pytest.mark.slow
def test_slurm_job_without_a_new_checkpoint_is_not_requeued(
    cluster: Cluster, tmp_path: Path
) -> None:
    """It saves after step 5 and fails in step 8 of every start."""
    job = cluster.submit(
        tmp_path,
        "checkpoint_rate=5",
        "async_checkpoint=false",
        options=("--nodes=1",),
        PYTHON=python(tmp_path, FAIL_IN_STEP_8),
    )
    fields, log = cluster.finish(job, tmp_path)
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", "1:0", "1"), (
        log
    )
    assert log.count("0: failed in step 8") == 2
    assert list(checkpoints_by_step(tmp_path)) == [5]
    assert [
        line for line in log.splitlines() if line.startswith(f"job {job}: requeue 1 (exit code 1)")
    ]
    assert [line for line in log.splitlines() if line.startswith(f"job {job}: not requeued: ")]


@pytest.mark.slow
def test_slurm_python_can_have_several_words(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, PYTHON="env echo one")
    fields, log = cluster.finish(job, tmp_path)
    assert fields["ExitCode"] == "0:0", log
    assert sorted(log.splitlines()) == [f"{rank}: one fsdp.py --config test.yaml" for rank in "01"]


@pytest.mark.slow
def test_slurm_python_that_is_missing_names_the_remedy(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, PYTHON="missing/python")
    fields, log = cluster.finish(job, tmp_path)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "2:0")
    (line,) = log.splitlines()
    assert "missing/python" in line
    assert "make install" in line


@pytest.mark.slow
def test_slurm_gpus_without_a_task_are_reported(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--nodes=1", "--gpus-per-node=4", "--ntasks-per-node=2")
    job = cluster.submit(tmp_path, options=options, PYTHON="echo")
    fields, log = cluster.finish(job, tmp_path)
    assert fields["ExitCode"] == "0:0", log
    assert re.match("--ntasks-per-node: 2 of 4 GPUs .*=4", log)


@pytest.mark.slow
def test_slurm_log_has_no_line_of_its_label_alone(cluster: Cluster, tmp_path: Path) -> None:
    """A print without a buffer is two writes, of a line and of its end."""
    script = tmp_path / "script.py"
    script.write_text("for number in range(1000): print(number)\n")
    wrapper = tmp_path / "python"
    wrapper.write_text(f"#!/bin/sh\nexec {sys.executable} {script}\n")
    wrapper.chmod(0o755)
    job = cluster.submit(tmp_path, options=("--nodes=1",), PYTHON=str(wrapper))
    _, log = cluster.finish(job, tmp_path)
    assert log.splitlines() == [f"0: {number}" for number in range(1000)]


def test_slurm_job_with_a_bad_config_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, "batch_size=2", "n_heads=5", BATCH_SIZE="0")
    fields, log = cluster.finish(job, tmp_path)
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", "2:0", "0")
    assert "n_heads" in log


@pytest.mark.slow
def test_slurm_job_that_diverges_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """Its exit code is 2, as of a wrong configuration, but it has saved a checkpoint."""
    wrapper = tmp_path / "python"
    wrapper.write_text("#!/bin/sh\necho 'checkpoint  step 1'\nexit 2\n")
    wrapper.chmod(0o755)
    job = cluster.submit(tmp_path, PYTHON=str(wrapper))
    fields, log = cluster.finish(job, tmp_path)
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", "2:0", "0"), (
        log
    )


@pytest.mark.slow
def test_slurm_scancel_saves_and_does_not_requeue(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(tmp_path, "max_steps=100000", options=("--nodes=1",))
    cluster.wait_for(job, "^0: training", tmp_path)
    cluster.command("scancel", job)
    fields, log = cluster.finish(job, tmp_path)
    assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0"), log
    cluster.wait_for(job, "^0: checkpoint +step", tmp_path)
    assert checkpoints_by_step(tmp_path)
