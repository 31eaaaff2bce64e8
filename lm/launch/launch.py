"""Rank, world size and rendezvous address of this process, from variables of its launcher.

`Launch.from_env` supports torchrun (which Determined's torch_distributed launcher runs), Slurm's
srun, the mpiexec of Open MPI, of MPICH and Intel MPI (Hydra) and of HPE Cray (PALS), and a process
without a launcher. Of nested launchers, e.g. torchrun in srun tasks or Open MPI daemons started by
srun, the innermost counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from lm.errors import ConfigError, error_prefix

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From here on, Slurm's step IDs are those of batch scripts and interactive shells."""

_FIRST_PORT = 20000
_N_PORTS = 12763
"""A prime number. The last port is 32762, below Linux's ephemeral ports, which start at 32768."""
_PORTS_PER_JOB = 16
"""More than the srun steps that a job runs at the same time: each has its own port."""
_MAX_DIGITS = 18
"""Digits of an integer that are read; Python refuses to convert thousands of them."""


class LauncherVariables(NamedTuple):
    """Names of the environment variables that a launcher sets for every rank."""

    rank: str
    world_size: str
    local_rank: str
    local_size: str
    """for srun, the number of tasks of each node: "4(x2),1" """
    node_rank: str | None = None
    """None = follows from the other numbers"""
    others: tuple[str, ...] = ()
    """further required ones"""
    job_id: str | None = None
    """ID of this start of the launcher; None = it sets none"""

    @property
    def required(self) -> tuple[str, ...]:
        return self.rank, self.world_size, self.local_rank, self.local_size, *self.others

    def missing_from(self, env: Mapping[str, str]) -> list[str]:
        """Return the required variables that are not set."""
        return [name for name in self.required if name not in env]


_TORCHRUN = LauncherVariables(
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    node_rank="GROUP_RANK",
    others=("MASTER_ADDR", "MASTER_PORT"),
)
_OPEN_MPI = LauncherVariables(
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    job_id="PMIX_NAMESPACE",
)
_PALS = LauncherVariables(
    rank="PALS_RANKID",
    world_size="PMI_SIZE",
    local_rank="PALS_LOCAL_RANKID",
    local_size="PALS_LOCAL_SIZE",
    node_rank="PALS_NODEID",
    job_id="PALS_APID",
)
_HYDRA = LauncherVariables(
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
)
_SRUN = LauncherVariables(
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_size="SLURM_STEP_TASKS_PER_NODE",
    node_rank="SLURM_NODEID",
    others=("SLURM_NODEID", "SLURM_STEP_NODELIST"),
)
_LAUNCHERS = {
    "torchrun": _TORCHRUN,
    "Open MPI": _OPEN_MPI,
    "PALS": _PALS,
    "Hydra": _HYDRA,
    "srun": _SRUN,
}
"""innermost first"""


@dataclass(frozen=True)
class Launch:
    """Rank of this process, and the address and port on which rank 0 listens."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    address: str | None = None
    """None for a single process"""
    port: int | None = None
    """None for a single process"""
    launcher: str | None = None
    """torchrun or one with the same variables, Open MPI, PALS, Hydra or srun; None = no launcher"""

    @property
    def is_on_one_node(self) -> bool:
        return self.local_size == self.world_size

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Launch:
        """Read the launcher's variables from `env`, and under mpiexec the hosts in PBS_NODEFILE.

        MASTER_ADDR and MASTER_PORT take precedence. Without them, under srun and mpiexec, rank 0 is
        on the first host of the job, and the port is derived from the job ID (`launcher_pid` for a
        job on one machine that has none), so that jobs on one machine use different ports.
        """
        with error_prefix("environment"):
            torchrun_is_complete = not _TORCHRUN.missing_from(env)
            if torchrun_is_complete and "TORCHELASTIC_RUN_ID" in env:
                return _read_torchrun(env)  # whatever has started torchrun
            launch = _read_mpiexec_or_srun(env)
            if launch is None:
                if env.keys() & {_TORCHRUN.rank, _TORCHRUN.world_size, _TORCHRUN.local_rank}:
                    return _read_torchrun(env)
                return cls()
            if launch.world_size == 1 and torchrun_is_complete:
                # The task started a launcher that sets torchrun's variables, e.g. `lm.launch`.
                return _read_torchrun(env)
            _require_agreement(launch, env)
            return _with_rendezvous(launch, env)


class _Attempts(NamedTuple):
    """How a launcher numbers the attempts of one start."""

    number: str
    first: int
    start: str
    """variable that all attempts of a start have in common"""


_ATTEMPTS = (
    _Attempts("TORCHELASTIC_RESTART_COUNT", 0, "TORCHELASTIC_RUN_ID"),
    _Attempts("SLURM_RESTART_COUNT", 0, "SLURM_JOB_ID"),
    _Attempts("DET_TRIAL_RUN_ID", 1, "DET_TRIAL_ID"),
)


def launch_ids(env: Mapping[str, str]) -> dict[str, str]:
    """Return what all attempts of this start have in common, by the launchers' variables."""
    return {each.start: env[each.start] for each in _ATTEMPTS if each.start in env}


