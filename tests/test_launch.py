"""Launching: a process knows its place or says what is wrong with it, and a launcher leaves no one behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.errors import ConfigError
from lm.launch.environment import Launch, first_host, has_gpu, is_restart, require_torch
from lm.launch.spawn import free_port
from tests.support import ROOT, run

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}

SRUN = {  # of `srun --nodes 2 --ntasks-per-node 2`, beside much else
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
SBATCH = {  # the shell of such a job, before srun
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",  # which is no machine's number
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "1376387073",
    "PMIX_RANK": "3",
}
HYDRA = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "8", "PMI_RANK": "3", "PMI_SIZE": "4"}
PALS = {
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_NODEID": "1",
    "PALS_RANKID": "3",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
ALL = TORCHRUN | SRUN | OPEN_MPI | HYDRA | PALS

# ---- the environment --------------------------------------------------------------------------------------


def test_torchrun_says_where_a_process_stands() -> None:
    assert Launch.from_env(TORCHRUN) == Launch(3, 4, 1, 2, 1, "node0", 29500, "torchrun")


def test_srun_says_where_a_process_stands() -> None:
    assert Launch.from_env(SRUN) == Launch(3, 4, 1, 2, 1, "gpu07", 20000 + 16 * 71, "srun")


@pytest.mark.parametrize(
    ("env", "launcher"), [(OPEN_MPI, "Open MPI"), (HYDRA, "Hydra"), (PALS, "PALS"), (PALS | HYDRA, "PALS")]
)
def test_mpiexec_says_where_a_process_stands_and_pbs_where_the_first_is(
    env: dict[str, str], launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "nodes").write_text("x3001c0s7b0n0\nx3001c0s7b0n0\nx3001c0s7b1n0\n")
    job = {"PBS_JOBID": "2071.polaris-pbs-01", "PBS_NODEFILE": str(tmp_path / "nodes")}
    launch = Launch.from_env(env | job)
    assert launch == Launch(3, 4, 1, 2, 1, "x3001c0s7b0n0", launch.port, launcher)
    with pytest.raises(ConfigError, match=r"PBS_NODEFILE='.*' cannot be read \(.*No such file"):
        Launch.from_env(env | job | {"PBS_NODEFILE": str(tmp_path / "gone")})
    with pytest.raises(ConfigError, match="nothing says on which machine rank 0 is; set MASTER_ADDR"):
        Launch.from_env(env)
    by_hand = Launch.from_env(env | job | {"MASTER_ADDR": "here", "MASTER_PORT": "1234"})
    assert (by_hand.address, by_hand.port) == ("here", 1234)


def test_on_one_machine_ranks_meet_on_the_loopback() -> None:
    one = {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_LOCALID": "3", "SLURM_STEP_NODELIST": "gpu07"}
    assert Launch.from_env(SRUN | one).address == "127.0.0.1"
    hydra = HYDRA | {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}
    assert Launch.from_env(hydra, lambda: 0) == Launch(3, 4, 3, 4, 0, "127.0.0.1", 20000, "Hydra")


def test_two_mpiexecs_without_a_jobs_number_do_not_share_a_port() -> None:
    hydra = HYDRA | {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}
    assert Launch.from_env(hydra, lambda: 71).port == 20000 + 16 * 71
    assert Launch.from_env(hydra | {"PBS_JOBID": "2.pbs"}, lambda: 71).port == 20000 + 16 * 2
    assert Launch.from_env(HYDRA | {"MASTER_ADDR": "a"}, lambda: 71).port == 20000, "which each machine must come to"


def test_one_task_needs_no_rendezvous() -> None:
    alone = {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "gpu07"}
    first = {"SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"}
    assert Launch.from_env(SRUN | alone | first) == Launch(launcher="srun")


def test_jobs_that_may_share_a_machine_do_not_share_a_port() -> None:
    steps = [SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(700) for step in range(16)]
    ports = [Launch.from_env(step).port or 0 for step in steps]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 20000
    assert max(ports) < 32768, "which Linux gives out to anybody"
    two = [
        Launch.from_env(OPEN_MPI | {"MASTER_ADDR": "a", "PMIX_NAMESPACE": text}).port for text in ("65537", "131073")
    ]
    assert two[0] != two[1]


@pytest.mark.parametrize("shell", [SBATCH, SBATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}])
def test_the_shell_of_an_allocation_is_a_single_process(shell: dict[str, str]) -> None:
    assert Launch.from_env(shell) == Launch()


@pytest.mark.parametrize("around", [SRUN, SBATCH, OPEN_MPI, HYDRA, PALS, {"PMI_RANK": "0", "SLURM_STEP_ID": "0"}])
def test_torchrun_inside_of_other_launchers_is_torchrun(around: dict[str, str]) -> None:
    assert Launch.from_env(around | TORCHRUN | {"TORCHELASTIC_RUN_ID": "x"}) == Launch.from_env(TORCHRUN)


def test_mpiexec_whose_daemons_srun_started_is_mpiexec() -> None:
    daemon = SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    daemon |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    for mpi, launcher in ((OPEN_MPI, "Open MPI"), (HYDRA, "Hydra")):
        launch = Launch.from_env(daemon | mpi)
        assert (launch.rank, launch.world_size, launch.address) == (3, 4, "gpu07")
        assert launch.launcher == launcher


def test_srun_that_offers_pmi_is_srun() -> None:
    assert Launch.from_env(SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "7"}) == Launch.from_env(SRUN)


def test_variables_of_torchrun_may_stand_beside_another_launchers_if_they_agree() -> None:
    same = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert Launch.from_env(SRUN | same) == Launch.from_env(SRUN)
    assert Launch.from_env(SRUN | TORCHRUN).launcher == "srun"


@pytest.mark.parametrize("more", [{}, TORCHRUN | {"RANK": "3"}])
def test_variables_of_torchrun_that_contradict_srun_are_refused(more: dict[str, str]) -> None:
    """As `export RANK=$SLURM_PROCID` in a batch script makes them, where it is 0 for all."""
    with pytest.raises(ConfigError) as refused:
        Launch.from_env(SRUN | more | {"RANK": "0", "WORLD_SIZE": "8"})
    assert str(refused.value).splitlines() == [
        "environment: RANK=0, but srun says 3 (SLURM_PROCID); unset RANK, nothing needs it here",
        "environment: WORLD_SIZE=8, but srun says 4 (SLURM_STEP_NUM_TASKS); unset WORLD_SIZE, nothing needs it here",
    ]


def test_two_mpiexecs_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        Launch.from_env(OPEN_MPI | HYDRA | {"PMI_RANK": "2", "MPI_LOCALRANKID": "0"})
    assert str(refused.value) == (
        "environment: Open MPI says rank 3 of 4, Hydra says rank 2 of 4; start with one of them,"
        " or unset the other's variables"
    )


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        (SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 is outside SLURM_STEP_NUM_TASKS=4; it counts from 0 to"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, r"SLURM_STEP_TASKS_PER_NODE='2\(x3\)' does not fit SLURM_STEP"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "does not fit SLURM_STEP_NUM_TASKS=4 and SLURM_NODEID=1"),
        (SRUN | {"SLURM_NODEID": "2"}, "does not fit SLURM_STEP_NUM_TASKS=4 and SLURM_NODEID=2"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK='x' is not a number"),
        (HYDRA | {"MPI_LOCALRANKID": "0"}, "rank 3 of 4 is number 0 of 2 on its machine; start the same number of"),
        (HYDRA | {"PMI_SIZE": "5"}, "rank 3 of 5 is number 1 of 2 on its machine; start the same number of ranks on"),
        (PALS | {"MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port, from 1 to 65535"),
    ],
)
def test_variables_of_other_launchers_that_cannot_be_are_named(env: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Launch.from_env(env)


@pytest.mark.parametrize(
    ("env", "unset"),
    [
        (env, name)
        for env, names in (
            (SRUN, ["SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"]),
            (OPEN_MPI, [name for name in OPEN_MPI if name.startswith("OMPI") and "NODE" not in name]),
            (HYDRA, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
            (PALS, ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"]),
        )
        for name in names
    ],
)
def test_half_of_another_launchers_environment_is_refused(env: dict[str, str], unset: str) -> None:
    with pytest.raises(ConfigError, match=f"set but {unset} not; .* sets all of them in the processes that it starts"):
        Launch.from_env({name: value for name, value in env.items() if name != unset})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("a[01-03,7],b", "a01"),
        ("a[7,01-03]", "a7"),
        ("rack[1-2]-gpu[07,09-12],login", "rack1-gpu07"),
        ("gpu[08-09]-ib0,x", "gpu08-ib0"),
        ("127.0.0.[2-3]", "127.0.0.2"),
        ("", ""),
    ],
)
def test_the_first_machine_of_slurms_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("env", [{}, {"PATH": "/bin"}, {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}])
def test_a_process_without_a_launcher_is_alone(env: dict[str, str]) -> None:
    assert Launch.from_env(env) == Launch(0, 1, 0, 1, 0, None, None)


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"RANK": "x"}, ["RANK='x' is not a number"]),
        ({"RANK": "", "WORLD_SIZE": "2.5"}, ["RANK='' is not a number", "WORLD_SIZE='2.5' is not a number"]),
        ({"RANK": "4"}, ["RANK=4 is outside WORLD_SIZE=4; it counts from 0 to WORLD_SIZE - 1"]),
        ({"RANK": "-1"}, ["RANK=-1 is outside WORLD_SIZE=4; it counts from 0 to WORLD_SIZE - 1"]),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK=2 is outside LOCAL_WORLD_SIZE=2; it counts from 0 to LOCAL_WORLD_SIZE - 1"]),
        ({"LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE=8 is more than WORLD_SIZE=4"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT=70000 is not a port, from 1 to 65535"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR is empty; name the machine of rank 0"]),
    ],
)
def test_variables_that_cannot_be_are_named(changes: dict[str, str], problems: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        Launch.from_env(TORCHRUN | changes)
    assert str(refused.value).splitlines() == [f"environment: {problem}" for problem in problems]


@pytest.mark.parametrize(
    "unset", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_half_an_environment_is_refused_and_the_missing_half_named(unset: str) -> None:
    env = {name: value for name, value in TORCHRUN.items() if name != unset}
    with pytest.raises(ConfigError, match=f"set but {unset} not; start with torchrun, which sets all of them"):
        Launch.from_env(env)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*ALL]), st.text() | st.integers(-1, 5).map(str) | st.integers().map(str)))
def test_no_environment_gives_anything_but_a_place_or_a_refusal(changes: dict[str, str]) -> None:
    for env in ({}, TORCHRUN, SRUN, OPEN_MPI, HYDRA, PALS):
        env = env | changes
        try:
            launch = Launch.from_env(env)
        except ConfigError:
            continue
        assert 0 <= launch.rank < launch.world_size
        assert 0 <= launch.local_rank < launch.local_size <= launch.world_size


def test_a_run_in_half_an_environment_ends_with_2_and_says_why(tmp_path: Path) -> None:
    done = run(tmp_path, WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr == (
        "environment: WORLD_SIZE set but RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT not;"
        " start with torchrun, which sets all of them, or unset all of them for a single process\n"
    )


# ---- PyTorch ----------------------------------------------------------------------------------------------


def install(folder: Path, version: str) -> None:
    """Make `folder` one in which another torch seems to be installed."""
    info = folder / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


@pytest.mark.parametrize("version", ["2.10.1", "1.13", "2.1.0a0+git", "0"])
def test_a_torch_that_is_too_old_is_named(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended:
        require_torch()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"torch: {version} is too old, 2.11 or newer is needed: pip install -r requirements.txt -c constraints.txt\n"
    )


@pytest.mark.parametrize("version", ["2.11", "2.11.0rc1+cu130", "2.11rc1", "3.0", "10.0.0"])
def test_a_torch_that_is_new_enough_is_taken(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    require_torch()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_with_an_old_torch_ends_with_2_and_says_why_once(ranks: int, tmp_path: Path) -> None:
    install(tmp_path / "old", "2.1.0")
    done = run(tmp_path, ranks=ranks, PYTHONPATH=f"{tmp_path / 'old'}:{ROOT}")
    assert done.returncode == 2
    assert done.stderr == (
        "torch: 2.1.0 is too old, 2.11 or newer is needed: pip install -r requirements.txt -c constraints.txt\n"
    )


@pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
def test_a_gpu_that_was_asked_for_and_is_not_there_ends_the_run_with_2(tmp_path: Path) -> None:
    done = run(tmp_path, ranks=2, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("CUDA_VISIBLE_DEVICES=0 asks for a GPU, but PyTorch ")
    assert line.endswith("or unset the variable to train on the CPU")


# ---- several ranks on this machine ------------------------------------------------------------------------

PREAMBLE = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole lines, whoever else is speaking
"""
READY = "say('ready', os.getpid())\n"


