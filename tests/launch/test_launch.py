"""Every launcher's ranks are found or refused by variable; ours leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
)

from lm.errors import ConfigError
from lm.launch import machine
from lm.launch.console import record_error
from lm.launch.launch import Launch, exit_code_of_stop, is_rank0, launcher_pid, restart_ids
from lm.launch.machine import has_gpu
from lm.launch.requirements import check_requirements
from lm.launch.signals import STOP_SIGNALS
from tests.support import PATIENCE, REPOSITORY
from tests.support.hyperparameters import TINY
from tests.support.runs import checkpoints_by_step, run_fsdp


def variables(text: str) -> dict[str, str]:
    """The environment variables of e.g. "RANK=3 WORLD_SIZE=4"."""
    return dict(variable.split("=") for variable in text.split())


TORCHRUN = variables(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=node0"
)
TORCHRUN |= {"MASTER_PORT": "29500"}
JOB = variables("SLURM_JOB_ID=71 SLURM_JOB_NODELIST=gpu[07-08] SLURM_NTASKS=4")
SRUN = JOB | variables(
    "SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_PROCID=3 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu[07-08]"
)
SRUN |= variables(
    "SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)"
)  # of srun --nodes 2 --ntasks-per-node 2
SBATCH = JOB | variables(
    "SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2(x2)"
)  # outside of srun
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in variables("RANK=3 SIZE=4 LOCAL_RANK=1 LOCAL_SIZE=2").items()
}
OPEN_MPI |= variables(
    "OMPI_COMM_WORLD_NODE_RANK=1 PMIX_NAMESPACE=1376387073 PMIX_RANK=3"
)  # not the rank of the node
HYDRA = variables("MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=8 PMI_RANK=3 PMI_SIZE=4")
PALS = variables(
    "PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PALS_NODEID=1 PALS_RANKID=3 PMI_RANK=3 PMI_SIZE=4"
)
PALS |= variables("PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2")
ONE_NODE = {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}  # for HYDRA
ONE_TASK = variables(
    "SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NUM_TASKS=1 "
    "SLURM_NODEID=0 SLURM_LOCALID=0 SLURM_PROCID=0"
)
FOUR_TASKS = variables(
    "SLURM_STEP_TASKS_PER_NODE=4 SLURM_NODEID=0 SLURM_LOCALID=3"
)  # on one node, for SRUN
ALL = TORCHRUN | SRUN | OPEN_MPI | HYDRA | PALS

# ---- environment variables


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({}, Launch()),
        ({"PATH": "/bin"}, Launch()),
        ({"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}, Launch()),
        (SBATCH, Launch()),
        (SBATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, Launch()),
        (TORCHRUN, Launch(3, 4, 1, 2, 1, "node0", 29500, "torchrun")),
        (SRUN, Launch(3, 4, 1, 2, 1, "gpu07", 20000 + 16 * 71, "srun")),
        (SRUN | ONE_TASK, Launch(launcher="srun")),
        (SRUN | FOUR_TASKS, Launch(3, 4, 3, 4, 0, "127.0.0.1", 21136, "srun")),
        (
            SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "7"},
            Launch(3, 4, 1, 2, 1, "gpu07", 21136, "srun"),
        ),
        (
            HYDRA | ONE_NODE,
            Launch(3, 4, 3, 4, 0, "127.0.0.1", 20000 + 16 * launcher_pid() % 12763, "Hydra"),
        ),
        (
            HYDRA | ONE_NODE | {"PBS_JOBID": "2.pbs"},
            Launch(3, 4, 3, 4, 0, "127.0.0.1", 20000 + 16 * 2, "Hydra"),
        ),
        (HYDRA | {"MASTER_ADDR": "a"}, Launch(3, 4, 1, 2, 1, "a", 20000, "Hydra")),
    ],
)
def test_launch_from_environment(env: dict[str, str], launch: Launch) -> None:
    assert Launch.from_env(env) == launch


@pytest.mark.parametrize(
    ("env", "launcher"),
    [(OPEN_MPI, "Open MPI"), (HYDRA, "Hydra"), (PALS, "PALS"), (PALS | HYDRA, "PALS")],
)
def test_launch_under_mpiexec_and_pbs(env: dict[str, str], launcher: str, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("x3001c0s7b0n0\nx3001c0s7b0n0\nx3001c0s7b1n0\n")
    job = {"PBS_JOBID": "2071.polaris-pbs-01", "PBS_NODEFILE": str(tmp_path / "nodes")}
    launch = Launch.from_env(env | job)
    assert launch == Launch(3, 4, 1, 2, 1, "x3001c0s7b0n0", launch.port, launcher)
    for incomplete, part in (
        (job | {"PBS_NODEFILE": "gone"}, "PBS_NODEFILE='gone'"),
        ({}, "set MASTER_ADDR"),
    ):
        with pytest.raises(ConfigError, match=f"^environment: .*{part}"):
            Launch.from_env(env | incomplete)
    chosen = Launch.from_env(env | job | {"MASTER_ADDR": "here", "MASTER_PORT": "1234"})
    assert (chosen.address, chosen.port) == ("here", 1234)


def test_launch_ports_of_jobs_on_one_machine_differ() -> None:
    steps = [
        SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        for job in range(700)
        for step in range(16)
    ]
    ports = [Launch.from_env(step).port or 0 for step in steps]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 20000
    assert max(ports) < 32768, "Linux's ephemeral ports"
    jobs = [OPEN_MPI | {"MASTER_ADDR": "a", "PMIX_NAMESPACE": text} for text in ("65537", "131073")]
    assert Launch.from_env(jobs[0]).port != Launch.from_env(jobs[1]).port


@pytest.mark.parametrize(
    "outer", [SRUN, SBATCH, OPEN_MPI, HYDRA, PALS, {"PMI_RANK": "0", "SLURM_STEP_ID": "0"}]
)
def test_launch_prefers_torchrun_inside_another_launcher(outer: dict[str, str]) -> None:
    assert Launch.from_env(outer | TORCHRUN | {"TORCHELASTIC_RUN_ID": "x"}) == Launch.from_env(
        TORCHRUN
    )


@pytest.mark.parametrize(("mpi", "launcher"), [(OPEN_MPI, "Open MPI"), (HYDRA, "Hydra")])
def test_launch_prefers_mpiexec_inside_srun(mpi: dict[str, str], launcher: str) -> None:
    daemon = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    launch = Launch.from_env(SRUN | daemon | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"} | mpi)
    assert (launch.rank, launch.world_size, launch.address, launch.launcher) == (
        3,
        4,
        "gpu07",
        launcher,
    )


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, True),
        (SRUN, False),
        (SRUN | ONE_TASK | {"SLURM_PROCID": "0"}, True),
        # torchrun in a task of srun that is not the first:
        (SRUN | TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, True),
        ({"SLURM_PROCID": "0", "RANK": "1"}, False),
    ],
)
def test_rank_0_is_that_of_the_innermost_launcher(
    env: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert is_rank0() == expected


def test_launch_accepts_variables_that_agree() -> None:
    assert Launch.from_env(
        SRUN | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    ) == Launch.from_env(SRUN)
    assert Launch.from_env(SRUN | TORCHRUN).launcher == "srun"


AGAINST_SRUN = ["RANK=0, but 3 by SLURM_PROCID", "WORLD_SIZE=8, but 4 by SLURM_STEP_NUM_TASKS"]


@pytest.mark.parametrize(
    ("env", "starts"),
    [
        (TORCHRUN | {"RANK": "x"}, ["RANK='x'"]),
        (TORCHRUN | {"RANK": "", "WORLD_SIZE": "2.5"}, ["RANK=''", "WORLD_SIZE='2.5'"]),
        (TORCHRUN | {"RANK": "4"}, ["RANK=4 is out of range for WORLD_SIZE=4"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK=-1 is out of range for WORLD_SIZE=4"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2 is out of range for LOCAL_WORLD_SIZE=2"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE=8 is greater than WORLD_SIZE=4"]),
        (TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        (TORCHRUN | {"MASTER_ADDR": ""}, ["MASTER_ADDR is empty"]),
        (
            SRUN | {"SLURM_PROCID": "4"},
            ["SLURM_PROCID=4 is out of range for SLURM_STEP_NUM_TASKS=4"],
        ),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, ["SLURM_STEP_TASKS_PER_NODE='2(x3)'"]),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, ["SLURM_STEP_TASKS_PER_NODE='2(x'"]),
        (SRUN | {"SLURM_NODEID": "2"}, ["SLURM_STEP_TASKS_PER_NODE='2(x2)' contradicts"]),
        # As `export RANK=$SLURM_PROCID` in a batch script sets them, equal in all tasks:
        (SRUN | {"RANK": "0", "WORLD_SIZE": "8"}, AGAINST_SRUN),
        (SRUN | TORCHRUN | {"RANK": "0", "WORLD_SIZE": "8"}, AGAINST_SRUN),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, ["OMPI_COMM_WORLD_RANK='x'"]),
        (
            OPEN_MPI | HYDRA | {"PMI_RANK": "2", "MPI_LOCALRANKID": "0"},
            ["rank 3 of 4 from Open MPI, rank 2 of 4 from"],
        ),
        (HYDRA | {"MPI_LOCALRANKID": "0"}, ["rank 3 of 4 has local rank 0 of 2"]),
        (HYDRA | {"PMI_SIZE": "5"}, ["rank 3 of 5 has local rank 1 of 2"]),
        (PALS | {"MASTER_ADDR": "a", "MASTER_PORT": "0"}, ["MASTER_PORT=0 "]),
    ],
)
def test_launch_names_invalid_or_contradictory_variables(
    env: dict[str, str], starts: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        Launch.from_env(env)
    for problem, start in zip(refused.value.problems, starts, strict=True):
        assert problem.startswith(f"environment: {start}")


REQUIRED = {
    "torchrun": (TORCHRUN, TORCHRUN.keys() - {"GROUP_RANK"}),
    "srun": (
        SRUN,
        {
            f"SLURM_{name}"
            for name in ("NODEID", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE", "STEP_NODELIST")
        },
    ),
    "Open MPI": (
        OPEN_MPI,
        {name for name in OPEN_MPI if name.startswith("OMPI") and "NODE" not in name},
    ),
    "Hydra": (HYDRA, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}),
    "PALS": (PALS, {"PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"}),
}


@pytest.mark.parametrize("launcher", REQUIRED)
def test_launch_names_a_missing_variable(launcher: str) -> None:
    env, required = REQUIRED[launcher]
    for unset in required:
        with pytest.raises(ConfigError, match=f"set but {unset} not; start with {launcher},"):
            Launch.from_env({name: value for name, value in env.items() if name != unset})


def test_launch_master_is_slurms_first_host() -> None:
    first = {
        "a": "a",
        "a,b": "a",
        "a[01-03,7],b": "a01",
        "a[7,01-03]": "a7",
        "127.0.0.[2-3]": "127.0.0.2",
    }
    first |= {"rack[1-2]-gpu[07,09-12],login": "rack1-gpu07", "gpu[08-09]-ib0,x": "gpu08-ib0"}
    assert {
        nodes: Launch.from_env(SRUN | {"SLURM_STEP_NODELIST": nodes}).address for nodes in first
    } == first


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from([*ALL]), st.text() | st.integers(-1, 5).map(str) | st.integers().map(str)
    )
)
def test_launch_of_any_environment_is_valid_or_refused(changes: dict[str, str]) -> None:
    for env in ({}, TORCHRUN, SRUN, OPEN_MPI, HYDRA, PALS):
        try:
            launch = Launch.from_env(env | changes)
        except ConfigError:
            continue
        assert 0 <= launch.rank < launch.world_size
        assert 0 <= launch.local_rank < launch.local_size <= launch.world_size


def test_launch_recognizes_a_restart() -> None:
    ids = "TORCHELASTIC_RUN_ID=a SLURM_JOB_ID=7 DET_TRIAL_ID=1 "
    restarts = {
        "TORCHELASTIC_RESTART_COUNT=2 SLURM_RESTART_COUNT=0": {"TORCHELASTIC_RUN_ID": "a"},
        "SLURM_RESTART_COUNT=1": {"SLURM_JOB_ID": "7"},
        "DET_TRIAL_RUN_ID=3": {"DET_TRIAL_ID": "1"},
    }
    for restart, found in restarts.items():
        assert restart_ids(variables(ids + restart)) == found
    for first in ("", "TORCHELASTIC_RESTART_COUNT=0 DET_TRIAL_RUN_ID=1", "DET_TRIAL_RUN_ID=x"):
        assert restart_ids(variables(ids + first)) == {}


def test_torchrun_report_shows_every_line_of_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    record_error(ConfigError("lr: one", "d_ff: two"))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert "traceback : lr: one\n  d_ff: two" in str(ChildFailedError("fsdp.py", {0: failure}))
    ErrorHandler().override_error_code_in_rootcause_data(str(file), failure.error_file_data, 2)
    assert not caplog.text


# ---- PyTorch


def install(folder: Path, version: str) -> None:
    """Make the metadata in `folder` those of another version of torch."""
    info = folder / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


@pytest.mark.parametrize(
    "version",
    ["2.10.1", "0", "2.11", "2.11rc1", "10.0.0"],
)
def test_requirements_refuse_an_old_version(
    version: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    if version.startswith(("2.11", "3", "10")):
        check_requirements()
    else:
        with pytest.raises(SystemExit, match="2"):
            check_requirements()
        assert f"version {version} " in capsys.readouterr().err


def test_old_torch_exits_with_2_and_one_line(tmp_path: Path) -> None:
    install(tmp_path / "old", "2.1.0")
    done = run_fsdp(tmp_path, ranks=2, PYTHONPATH=f"{tmp_path / 'old'}:{REPOSITORY}", code=2)
    assert re.fullmatch(r"torch: version 2\.1\.0 .*2\.11.*\n", done.stderr)


COMMANDS = (
    "checkpoint config evaluate generate hf launch launch.torchrun plan prepare report search"
)


@pytest.mark.parametrize("module", ["fsdp", *(f"lm.{name}" for name in COMMANDS.split())])
def test_command_without_torch_exits_with_2_and_one_line(module: str) -> None:
    command = [sys.executable, "-S", "-m", module]  # without installed packages
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"torch: not installed for .*python.*; install .*\n", done.stderr)


def hide_package(folder: Path, name: str) -> str:
    """Return a PYTHONPATH with which the import of a package fails as if it was not installed."""
    (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r}, name={name!r})")
    return f"{folder}:{REPOSITORY}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "module", "arguments"),
    [
        ("yaml", "fsdp", "--config config.yaml"),
        ("tensorboard", "fsdp", f"--config {REPOSITORY}/config.yaml max_steps=1"),
        ("pydantic", "lm.config", ""),
        ("google_crc32c", "lm.generate", "x --prompt x"),
    ],
)
def test_command_without_a_package_exits_with_2_and_one_line(
    package: str, module: str, arguments: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", module, *arguments.split()]
    variables = os.environ | {"PYTHONPATH": hide_package(tmp_path, package)}
    (tmp_path / "config.yaml").write_text("hyperparameters: {}\n")
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    remedy = r"pip install -r requirements\.txt"
    assert re.fullmatch(rf"{package}: not installed for .*python.*; .*{remedy}.*\n", done.stderr)


def test_search_without_optuna_names_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lm.search", "search.yaml"]
    variables = os.environ | {"PYTHONPATH": hide_package(tmp_path, "optuna")}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert re.fullmatch(r"lm\.search requires a package: pip install optuna .*\n", done.stderr)


def test_import_that_is_not_of_a_package_has_its_traceback() -> None:
    run = "import lm.units; from lm.units import missing"
    command = [sys.executable, "-c", run]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("module", ["fsdp", "lm.generate", "lm.launch"])
def test_windows_exits_with_2_and_one_line(module: str) -> None:
    windows = "sys.platform = 'win32'; sys.modules |= dict.fromkeys(['resource', 'fcntl'])"
    run = f"import runpy, sys; {windows}; runpy.run_module('{module}', run_name='__main__')"
    command = [sys.executable, "-S", "-c", run]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"Windows: .*WSL.*\n", done.stderr)


@pytest.mark.slow
@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_missing_gpu_exits_with_2_and_one_line(tmp_path: Path) -> None:
    done = run_fsdp(tmp_path, ranks=2, CUDA_VISIBLE_DEVICES="0", code=2)
    assert re.fullmatch(r"CUDA_VISIBLE_DEVICES=0: .*\n", done.stderr)


@pytest.mark.parametrize(
    ("device", "found"), [("nvidia1", True), ("kfd", True), ("dxg", True), ("nvidiactl", False)]
)
def test_has_gpu_looks_at_devices(
    device: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / device).touch()
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path)
    assert has_gpu() == found


# ---- several ranks on this machine

PREAMBLE = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def say(*words):  # in one write, so that lines of two ranks do not mix
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
READY = "say('ready', os.getpid())\n"


@contextmanager
def launched(
    folder: Path, script: str, ranks: int = 2, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """Start `python -m lm.launch` with `script`."""
    (folder / "script.py").write_text(PREAMBLE + script)
    command = [
        sys.executable,
        "-m",
        "lm.launch",
        "--nproc",
        str(ranks),
        "script.py",
        "a b",
        "--flag",
    ]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)} | env
    with subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def ready(launcher: subprocess.Popen[str], ranks: int = 2) -> list[psutil.Process]:
    """Wait until the ranks have printed "ready"; return their processes."""
    assert launcher.stdout is not None
    return [psutil.Process(int(launcher.stdout.readline().split()[1])) for _ in range(ranks)]


def finish(launcher: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = launcher.communicate(timeout=PATIENCE)
    return launcher.returncode, output, errors


def test_local_launch_sets_variables_and_arguments(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"]
    script = (
        f"say(*[os.environ[name] for name in {names}], sys.argv[1:], os.environ['MASTER_PORT'])"
    )
    with launched(tmp_path, script, ranks=3) as launcher:
        code, output, errors = finish(launcher)
    assert (code, errors) == (0, "")
    variables, ports = zip(
        *(line.rsplit(" ", 1) for line in sorted(output.splitlines())), strict=True
    )
    assert variables == tuple(
        f"{rank} {rank} 3 3 0 127.0.0.1 ['a b', '--flag']" for rank in range(3)
    )
    assert len(set(ports)) == 1


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_local_launch_with_closed_streams(closed: str, tmp_path: Path) -> None:
    """A file that a rank opens never gets the number of a standard stream."""
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "print('out'); print('err', file=sys.stderr)\n"
        "with open('numbers', 'a') as file:\n"
        "    file.write(f'{file.fileno() > 2}\\n')\n"
    )
    command = f"exec {sys.executable} -m lm.launch --nproc 2 script.py {closed}"
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=variables, check=False)
    assert done.returncode == 0
    assert (tmp_path / "numbers").read_text() == "True\nTrue\n"


@pytest.mark.slow
def test_run_starts_with_closed_streams(tmp_path: Path) -> None:
    (tmp_path / "test.yaml").write_text(json.dumps({"hyperparameters": TINY | {"max_steps": 1}}))
    command = f"exec {sys.executable} {REPOSITORY}/fsdp.py --config test.yaml <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert list(checkpoints_by_step(tmp_path)) == [1]


def test_local_launch_keeps_master_port(tmp_path: Path) -> None:
    with launched(tmp_path, "say(os.environ['MASTER_PORT'])", MASTER_PORT="1234") as launcher:
        assert finish(launcher) == (0, "1234\n1234\n", "")


def test_local_launch_exit_code_is_that_of_the_failed_rank(tmp_path: Path) -> None:
    with launched(tmp_path, "if rank == 1: sys.exit(77)\ntime.sleep(3600)") as launcher:
        assert finish(launcher) == (77, "", "")


def test_local_launch_names_a_killed_rank(tmp_path: Path) -> None:
    """The others ignore SIGTERM, like ranks in a collective."""
    script = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{READY}time.sleep(3600)"
    with launched(tmp_path, script, ranks=3) as launcher:
        ranks = ready(launcher, 3)
        victim = next(rank for rank in ranks if rank.environ()["RANK"] == "1")
        victim.kill()
        assert launcher.stderr is not None
        assert launcher.stderr.readline().startswith("rank 1 was killed by SIGKILL")
        assert ended(ranks)
        code, _, errors = finish(launcher)
    assert (code, errors) == (128 + signal.SIGKILL, "")


def test_local_launch_kills_children_of_a_hung_rank(tmp_path: Path) -> None:
    script = """