def restart_ids(env: Mapping[str, str]) -> dict[str, str]:
    """Return the `launch_ids` of the launchers that restart this run; {} = it is a first start.

    torchrun and Determined restart it, and Slurm requeues it.
    """
    ids: dict[str, str] = {}
    for each in _ATTEMPTS:
        number = env.get(each.number, "")
        if number.isdigit() and int(number) > each.first:
            ids[each.start] = env.get(each.start, "")
    return ids


def exit_code_of_stop(env: Mapping[str, str]) -> int:
    """Return the exit code of a run that stopped before its last step.

    It is 0, or 75 if RESTART_WHEN_STOPPED is 1: Kubernetes and SkyPilot start a job again only if
    it failed.

    Raises:
        ConfigError: it is set to something else.
    """
    value = env.get("RESTART_WHEN_STOPPED", "")
    if value not in ("", "1"):
        raise ConfigError(f"RESTART_WHEN_STOPPED: {value} is not 1; set it to 1, or unset it")
    return 75 if value else 0


def is_thread_count_set() -> bool:
    """Return whether the user set OMP_NUM_THREADS; if not, torchrun sets it for its workers."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "OMP_NUM_THREADS" in os.environ
    try:
        return b"OMP_NUM_THREADS" in _variables_of_torchrun()
    except OSError:
        return True


def _variables_of_torchrun() -> set[bytes]:
    """Return the names of the variables that the user, and not torchrun, has set.

    They are those of torchrun itself, which is the nearest ancestor of this process that it did not
    start.
    """
    pid = os.getppid()
    while True:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = {entry.partition(b"=")[0] for entry in entries}
        if b"TORCHELASTIC_RUN_ID" not in names:
            return names
        pid = _parent_pid(pid)


def has_lost_torchrun() -> bool:
    """Return whether this process, which torchrun started, has another parent: torchrun has ended.

    Then the parent is what adopts orphans, e.g. init or a user's systemd, and no Python.
    """
    parent = os.getppid()
    try:
        if b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{parent}/environ").read_bytes():
            return False  # a program in between, e.g. a shell script
        return "python" not in str(Path(f"/proc/{parent}/exe").readlink())
    except OSError:  # another user's, or no Linux
        return parent == 1


def launcher_pid() -> int:
    """Return the process that started this machine's ranks in a session each, as Hydra does.

    Return 0 if it is not known.
    """
    try:
        return _parent_pid(os.getsid(0))
    except OSError:
        return 0


def _parent_pid(pid: int) -> int:
    after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
    return int(after_name.split()[1])


def is_rank0() -> bool:
    """Return whether this process is rank 0, or where that is unclear, may be."""
    with suppress(ConfigError):
        return Launch.from_env(os.environ).rank == 0
    return all(os.environ.get(names.rank, "0") == "0" for names in _LAUNCHERS.values())


def _read_mpiexec_or_srun(env: Mapping[str, str]) -> Launch | None:
    """Return what the innermost launcher other than torchrun says; None = there is none."""
    found = [name for name in ("Open MPI", "PALS", "Hydra", "srun") if _is_started_by(name, env)]
    launches = [_read_ranks(name, env) for name in found]
    # srun may have started mpiexec's daemons, and then counts other ranks.
    by_mpiexec = [launch for launch in launches if launch.launcher != "srun"]
    if len({(launch.rank, launch.world_size) for launch in by_mpiexec}) > 1:
        claims = ", ".join(
            f"rank {launch.rank} of {launch.world_size} from {launch.launcher}"
            for launch in by_mpiexec
        )
        raise ConfigError(f"{claims}; use one launcher, or unset the variables of the other")
    if not launches:
        return None
    return launches[0]


def _is_started_by(launcher: str, env: Mapping[str, str]) -> bool:
    """Return whether `launcher` started this process: others set some of its variables, too."""
    if launcher == "srun":
        return _is_in_srun_task(env)
    names = _LAUNCHERS[launcher]
    present = env.keys() & {names.rank, names.local_rank, names.local_size}
    if launcher == "Hydra" and present == {names.rank}:
        # PALS and srun set PMI_RANK, too.
        return not _is_started_by("PALS", env) and not _is_in_srun_task(env)
    return bool(present)


def _is_in_srun_task(env: Mapping[str, str]) -> bool:
    # The shells of sbatch and salloc have a SLURM_PROCID, too.
    if _SRUN.rank not in env or not env.get("SLURM_STEP_ID"):
        return False
    step = env["SLURM_STEP_ID"]
    is_special = step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP
    return not is_special


def _read_torchrun(env: Mapping[str, str]) -> Launch:
    launch = _read_ranks("torchrun", env)
    if not env["MASTER_ADDR"]:
        raise ConfigError("MASTER_ADDR is empty; set it to the host of rank 0")
    return replace(launch, address=env["MASTER_ADDR"], port=_read_master_port(env))


def _read_ranks(launcher: str, env: Mapping[str, str]) -> Launch:
    """Read the numbers that `launcher` gives this process, and check that they are consistent."""
    names = _LAUNCHERS[launcher]
    missing = names.missing_from(env)
    if missing:
        present = [name for name in names.required if name in env]
        raise ConfigError(
            f"{', '.join(present)} set but {', '.join(missing)} not; start with {launcher}, which"
            " sets all of them, or unset all of them for a single process"
        )
    rank, world_size, local_rank = _read_integers(
        env, names.rank, names.world_size, names.local_rank
    )
    node_rank = None
    if names.node_rank is not None and names.node_rank in env:
        node_rank = _read_integer(env, names.node_rank)
    if launcher == "srun":
        assert node_rank is not None  # as SLURM_NODEID is required
        local_size = _tasks_on_node(node_rank, world_size, env)
    else:
        local_size = _read_integer(env, names.local_size)

    problems = []
    if not 0 <= rank < world_size:
        problems.append(_out_of_range(names.rank, rank, names.world_size, world_size))
    if not 0 <= local_rank < local_size:
        problems.append(_out_of_range(names.local_rank, local_rank, names.local_size, local_size))
    if local_size > world_size:
        problems.append(
            f"{names.local_size}={local_size} is greater than {names.world_size}={world_size}"
        )
    if problems:
        raise ConfigError(*problems)

    if node_rank is None:
        node_rank = rank // local_size
        if world_size % local_size != 0 or rank % local_size != local_rank:
            raise ConfigError(
                f"rank {rank} of {world_size} has local rank {local_rank} of {local_size}; start"
                " equally many ranks on every node, numbered node by node (Open MPI: --map-by slot)"
            )
    return Launch(rank, world_size, local_rank, local_size, node_rank, launcher=launcher)


def _out_of_range(name: str, value: int, name_of_end: str, end: int) -> str:
    return f"{name}={value} is out of range for {name_of_end}={end}; use 0 to {name_of_end} - 1"


def _tasks_on_node(node_rank: int, world_size: int, env: Mapping[str, str]) -> int:
    tasks = _tasks_of_nodes(env[_SRUN.local_size])
    if sum(tasks) != world_size or not 0 <= node_rank < len(tasks):
        raise ConfigError(
            f"{_SRUN.local_size}={env[_SRUN.local_size]!r} contradicts"
            f" {_SRUN.world_size}={world_size} or {_SRUN.node_rank}={node_rank}"
        )
    return tasks[node_rank]


def _tasks_of_nodes(text: str) -> list[int]:
    """Expand e.g. "4(x2),1" to [4, 4, 1]; return [] for text that is not in Slurm's format."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            return []
        n_tasks, n_nodes = match.groups(default="1")
        tasks += [int(n_tasks)] * int(n_nodes)
    return tasks


