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
MPICH, OPEN_MPI = "mpiexec.mpich", "mpiexec.openmpi"


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed (Debian: mpich, openmpi-bin)")


class Queue:
    """A folder in which PBS seems to start jobs of four ranks on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("fsdp.py", "launch"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "test.yaml").write_text(json.dumps({"hyperparameters": RUN}))
        (folder / "nodes").write_text("localhost\n" * 4)
        self._stand_in("qsub", 'printf "%s\\n" "$@" "$ARGS" >submitted; echo 2.pbs')
        self._stand_in("qstat", 'echo "    Resource_List.walltime = 10:00:00"')

    def _stand_in(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def limit_after(self, line: str, seconds: int) -> None:
        """Let the job learn, once its log holds `line`, that so much more time is left than it has to save."""
        wait = f'timeout 90 bash -c "until grep --no-messages --quiet {line!r} pbs-*.log; do sleep 0.1; done"'
        self._stand_in("qstat", f"{wait}; echo '    Resource_List.walltime = 00:05:0{seconds}'")

    def job(self, number: int, mpiexec: str, arguments: str, **env: str) -> tuple[int, str]:
        """Run launch/pbs.sh as PBS would; its exit code and its log."""
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
            ["bash", str(ROOT / "launch" / "pbs.sh")],
            cwd="/",
            env=os.environ | pbs | env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        log = (self.folder / f"pbs-{number}.log").read_text()
        assert (done.stdout, done.stderr) == ("", ""), log
        return done.returncode, log


def losses(folder: Path) -> dict[int, Any]:
    return {step: {key: line[key] for key in EXACT} for step, line in reports(folder).items()}


@needs(MPICH, OPEN_MPI)
def test_a_run_stops_before_the_limit_under_mpich_and_its_successor_under_open_mpi_ends_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert run(straight, "total_batch_size=8", "batch_size=2", ranks=4, config=RUN).returncode == 0
    broken.mkdir()
    queue = Queue(broken)
    queue.limit_after("^0: training", seconds=0)
    env = {"TOTAL_BATCH_SIZE": "8", "BATCH_SIZE": "2"}
    code, log = queue.job(1, MPICH, "lr=1e-2", **env)
    assert code == 0, log
    assert "0: 0.0M parameters, full-shard over 4 x cpu" in log
    assert "0: stopped behind step" in log
    assert log.endswith("job 1.pbs: goes on as 2.pbs (exit code 0)\n")
    submitted = (broken / "submitted").read_text().splitlines()
    passed_on = "ARGS,TOTAL_BATCH_SIZE,BATCH_SIZE,PYTHON,MPIEXEC"
    assert submitted == ["-v", passed_on, "launch/pbs.sh", "--config test.yaml lr=1e-2 resume=auto"]

    (broken / "submitted").unlink()
    queue._stand_in("qstat", 'echo "    Resource_List.walltime = 10:00:00"')
    code, log = queue.job(2, OPEN_MPI, "lr=1e-2", **env)
    assert code == 0, log
    assert "0: going on from checkpoint" in log
    assert losses(broken) == losses(straight)
    assert not (broken / "submitted").exists()


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