if rank == 1:
    while not os.path.exists("hung"):
        time.sleep(0.01)
    sys.exit(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
say("ready", worker.pid)
open("hung", "w")
time.sleep(3600)
"""
    with launched(tmp_path, script) as launcher:
        (worker,) = ready(launcher, 1)
        code, _, _ = finish(launcher)
    assert code == 1
    assert ended([worker])


OTHER_SIGNALS = [*STOP_SIGNALS[1:], signal.SIGUSR1]


@pytest.mark.parametrize(
    "signum",
    [STOP_SIGNALS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_SIGNALS)],
)
def test_local_launch_forwards_signals(signum: signal.Signals, tmp_path: Path) -> None:
    script = f"""
def stop(signum, frame):
    say("received", signum)
    sys.exit(0)
signal.signal({int(signum)}, stop)
{READY}
while True:
    time.sleep(0.05)  # a signal just before a sleep does not end it
"""
    with launched(tmp_path, script) as launcher:
        ready(launcher)
        launcher.send_signal(signum)
        assert finish(launcher) == (0, f"received {int(signum)}\n" * 2, "")


def test_local_launch_leaves_sighup_ignored_under_nohup(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PREAMBLE + "say(signal.getsignal(signal.SIGHUP).name)")
    command = ["nohup", sys.executable, "-m", "lm.launch", "--nproc", "2", "script.py"]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.stdout == "SIG_IGN\n" * 2


def ended(processes: list[psutil.Process], within: float = PATIENCE) -> bool:
    """Wait until all processes have ended, or are zombies, which a container may never reap."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="uses PR_SET_PDEATHSIG of Linux")
def test_local_launch_killed_leaves_no_orphans(tmp_path: Path) -> None:
    with launched(tmp_path, f"{READY}time.sleep(3600)") as launcher:
        ranks = ready(launcher)
        launcher.kill()
        assert ended(ranks)


def test_local_launch_leaves_no_child_of_a_rank_that_has_ended(tmp_path: Path) -> None:
    script = """
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
say("ready", worker.pid)
while not os.path.exists("known"):
    time.sleep(0.01)
os._exit(rank)
"""
    with launched(tmp_path, script) as launcher:
        workers = ready(launcher)
        (tmp_path / "known").touch()
        assert finish(launcher)[0] == 1  # also if the children have its pipe
    assert ended(workers)


@pytest.mark.skipif(sys.platform != "linux", reason="uses PR_SET_PDEATHSIG of Linux")
@pytest.mark.parametrize(
    ("parent", "code"), [("os.getppid()", 0), ("os.getpid()", 128 + signal.SIGTERM)]
)
def test_process_whose_parent_has_ended_before_it_asked_ends(parent: str, code: int) -> None:
    run = f"import os; from lm.launch.process import die_with_parent; die_with_parent({parent})"
    done = subprocess.run([sys.executable, "-c", run], cwd=REPOSITORY, check=False)
    assert done.returncode == code


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace")
def test_local_launch_without_ipv4_is_refused() -> None:
    without_ipv4 = "ip link set lo up && ip address del 127.0.0.1/8 dev lo || exit 99"
    launch = f"{sys.executable} -m lm.launch --nproc 2 fsdp.py"
    command = ["unshare", "-n", "sh", "-c", f"{without_ipv4}; {launch}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode in (1, 99):
        pytest.skip(f"no network namespace: {done.stderr}")
    assert done.returncode == 2
    assert re.fullmatch(r"127\.0\.0\.1: .*\n", done.stderr)


ASK_FOR_ALL_PORTS = """
import contextlib, pathlib, socket, sys
from lm.launch.spawn import LOOPBACK, reserve_port

try:
    pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40003")
except OSError as error:  # read-only in a container
    sys.exit(f"no ports: {error}")
port = reserve_port()
server = socket.create_server((LOOPBACK, 50000))

def take_all(take):
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(socket.socket())
            take(taken[-1])
    ports = {each.getsockname()[1] for each in taken[:-1]}
    for each in taken:
        each.close()
    return ports

others = {40000, 40001, 40002, 40003} - {port}
assert take_all(lambda each: each.bind((LOOPBACK, 0))) == others
assert take_all(lambda each: each.connect((LOOPBACK, 50000))) <= others
socket.create_server((LOOPBACK, port))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace")
def test_reserved_port_is_given_only_to_who_names_it() -> None:
    command = ["unshare", "-n", "sh", "-c", 'ip link set lo up || exit 99; exec "$@"', "sh"]
    command += [sys.executable, "-c", ASK_FOR_ALL_PORTS]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode == 99 or re.match("unshare:|no ports:", done.stderr):
        pytest.skip(f"no network namespace: {done.stderr}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--nproc", number, "fsdp.py"] for number in ("0", "100000", "two")),
        ["--nproc", "2", "x.py"],
        ["--nproc", "2", "lm"],
        [],
    ],
    ids=" ".join,
)
def test_local_launch_refuses_an_invalid_command_line(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "lm.launch", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["-P", "-I"])
def test_script_runs_without_its_directory_in_the_path(option: str, tmp_path: Path) -> None:
    command = [sys.executable, option, str(REPOSITORY / "fsdp.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_restart_when_stopped_is_1_or_unset() -> None:
    assert exit_code_of_stop({}) == 0
    assert exit_code_of_stop({"RESTART_WHEN_STOPPED": "1"}) == 75
    with pytest.raises(ConfigError, match=r"^RESTART_WHEN_STOPPED: 0 "):
        exit_code_of_stop({"RESTART_WHEN_STOPPED": "0"})
