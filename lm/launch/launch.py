"""Rank, world size and rendezvous address of this process, from the environment variables of its launcher.

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

from lm.errors import ConfigError, error_prefix

_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_VARIABLES = {
    "torchrun": (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    "Open MPI": tuple(
        f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ),
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": (*_SLURM, "SLURM_NODEID", "SLURM_STEP_NODELIST"),
}
"""launchers, innermost first: variables of rank, world size, local rank and local size, then further required ones"""
_NODE_RANK = {"torchrun": "GROUP_RANK", "PALS": "PALS_NODEID", "srun": "SLURM_NODEID"}

_FIRST_SPECIAL_STEP = (
    0xFFFFFFF0  # from here on, Slurm's step IDs are those of batch scripts and interactive shells
)
_FIRST_PORT, _N_PORTS = 20000, 12763  # below Linux's ephemeral ports; a prime number of ports


@dataclass(frozen=True)
class Launch:
    """Rank of this process, and the address and port on which rank 0 listens (None for a single process)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    address: str | None = None
    port: int | None = None
    launcher: str | None = None
    """torchrun (or a launcher with the same variables), Open MPI, PALS, Hydra or srun; None = no launcher"""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Launch:
        """Read the launcher's variables from `env`, and under mpiexec the host file that PBS_NODEFILE names.

        MASTER_ADDR and MASTER_PORT take precedence. Without them, under srun and mpiexec, rank 0 is
        on the first host of the job, and the port is derived from the job ID (`launcher_pid` for a
        job on one machine that has none), so that jobs on one machine use different ports.
        """
        with error_prefix("environment"):
            in_torchrun = "TORCHELASTIC_RUN_ID" in env and not _missing("torchrun", env)
            found = (
                []
                if in_torchrun
                else [_read(name, env) for name in list(_VARIABLES)[1:] if _is_set(name, env)]
            )
            mpi = [
                launch for launch in found if launch.launcher != "srun"
            ]  # srun may have started mpiexec's daemons
            if len({(launch.rank, launch.world_size) for launch in mpi}) > 1:
                claims = ", ".join(
                    f"rank {launch.rank} of {launch.world_size} from {launch.launcher}"
                    for launch in mpi
                )
                raise ConfigError(
                    f"{claims}; use one launcher, or unset the variables of the other"
                )
            # Complete torchrun variables next to a single task are those of a torchrun in it.
            if found and (found[0].world_size > 1 or _missing("torchrun", env)):
                _require_agreement(found[0], env)
                address, port = _rendezvous(found[0], env)
                return replace(found[0], address=address, port=port)
            if not env.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
                return cls()
            launch = _read("torchrun", env)
            if not env["MASTER_ADDR"]:
                raise ConfigError("MASTER_ADDR is empty; set it to the host of rank 0")
            return replace(launch, address=env["MASTER_ADDR"], port=_port(env))


def is_restart(env: Mapping[str, str]) -> bool:
    """Return whether a launcher restarted this process: torchrun or Determined after a failure, or a Slurm requeue."""
    first = {"TORCHELASTIC_RESTART_COUNT": 0, "SLURM_RESTART_COUNT": 0, "DET_TRIAL_RUN_ID": 1}
    return any(
        env.get(name, "").isdigit() and int(env[name]) > count for name, count in first.items()
    )


def exit_code_of_stop(env: Mapping[str, str]) -> int:
    """Return the exit code of a run that stopped before its last step: 0, or 75 if RESTART_WHEN_STOPPED is set."""
    return (
        75 if env.get("RESTART_WHEN_STOPPED") else 0
    )  # Kubernetes and SkyPilot start a job again only if it failed


