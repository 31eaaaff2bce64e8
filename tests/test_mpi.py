"""Under mpiexec, started by launch/pbs.sh. There is no PBS to install: qsub and qstat are stand-ins, mpiexec is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import EXACT, REQUEUED, ROOT, checkpoints, reports, run

RUN = REQUEUED | {"max_steps": 12}
UNTIL_TOLD = "max_steps=1000000"
MPICH, OPEN_MPI = "mpiexec.mpich", "mpiexec.openmpi"


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed (Debian: mpich, openmpi-bin)")


class Queue:
    """A folder in which PBS seems to start jobs of two ranks on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("fsdp.py", "launch"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "test.yaml").write_text(json.dumps({"hyperparameters": RUN}))
        (folder / "nodes").write_text("localhost\n" * 2)
        self._stand_in("qsub", 'printf "%s\\n" "$@" "$ARGS" >submitted; echo 2.pbs')
        self.walltime("10:00:00")

    def _stand_in(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def walltime(self, limit: str, after: str | None = None) -> None:
        """Let qstat say that the job may take hours:minutes:seconds, of which it has five minutes to save in.

        Args:
            after: what the job's log has to hold first.
        """
        wait = f"until grep --no-messages --quiet {after!r} pbs-*.log; do kill -0 $JOB || exit; sleep 0.1; done; "
        self._stand_in("qstat", f"{wait if after else ''}echo '    Resource_List.walltime = {limit}'")

    def job(self, number: int, mpiexec: str, arguments: str, errors: str = "", **env: str) -> tuple[int, str]:
        """Run launch/pbs.sh, which says `errors`, as PBS would; its exit code and its log."""
        pbs = {
            "PBS_JOBID": f"{number}.pbs",
            "PBS_NODEFILE": str(self.folder / "nodes"),
            "PBS_O_WORKDIR": str(self.folder),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "MPIEXEC": mpiexec,
            "ARGS": f"--config test.yaml {arguments}",
        }
        if mpiexec == OPEN_MPI:
            pbs |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            pbs |= {"MPIEXEC_OPTIONS": "--oversubscribe"}
        done = subprocess.run(
            ["bash", "-c", f"JOB=$$ exec bash {ROOT}/launch/pbs.sh"],
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


def losses(folder: Path) -> dict[int, Any]:
    return {step: {key: line[key] for key in EXACT} for step, line in reports(folder).items()}


@needs(MPICH, OPEN_MPI)
def test_a_run_stops_before_the_limit_under_mpich_and_its_successor_under_open_mpi_ends_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    broken.mkdir()
    queue = Queue(broken)
    queue.walltime("00:05:00", after="^0: training")
    env = {"TOTAL_BATCH_SIZE": "8", "BATCH_SIZE": "2"}
    code, log = queue.job(1, MPICH, UNTIL_TOLD, **env)
    assert code == 0, log
    assert "0: 0.0M parameters, full-shard over 2 x cpu" in log
    assert "0: stopped behind step" in log
    assert log.endswith("job 1.pbs: goes on as 2.pbs (exit code 0)\n")
    submitted = (broken / "submitted").read_text().splitlines()
    passed_on = "ARGS,TOTAL_BATCH_SIZE,BATCH_SIZE,PYTHON,MPIEXEC"
    assert submitted == ["-v", passed_on, "launch/pbs.sh", f"--config test.yaml {UNTIL_TOLD} resume=auto"]

    (broken / "submitted").unlink()
    queue.walltime("10:00:00")
    steps = f"max_steps={max(checkpoints(broken)) + 4}"
    code, log = queue.job(2, OPEN_MPI, steps, **env)
    assert code == 0, log
    assert "0: going on from checkpoint" in log
    done = run(straight, "total_batch_size=8", "batch_size=2", steps, ranks=2, config=RUN, timeout=300)
    assert done.returncode == 0, done.stderr
    assert losses(broken) == losses(straight)
    assert not (broken / "submitted").exists()


@needs(MPICH)
def test_a_notice_that_comes_before_the_ranks_listen_stops_them_all_the_same(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.walltime("00:00:30")
    code, log = queue.job(1, MPICH, UNTIL_TOLD)
    assert code == 0, log
    assert "0: stopped behind step" in log
    assert (tmp_path / "submitted").exists()


@needs(MPICH)
def test_a_job_whose_limit_nobody_knows_says_that_it_will_not_be_told(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue._stand_in("qstat", "exit 1")
    errors = "job 1.pbs: qstat gives no walltime, so the run will not be told to stop before its limit\n"
    assert queue.job(1, MPICH, "", errors, PYTHON="true") == (0, "")


@pytest.mark.parametrize(("host", "told"), [(os.uname().nodename, True), ("elsewhere", False)])
def test_a_rank_is_told_only_by_the_machine_that_it_runs_on(host: str, told: bool, tmp_path: Path) -> None:
    """Process ids mean nothing to another machine, and their folder may be one that all machines share."""
    rank = ["rank", str(tmp_path), str(tmp_path), host, "1.pbs", "localhost", "1", "true"]
    with subprocess.Popen(["bash", str(ROOT / "launch" / "pbs.sh"), *rank]) as process:
        assert process.wait() == 0
    assert [path.name for path in tmp_path.iterdir()] == ([str(process.pid)] if told else [])


@needs(OPEN_MPI)
def test_a_job_that_leaves_no_checkpoint_has_no_successor(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    (tmp_path / "nodes").write_text("localhost\n")
    code, log = queue.job(1, OPEN_MPI, "lr=1e18")
    assert code == 1, log
    assert "0: inf or NaN gradients in 10 steps in a row" in log
    assert "job 1.pbs: no new checkpoint since its start, so it has no successor" in log
    assert not (tmp_path / "submitted").exists()
    assert not checkpoints(tmp_path)


@needs(MPICH)
def test_arguments_are_words_whatever_is_in_them(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    (tmp_path / "nodes").write_text("localhost\n")
    arguments = "a;touch x `touch x` $(touch x) * '$HOME\" total_batch_size=3"
    code, log = queue.job(1, MPICH, arguments, PYTHON="echo", TOTAL_BATCH_SIZE="4", BATCH_SIZE="5;touch x")
    assert (code, log) == (0, f"0: fsdp.py --config test.yaml {arguments} batch_size=5;touch x\n")
    assert not (tmp_path / "x").exists()


@needs(MPICH)
def test_ranks_of_one_mpiexec_meet_at_a_port_of_theirs_though_a_shell_stands_between(tmp_path: Path) -> None:
    (tmp_path / "rank.sh").write_text(f"""
        {sys.executable} -c "import os; from lm.launch import Launch; print(Launch.from_env(os.environ).port)"
        exit 0
    """)
    ports = []
    for _ in range(2):
        command = [MPICH, "-n", "2", "bash", str(tmp_path / "rank.sh")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
        ports.append(done.stdout.split())
    assert [len(set(both)) for both in ports] == [1, 1]
    assert ports[0] != ports[1]
