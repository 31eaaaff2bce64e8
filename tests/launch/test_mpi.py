"""launch/pbs.sh saves before its limit, and submits what can resume, with real mpiexec.

Scripts replace qsub and qstat, because PBS has no package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import PATIENCE, REPOSITORY
from tests.support.hyperparameters import REQUEUED_RUN
from tests.support.runs import (
    checkpoints_by_step,
    read_exact_metrics,
    run_fsdp,
)

ENDLESS = "max_steps=1000000"
MPICH, OPEN_MPI = "mpiexec.mpich", "mpiexec.openmpi"


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} not installed (Debian: mpich, openmpi-bin)"
    )


class Queue:
    """A directory from which PBS starts jobs with two ranks on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("fsdp.py", "launch"):
            (folder / name).symlink_to(REPOSITORY / name)
        (folder / "test.yaml").write_text(json.dumps({"hyperparameters": REQUEUED_RUN}))
        (folder / "nodes").write_text("localhost\n" * 2)
        self.script("qsub", 'printf "%s\\n" "$@" "$ARGS" >submitted; echo 2.pbs')
        self.walltime("10:00:00")

    def script(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def walltime(self, limit: str, after: str | None = None) -> None:
        """Make qstat print the walltime `limit`, once a line of the job's log matches `after`."""
        script = f"echo '    Resource_List.walltime = {limit}'"
        if after:
            is_logged = f"grep --no-messages --quiet {after!r} pbs-*.log"
            script = f"until {is_logged}; do kill -0 $JOB || exit; sleep 0.1; done; {script}"
        self.script("qstat", script)

    def job(
        self, number: int, mpiexec: str, arguments: str, errors: str = "", **env: str
    ) -> tuple[int, str]:
        """Run launch/pbs.sh as PBS, which prints `errors`; return the exit code and the log."""
        pbs = {
            "PBS_JOBID": f"{number}.pbs",
            "PBS_NODEFILE": str(self.folder / "nodes"),
            "PBS_O_WORKDIR": str(self.folder),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(REPOSITORY),
            "MPIEXEC": mpiexec,
            "ARGS": f"--config test.yaml {arguments}",
        }
        if mpiexec == OPEN_MPI:
            pbs |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            pbs |= {"MPIEXEC_OPTIONS": "--oversubscribe"}
        done = subprocess.run(
            ["bash", "-c", f"JOB=$$ exec bash {REPOSITORY}/launch/pbs.sh"],
            cwd="/",
            env=os.environ | pbs | env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        log = (self.folder / f"pbs-{number}.log").read_text()
        assert (done.stdout, done.stderr) == ("", errors), log
        return done.returncode, log


@pytest.mark.slow
@needs(MPICH, OPEN_MPI)
def test_pbs_job_stopped_at_the_walltime_resumes_exactly(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job"
    job.mkdir()
    queue = Queue(job)
    queue.walltime("00:05:01", after="^0: training")
    env = {"TOTAL_BATCH_SIZE": "8", "BATCH_SIZE": "2"}
    code, log = queue.job(1, MPICH, ENDLESS, **env)
    assert code == 0, log
    assert log.splitlines()[-1] == "job 1.pbs: resumes as 2.pbs (exit code 0)"
    submitted = (job / "submitted").read_text().splitlines()
    exported = "ARGS,TOTAL_BATCH_SIZE,BATCH_SIZE,PYTHON,MPIEXEC"
    assert submitted == [
        "-v",
        exported,
        "launch/pbs.sh",
        f"--config test.yaml {ENDLESS} resume=auto",
    ]

    (job / "submitted").unlink()
    queue.walltime("10:00:00")
    saved = max(checkpoints_by_step(job))
    steps = f"max_steps={saved + 4}"
    code, log = queue.job(2, OPEN_MPI, steps, **env)
    assert code == 0, log
    assert f"0: resumed from checkpoint {checkpoints_by_step(job)[saved].name}" in log
    done = run_fsdp(
        tmp_path / "uninterrupted",
        "total_batch_size=8",
        "batch_size=2",
        steps,
        ranks=2,
        config=REQUEUED_RUN,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert read_exact_metrics(job) == read_exact_metrics(tmp_path / "uninterrupted")
    assert not (job / "submitted").exists()


@pytest.mark.slow
@needs(MPICH)
def test_pbs_signal_during_startup_stops_the_ranks_later(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    (tmp_path / "nodes").write_text("localhost\n")
    queue.walltime("00:00:30")
    errors = (
        "job 1.pbs: the run stops after its first step, because it stops 300 s (lead) before the "
        "walltime limit;"
    )
    code, log = queue.job(1, MPICH, ENDLESS, f"{errors} increase walltime\n")
    assert code == 0, log
    assert (tmp_path / "submitted").exists()
    assert checkpoints_by_step(tmp_path)


@needs(MPICH)
def test_pbs_unknown_walltime_is_reported(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.script("qstat", "exit 1")
    errors = "job 1.pbs: qstat prints no walltime, so the run will not stop before the limit\n"
    assert queue.job(1, MPICH, "", errors, PYTHON="true") == (0, "")


@pytest.mark.parametrize(("node", "signaled"), [(os.uname().nodename, True), ("elsewhere", False)])
def test_pbs_signals_ranks_on_the_first_node_only(
    node: str, signaled: bool, tmp_path: Path
) -> None:
    """All nodes may share the directory of process IDs, which have no meaning on another node."""
    rank = ["rank", str(tmp_path), str(tmp_path), node, "1.pbs", "localhost", "1", "true"]
    with subprocess.Popen(["bash", str(REPOSITORY / "launch" / "pbs.sh"), *rank]) as process:
        assert process.wait() == 0
    assert [path.name for path in tmp_path.iterdir()] == ([str(process.pid)] if signaled else [])


@pytest.mark.parametrize(
    ("printed", "code", "says_why"),
    [pytest.param("", 1, True, marks=pytest.mark.slow), ("checkpoint  step 1", 2, False)],
    ids=["fails before its checkpoint", "diverges after it"],
)
@needs(OPEN_MPI)
def test_pbs_job_that_would_end_so_again_submits_no_other(
    printed: str, code: int, says_why: bool, tmp_path: Path
) -> None:
    queue = Queue(tmp_path)
    (tmp_path / "nodes").write_text("localhost\n")
    queue.script("python", f"echo {printed}; exit {code}")
    ended, log = queue.job(1, OPEN_MPI, "", PYTHON=str(tmp_path / "bin" / "python"))
    assert ended == code, log
    assert ("no follow-up job: " in log) is says_why
    assert not (tmp_path / "submitted").exists()


@needs(MPICH)
def test_pbs_arguments_are_not_expanded_by_a_shell(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    (tmp_path / "nodes").write_text("localhost\n")
    arguments = "a;touch x `touch x` $(touch x) * '$HOME\" total_batch_size=3"
    code, log = queue.job(
        1, MPICH, arguments, PYTHON="echo", TOTAL_BATCH_SIZE="4", BATCH_SIZE="5;touch x"
    )
    assert (code, log) == (0, f"0: fsdp.py --config test.yaml {arguments} batch_size=5;touch x\n")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "job",
    [{}, {"PBS_JOBID": "1.pbs"}, pytest.param({"SLURM_JOB_ID": "1"}, marks=pytest.mark.slow)],
    ids=lambda job: "".join(job),
)
@pytest.mark.parametrize(
    "command", [pytest.param([m], marks=needs(m), id=m) for m in (MPICH, OPEN_MPI)]
)
def test_mpiexec_ports_agree_and_differ_by_run(
    command: list[str], job: dict[str, str], tmp_path: Path
) -> None:
    """But with MPICH in one job, which says no more of its runs: there MASTER_PORT does."""
    # In one write, since two ranks share the output.
    line = "f'{Launch.from_env(os.environ).port}\\n'.encode()"
    code = f"import os; from lm.launch.launch import Launch; os.write(1, {line})"
    (tmp_path / "rank.sh").write_text(f'{sys.executable} -c "{code}"\nexit 0\n')
    env = os.environ | job | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = [*command, "-n", "2", "bash", str(tmp_path / "rank.sh")]
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
    ):  # Open MPI fails if two make it
        envs = [env | {"TMPDIR": directory} for directory in (one, other)]
        two = [
            subprocess.Popen(words, cwd=REPOSITORY, env=own, stdout=subprocess.PIPE, text=True)
            for own in envs
        ]
        ports = [mpiexec.communicate(timeout=PATIENCE)[0].split() for mpiexec in two]
    assert [len(both) for both in ports] == [2, 2], ports
    assert [len(set(both)) for both in ports] == [1, 1]
    is_known_by_job = bool(job) and command == [MPICH]
    assert (ports[0] == ports[1]) is is_known_by_job


@needs(MPICH)
def test_pbs_python_can_have_several_words(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    (tmp_path / "nodes").write_text("localhost\n")
    assert queue.job(1, MPICH, "", PYTHON="env echo") == (0, "0: fsdp.py --config test.yaml\n")


def test_pbs_python_that_is_missing_names_the_remedy(tmp_path: Path) -> None:
    code, log = Queue(tmp_path).job(1, MPICH, "", PYTHON="missing/python")
    assert code == 2
    assert "missing/python" in log
    assert "make install" in log
    assert not (tmp_path / "submitted").exists()