@contextmanager
def launched(folder: Path, script: str, ranks: int = 2, **env: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m lm.launch` with a small script in the program's place."""
    (folder / "script.py").write_text(PREAMBLE + script)
    command = [sys.executable, "-m", "lm.launch", "--nproc", str(ranks), "script.py", "a b", "--flag"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | env
    with subprocess.Popen(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def ready(launcher: subprocess.Popen[str], ranks: int = 2) -> list[psutil.Process]:
    """Wait until the ranks have said `ready`; return them."""
    assert launcher.stdout is not None
    return [psutil.Process(int(launcher.stdout.readline().split()[1])) for _ in range(ranks)]


def finish(launcher: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = launcher.communicate(timeout=50)
    return launcher.returncode, output, errors


def test_every_rank_is_told_its_place_and_the_arguments(tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"]
    script = f"say(*[os.environ[name] for name in {names}], sys.argv[1:], os.environ['MASTER_PORT'])"
    with launched(tmp_path, script, ranks=3) as launcher:
        code, output, errors = finish(launcher)
    assert (code, errors) == (0, "")
    *position_ids, ports = zip(*(line.rsplit(" ", 1) for line in sorted(output.splitlines())), strict=True)
    assert position_ids == [tuple(f"{rank} {rank} 3 3 0 127.0.0.1 ['a b', '--flag']" for rank in range(3))]
    assert len(set(ports)) == 1


def test_ranks_meet_at_a_port_that_was_set(tmp_path: Path) -> None:
    with launched(tmp_path, "say(os.environ['MASTER_PORT'])", MASTER_PORT="1234") as launcher:
        assert finish(launcher) == (0, "1234\n1234\n", "")


def test_threads_are_shared_out_unless_they_were_set(tmp_path: Path) -> None:
    with launched(tmp_path, "say(os.environ['OMP_NUM_THREADS'])", OMP_NUM_THREADS="5") as launcher:
        assert finish(launcher) == (0, "5\n5\n", "")


@pytest.mark.parametrize("code", [1, 2, 77])
def test_the_exit_code_is_that_of_the_rank_that_failed(code: int, tmp_path: Path) -> None:
    with launched(tmp_path, f"if rank == 1: sys.exit({code})\ntime.sleep(60)") as launcher:
        assert finish(launcher) == (code, "", "")


def test_a_killed_rank_is_named_and_the_others_end_within_two_seconds(tmp_path: Path) -> None:
    """They do not even react to SIGTERM, like ranks in a collective."""
    script = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{READY}time.sleep(60)"
    with launched(tmp_path, script, ranks=3) as launcher:
        ranks = ready(launcher, 3)
        victim = next(rank for rank in ranks if rank.environ()["RANK"] == "1")
        victim.kill()
        assert launcher.stderr is not None
        assert launcher.stderr.readline() == "rank 1 was killed by SIGKILL; stopping the others\n"
        assert gone(ranks, within=2)
        code, _, errors = finish(launcher)
    assert (code, errors) == (128 + signal.SIGKILL, "")


def test_what_a_hung_rank_started_ends_with_it(tmp_path: Path) -> None:
    script = """
if rank == 1:
    while not os.path.exists("hung"):
        time.sleep(0.01)
    sys.exit(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
say("ready", worker.pid)
open("hung", "w")
time.sleep(60)
"""
    with launched(tmp_path, script) as launcher:
        (worker,) = ready(launcher, 1)
        code, _, _ = finish(launcher)
    assert code == 1
    assert gone([worker])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_signal_is_passed_on_and_a_clean_end_is_0(signum: signal.Signals, tmp_path: Path) -> None:
    script = f"""
def stop(signum, frame):
    say("told", signum)
    sys.exit(0)
signal.signal({int(signum)}, stop)
{READY}
time.sleep(60)
"""
    with launched(tmp_path, script) as launcher:
        ready(launcher)
        launcher.send_signal(signum)
        assert finish(launcher) == (0, f"told {int(signum)}\n" * 2, "")


def gone(processes: list[psutil.Process], within: float = 5) -> bool:
    """Whether all end within so many seconds. (In a container, no one may wait for orphans: zombies are dead, too.)"""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_killing_the_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    with launched(tmp_path, f"{READY}time.sleep(60)") as launcher:
        ranks = ready(launcher)
        launcher.kill()
        assert gone(ranks)


@pytest.mark.parametrize("arguments", [["--nproc", "0", "x.py"], ["--nproc", "two", "x.py"], []])
def test_a_wrong_command_line_ends_with_2_and_no_traceback(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "lm.launch", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_free_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_shell_scripts_are_free_of_what_shellcheck_knows() -> None:
    scripts = [ROOT / ".ci" / "run", *(ROOT / "launch").iterdir()]
    assert len(scripts) == 3
    command = [Path(sys.executable).parent / "shellcheck", *scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("env", "restart"),
    [
        ({}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "DET_TRIAL_RUN_ID": "1"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, True),
        ({"SLURM_RESTART_COUNT": "1"}, True),
        ({"DET_TRIAL_RUN_ID": "3"}, True),
        ({"DET_TRIAL_RUN_ID": "x"}, False),
    ],
)
def test_a_start_that_a_launcher_repeats_is_told_from_a_first_one(env: dict[str, str], restart: bool) -> None:
    assert is_restart(env) == restart


def test_what_is_wrong_on_another_machine_is_said_there(tmp_path: Path) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, str(ROOT / "fsdp.py"), "--config", "nowhere.yaml"]
    done = subprocess.run(command, env=os.environ | env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("nowhere.yaml: No such file or directory; ")