def _require_agreement(launch: Launch, env: Mapping[str, str]) -> None:
    """Raise ConfigError if torchrun's variables, e.g. of a batch script, contradict `launch`."""
    assert launch.launcher is not None
    names = _LAUNCHERS[launch.launcher]
    problems = []
    for name, expected, source in (
        (_TORCHRUN.rank, launch.rank, names.rank),
        (_TORCHRUN.world_size, launch.world_size, names.world_size),
        (_TORCHRUN.local_rank, launch.local_rank, names.local_rank),
        (_TORCHRUN.local_size, launch.local_size, names.local_size),
    ):
        if name in env and _read_integer(env, name) != expected:
            problems.append(
                f"{name}={env[name]}, but {expected} by {source}; unset {name},"
                f" {launch.launcher} does not need it"
            )
    if problems:
        raise ConfigError(*problems)


def _with_rendezvous(launch: Launch, env: Mapping[str, str]) -> Launch:
    """Add the address and the port of rank 0, which srun and mpiexec do not set."""
    if launch.world_size == 1:
        return launch
    address = _find_address(launch, env)
    if "MASTER_PORT" in env:
        port = _read_master_port(env)
    else:
        port = _choose_port(launch, env)
    return replace(launch, address=address, port=port)


def _find_address(launch: Launch, env: Mapping[str, str]) -> str:
    if launch.is_on_one_node:
        return "127.0.0.1"
    if "MASTER_ADDR" in env:
        address = env["MASTER_ADDR"]
    elif launch.launcher == "srun":
        address = _first_host(env["SLURM_STEP_NODELIST"])
    elif "PBS_NODEFILE" in env:
        try:
            hosts = Path(env["PBS_NODEFILE"]).read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"PBS_NODEFILE={env['PBS_NODEFILE']!r} cannot be read ({error})"
            ) from None
        address = hosts.partition("\n")[0].strip()
    else:
        address = _first_host(env.get("SLURM_JOB_NODELIST", ""))
    if not address:
        raise ConfigError(
            "the host of rank 0 is unknown; set MASTER_ADDR to its name"
            " (Open MPI: mpiexec -x MASTER_ADDR=HOST, others: mpiexec -genv MASTER_ADDR HOST)"
        )
    return address