def threads_are_given() -> bool:
    """Return whether the user set OMP_NUM_THREADS. torchrun sets it to 1 for its workers if the user did not."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "OMP_NUM_THREADS" in os.environ
    pid = os.getppid()
    try:
        while True:  # up to torchrun, whose environment is the user's
            names = {
                entry.partition(b"=")[0]
                for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            }
            if b"TORCHELASTIC_RUN_ID" not in names:
                return b"OMP_NUM_THREADS" in names
            pid = _parent(pid)
    except OSError:
        return True


def launcher_pid() -> int:
    """Return the process that started the ranks of this machine in a session each, as Hydra does; 0 if unknown."""
    try:
        return _parent(os.getsid(0))
    except OSError:
        return 0


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_rank0() -> bool:
    """Return whether no launcher gives this process another rank than 0."""
    return all(os.environ.get(name, "0") == "0" for name, *_ in _VARIABLES.values())


def _is_set(launcher: str, env: Mapping[str, str]) -> bool:
    rank, _, local_rank, local_size = _VARIABLES[launcher][:4]
    if (
        launcher == "srun"
    ):  # shells of sbatch and salloc have variables of the job, but are not started by srun
        step = env.get("SLURM_STEP_ID", "")
        return (
            rank in env
            and bool(step)
            and not (step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP)
        )
    if launcher == "Hydra" and rank in env and not {local_rank, local_size} & env.keys():
        return not _is_set("PALS", env) and not _is_set("srun", env)  # which set PMI variables, too
    return bool({rank, local_rank, local_size} & env.keys())


def _missing(launcher: str, env: Mapping[str, str]) -> list[str]:
    return [name for name in _VARIABLES[launcher] if name not in env]


def _read(launcher: str, env: Mapping[str, str]) -> Launch:
    names = _VARIABLES[launcher]
    if missing := _missing(launcher, env):
        raise ConfigError(
            f"{', '.join(name for name in names if name in env)} set but {', '.join(missing)} not; start with"
            f" {launcher}, which sets all of them, or unset all of them for a single process"
        )
    rank, size, local_rank = _numbers(env, *names[:3])
    node_rank = _NODE_RANK.get(launcher, "")
    node = _numbers(env, node_rank)[0] if node_rank in env else None
    if launcher == "srun":
        tasks = _tasks_per_node(env[names[3]])
        if node is None or sum(tasks) != size or not 0 <= node < len(tasks):
            raise ConfigError(
                f"{names[3]}={env[names[3]]!r} contradicts {names[1]}={size} or {node_rank}={node}"
            )
        local_size = tasks[node]
    else:
        (local_size,) = _numbers(env, names[3])
    problems = [
        f"{names[i]}={value} is out of range for {names[i + 1]}={end}; use 0 to {names[i + 1]} - 1"
        for i, value, end in ((0, rank, size), (2, local_rank, local_size))
        if not 0 <= value < end
    ]
    if local_size > size:
        problems.append(f"{names[3]}={local_size} is greater than {names[1]}={size}")
    if problems:
        raise ConfigError(*problems)
    if node is None:
        if rank % local_size != local_rank or size % local_size:
            raise ConfigError(
                f"rank {rank} of {size} has local rank {local_rank} of {local_size}; start equally many ranks on every"
                " node, numbered node by node (Open MPI: --map-by slot)"
            )
        node = rank // local_size
    return Launch(rank, size, local_rank, local_size, node, launcher=launcher)


def _tasks_per_node(text: str) -> list[int]:
    """Expand e.g. "4(x2),1" to [4, 4, 1]; return [] for text that is not in Slurm's format."""
    parts = [re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part) for part in text.split(",")]
    return (
        [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
        if all(parts)
        else []
    )


def _first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list, e.g. "rack1-gpu07" of "rack[1-2]-gpu[07,09-12],login"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else "")


def _rendezvous(launch: Launch, env: Mapping[str, str]) -> tuple[str, int] | tuple[None, None]:
    if launch.world_size == 1:
        return None, None
    one_node = launch.world_size == launch.local_size
    if one_node:
        address = "127.0.0.1"
    elif "MASTER_ADDR" in env:
        address = env["MASTER_ADDR"]
    elif launch.launcher == "srun":
        address = _first_host(env["SLURM_STEP_NODELIST"])
    elif "PBS_NODEFILE" in env:
        try:
            address = Path(env["PBS_NODEFILE"]).read_text().partition("\n")[0].strip()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"PBS_NODEFILE={env['PBS_NODEFILE']!r} cannot be read ({error})"
            ) from None
    else:
        address = _first_host(env.get("SLURM_JOB_NODELIST", ""))
    if not address:
        raise ConfigError(
            "the host of rank 0 is unknown; set MASTER_ADDR to its name"
            " (Open MPI: mpiexec -x MASTER_ADDR=HOST, others: mpiexec -genv MASTER_ADDR HOST)"
        )
    if "MASTER_PORT" in env:
        return address, _port(env)
    mpiexec = {
        "Open MPI": env.get("PMIX_NAMESPACE"),
        "PALS": env.get("PALS_APID"),
        "Hydra": _hydra_port(),
    }
    job = mpiexec.get(launch.launcher or "") or env.get("PBS_JOBID") or env.get("SLURM_JOB_ID")
    job = job or (str(launcher_pid()) if one_node else "0")
    number = int("".join(re.findall(r"[0-9]", job)[:18]) or 0) * 16
    if launch.launcher == "srun":
        number += _numbers(env, "SLURM_STEP_ID")[0] % 16
    return address, _FIRST_PORT + number % _N_PORTS


def _hydra_port() -> str:
    """Return the port of this mpiexec, which Hydra passes to its process on every host; "" under other launchers."""
    with suppress(OSError):
        arguments = Path(f"/proc/{launcher_pid()}/cmdline").read_text(errors="replace").split("\0")
        if "--control-port" in arguments:
            return arguments[arguments.index("--control-port") + 1].rpartition(":")[2]
    return ""


def _require_agreement(launch: Launch, env: Mapping[str, str]) -> None:
    """Raise ConfigError if torchrun's variables, e.g. exported by a batch script, contradict those of `launch`."""
    assert launch.launcher is not None
    expected = (launch.rank, launch.world_size, launch.local_rank, launch.local_size)
    problems = [
        f"{name}={env[name]}, but {value} by {source}; unset {name}, {launch.launcher} does not need it"
        for name, source, value in zip(
            _VARIABLES["torchrun"], _VARIABLES[launch.launcher], expected, strict=False
        )
        if name in env and _numbers(env, name)[0] != value
    ]
    if problems:
        raise ConfigError(*problems)


def _numbers(env: Mapping[str, str], *names: str) -> list[int]:
    wrong = [name for name in names if not re.fullmatch(r"\s*[-+]?[0-9]{1,18}\s*", env[name])]
    if wrong:
        raise ConfigError(*(f"{name}={env[name]!r} is not an integer" for name in wrong))
    return [int(env[name]) for name in names]


def _port(env: Mapping[str, str]) -> int:
    (port,) = _numbers(env, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={port} is not a port; use 1 to 65535")
    return port