def _first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list, e.g. "r1-gpu07" of "r[1-2]-gpu[07,09],login"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)  # up to a comma outside of brackets
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _choose_port(launch: Launch, env: Mapping[str, str]) -> int:
    """Derive a port from the job ID, so that all ranks find the same one, and other jobs others.

    Each job has `_PORTS_PER_JOB` consecutive ports, one for each of its srun steps. The next job
    has the next ones, and after the last port the first one follows: 797 consecutive jobs have
    different ports. IDs of mpiexec can be a power of two apart. If that divided the number of
    ports, few ports would be used, so the number is prime.
    """
    digits = re.sub("[^0-9]", "", _job_id(launch, env))
    offset = 0
    if digits:
        offset = int(digits[:_MAX_DIGITS]) * _PORTS_PER_JOB
    if launch.launcher == "srun":
        offset += _read_integer(env, "SLURM_STEP_ID") % _PORTS_PER_JOB
    return _FIRST_PORT + offset % _N_PORTS


def _job_id(launch: Launch, env: Mapping[str, str]) -> str:
    """Return the ID that tells this job from others on its machines; "0" if it has none."""
    assert launch.launcher is not None
    for name in (_LAUNCHERS[launch.launcher].job_id, "PBS_JOBID", "SLURM_JOB_ID"):
        if name is not None and env.get(name):
            return env[name]
    if launch.is_on_one_node:
        return str(launcher_pid())
    return "0"


def _read_master_port(env: Mapping[str, str]) -> int:
    port = _read_integer(env, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={port} is not a port; use 1 to 65535")
    return port


def _read_integer(env: Mapping[str, str], name: str) -> int:
    return _read_integers(env, name)[0]


def _read_integers(env: Mapping[str, str], *names: str) -> list[int]:
    pattern = rf"\s*[-+]?[0-9]{{1,{_MAX_DIGITS}}}\s*"
    wrong = [name for name in names if not re.fullmatch(pattern, env[name])]
    if wrong:
        raise ConfigError(*(f"{name}={env[name]!r} is not an integer" for name in wrong))
    return [int(env[name]) for name in names]
