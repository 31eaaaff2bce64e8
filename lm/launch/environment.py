"""Where this process stands among the others, read from the environment its launcher made.

`Launch.from_env` understands torchrun (Determined's torch_distributed launcher is one), Slurm's srun, the mpiexec
of Open MPI, of MPICH and its kin (Hydra) and of HPE Cray's PALS, and a process started by hand. Launchers stand
inside one another: torchrun in srun's tasks, Open MPI's daemons started by srun. The innermost is believed.

As a command it is the launcher for one machine, used by `make train`:

    python -m lm.launch [--nproc N] fsdp.py ARGUMENTS...

Beside torchrun it starts sooner, passes on SIGTERM, SIGINT and SIGUSR2, and exits as the first rank that failed
did (2 = bad configuration), without a traceback of its own.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lm.errors import ConfigError

OLDEST_TORCH = (2, 11)


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


_NEEDED = (*_TORCHRUN, "MASTER_ADDR", "MASTER_PORT")


_OTHERS = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


"""Launchers, the innermost first, and what each calls rank, world size, local rank and local size."""


_NO_STEP = 0xFFFFFFF0


"""Slurm's step ids from here on are those of batch scripts and of salloc's shells."""


_FIRST_PORT, _PORTS = 20000, 12763


"""Ports to choose from, below those that Linux gives out by itself; a prime number of them."""


def require_torch() -> None:
    """End the process with exit code 2 where PyTorch is missing or too old for FSDP2 as used here.

    To be called before torch is imported.
    """
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        problem = f"not installed for {sys.executable}"
    else:
        if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) >= OLDEST_TORCH:
            return
        problem = f"{found} is too old"
    ranks = ["RANK", *(names[0] for names in _OTHERS.values())]
    if all(os.environ.get(name, "0") == "0" for name in ranks):  # said once
        oldest = ".".join(map(str, OLDEST_TORCH))
        advice = "pip install -r requirements.txt -c constraints.txt"
        print(f"torch: {problem}, {oldest} or newer is needed: {advice}", file=sys.stderr)
    sys.exit(ConfigError.exit_code)


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for reuse, in huge pages, on a Linux machine without a GPU.

    A step on the CPU frees and asks for the same hundreds of megabytes again and again; by default each
    round goes back to the kernel and is paid for in page faults. To be called before torch is imported.
    """
    if sys.platform != "linux" or has_gpu():
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch: ask for huge pages
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; others have none
    if mallopt is not None:
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, -1)


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def setup_environment() -> None:
    """What a process has to settle before it imports torch."""
    gc.disable()  # imports leave nothing to collect; training does so at its reports, on all ranks together
    require_torch()
    keep_freed_memory()
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which the newer one would overrule
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # a GPU's memory, without gaps
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own words
    # A lost connection is said in one line of ours; PyTorch's own log would add forty of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while starting ends at once, without a traceback


def starter() -> int:
    """The process that started the ranks of this machine, where each has a session of its own, as Hydra's have; found
    through whatever stands between; 0 = cannot be seen."""
    try:
        return int(process_fields(os.getsid(0))[1])
    except OSError:
        return 0


def process_fields(pid: int) -> list[str]:
    """What Linux says of a process behind its number and name: its state, its parent, and so on.

    Raises:
        OSError: there is no such process, or no Linux.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@dataclass(frozen=True)
class Launch:
    """One process's place: `rank` of `world_size`, `local_rank` of `local_size` on machine `node_rank`.

    `address` and `port` are where rank 0 listens for the others (None in a single process).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    address: str | None = None
    port: int | None = None
    launcher: str | None = None
    """torchrun (or what sets its variables), Open MPI, PALS, Hydra or srun; None = started by hand"""

    @classmethod
    def from_env(cls, env: Mapping[str, str], starter: Callable[[], int] = starter) -> Launch:
        """Read the launcher's variables from `env`, and the file that PBS_NODEFILE names where an mpiexec needs it.

        Under srun and mpiexec, MASTER_ADDR and MASTER_PORT are used where they are set. Else rank 0 is taken to be on
        the first machine of the job, and the port follows from the job's number: jobs that share a machine differ.

        Args:
            starter: gives the number of a job on one machine that has none of its own.

        Raises:
            ConfigError: the variables are half-set, no numbers, or contradict each other.
        """
        given = [name for name in _NEEDED if name in env]
        by_torchrun = len(given) == len(_NEEDED) and "TORCHELASTIC_RUN_ID" in env
        found = [launcher for launcher in _OTHERS if not by_torchrun and _is_there(launcher, env)]
        position_ids = [_read_other(launcher, env) for launcher in found]
        if len(position_ids) > 1 and found[1] != "srun" and position_ids[0][:2] != position_ids[1][:2]:
            said = ", ".join(
                f"{who} says rank {place[0]} of {place[1]}" for who, place in zip(found, position_ids, strict=True)
            )
            raise ConfigError(f"environment: {said}; start with one of them, or unset the other's variables")
        if position_ids:
            place, launcher = position_ids[0], found[0]
            # Without torchrun's mark, RANK and its kin in several tasks may be one shell's, the same in each.
            if len(given) < len(_NEEDED) or place[1] > 1:
                _refuse_contradiction(launcher, place, env)
                address, port = _rendezvous(launcher, place, env, starter)
                return cls(*place, address, port, launcher)
        if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(given):
            return cls()
        missing = [name for name in _NEEDED if name not in env]
        if missing:
            raise ConfigError(
                f"environment: {', '.join(given)} set but {', '.join(missing)} not; start with torchrun,"
                " which sets all of them, or unset all of them for a single process"
            )
        rank, size, local_rank, local_size = numbers = _numbers(env, *_TORCHRUN)
        problems = _misplaced(_TORCHRUN, numbers)
        if not env["MASTER_ADDR"]:
            problems.append("environment: MASTER_ADDR is empty; name the machine of rank 0")
        if problems:
            raise ConfigError(*problems)
        (node,) = _numbers(env, "GROUP_RANK") if "GROUP_RANK" in env else (0,)
        return cls(rank, size, local_rank, local_size, node, env["MASTER_ADDR"], _port(env), "torchrun")


Place = tuple[int, int, int, int, int]


"""Rank, world size, local rank, local size, node rank."""


def _is_there(launcher: str, env: Mapping[str, str]) -> bool:
    """Whether `launcher` has started this process, or something that says so for it."""
    rank, _, local_rank, local_size = _OTHERS[launcher]
    if launcher == "srun":  # in the shells of sbatch and salloc, variables of the whole job stand without a step's
        step = env.get("SLURM_STEP_ID", "")
        return rank in env and bool(step) and not (step.isdecimal() and int(step) >= _NO_STEP)
    if launcher == "Hydra" and rank in env and not {local_rank, local_size} & env.keys():
        # srun and PALS offer PMI, too, and say the rest in words of their own.
        return not _is_there("PALS", env) and not _is_there("srun", env)
    return bool({rank, local_rank, local_size} & env.keys())


def _read_other(launcher: str, env: Mapping[str, str]) -> Place:
    names = _OTHERS[launcher]
    own = (*names, "SLURM_NODEID", "SLURM_STEP_NODELIST") if launcher == "srun" else names
    if missing := [name for name in own if name not in env]:
        given = [name for name in own if name in env]
        raise ConfigError(
            f"environment: {', '.join(given)} set but {', '.join(missing)} not; {launcher} sets all of them in the"
            " processes that it starts; in others, unset all"
        )
    if launcher == "srun":
        rank, size, local_rank, node = _numbers(env, *names[:3], "SLURM_NODEID")
        tasks = _tasks_per_node(env[names[3]])
        if sum(tasks) != size or not 0 <= node < len(tasks):
            raise ConfigError(
                f"environment: {names[3]}={env[names[3]]!r} does not fit {names[1]}={size} and SLURM_NODEID={node}"
            )
        numbers = [rank, size, local_rank, tasks[node]]
    else:
        numbers = _numbers(env, *names)
        node = _numbers(env, "PALS_NODEID")[0] if launcher == "PALS" and "PALS_NODEID" in env else -1
    if problems := _misplaced(names, numbers):
        raise ConfigError(*problems)
    rank, size, local_rank, local_size = numbers
    if node < 0:  # follows from the others where machines are filled one after another, all alike
        if rank % local_size != local_rank or size % local_size:
            raise ConfigError(
                f"environment: rank {rank} of {size} is number {local_rank} of {local_size} on its machine; start the"
                " same number of ranks on every machine, and number them machine by machine (Open MPI: --map-by slot)"
            )
        node = rank // local_size
    return rank, size, local_rank, local_size, node


def _tasks_per_node(text: str) -> list[int]:
    """What Slurm means by e.g. "4(x2),1": 4, 4, 1; nothing where it is no such text."""
    parts = [re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part) for part in text.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))] if all(parts) else []


def first_host(nodes: str) -> str:
    """The first of the machines that Slurm writes as e.g. "rack[1-2]-gpu[07,09-12],login"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else "")


def _rendezvous(
    launcher: str, place: Place, env: Mapping[str, str], starter: Callable[[], int]
) -> tuple[str, int] | tuple[None, None]:
    """Where rank 0 listens, as far as the environment tells."""
    _, size, _, local_size, _ = place
    if size == 1:
        return None, None
    if size == local_size:
        address = "127.0.0.1"
    elif "MASTER_ADDR" in env:
        address = env["MASTER_ADDR"]
    elif launcher == "srun":
        address = first_host(env["SLURM_STEP_NODELIST"])
    elif "PBS_NODEFILE" in env:
        try:
            address = Path(env["PBS_NODEFILE"]).read_text().partition("\n")[0].strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"environment: PBS_NODEFILE={env['PBS_NODEFILE']!r} cannot be read ({error})") from None
    else:
        address = first_host(env.get("SLURM_JOB_NODELIST", ""))
    if not address:
        raise ConfigError(
            "environment: nothing says on which machine rank 0 is; set MASTER_ADDR to its name"
            " (Open MPI: mpiexec -x MASTER_ADDR=NAME, others: mpiexec -genv MASTER_ADDR NAME)"
        )
    if "MASTER_PORT" in env:
        return address, _port(env)
    job = env.get("PMIX_NAMESPACE") if launcher == "Open MPI" else None
    job = job or env.get("PBS_JOBID") or env.get("SLURM_JOB_ID") or (str(starter()) if size == local_size else "0")
    number = int("".join(re.findall(r"[0-9]", job)[:18]) or 0) * 16
    if launcher == "srun":
        number += _numbers(env, "SLURM_STEP_ID")[0] % 16
    return address, _FIRST_PORT + number % _PORTS


def _refuse_contradiction(launcher: str, place: Place, env: Mapping[str, str]) -> None:
    """Take nothing from a RANK or WORLD_SIZE beside the variables of `launcher`, unless it says the same."""
    names = [name for name in _TORCHRUN if name in env]
    numbers = _numbers(env, *names)
    problems = [
        f"environment: {name}={number}, but {launcher} says {place[_TORCHRUN.index(name)]}"
        f" ({_OTHERS[launcher][_TORCHRUN.index(name)]}); unset {name}, nothing needs it here"
        for name, number in zip(names, numbers, strict=True)
        if number != place[_TORCHRUN.index(name)]
    ]
    if problems:
        raise ConfigError(*problems)


def _numbers(env: Mapping[str, str], *names: str) -> list[int]:
    problems = [
        f"environment: {name}={env[name]!r} is not a number"
        for name in names
        if not re.fullmatch(r"\s*[-+]?[0-9]{1,18}\s*", env[name])
    ]
    if problems:
        raise ConfigError(*problems)
    return [int(env[name]) for name in names]


def _misplaced(names: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """What cannot be about a rank, world size, local rank and local size, by their names."""
    rank, size, local_rank, local_size = names[:4]
    value = dict(zip(names, numbers, strict=False))
    problems = [
        f"environment: {inner}={value[inner]} is outside {outer}={value[outer]}; it counts from 0 to {outer} - 1"
        for inner, outer in ((rank, size), (local_rank, local_size))
        if not 0 <= value[inner] < value[outer]
    ]
    if value[local_size] > value[size]:
        problems.append(f"environment: {local_size}={value[local_size]} is more than {size}={value[size]}")
    return problems


def _port(env: Mapping[str, str]) -> int:
    (port,) = _numbers(env, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"environment: MASTER_PORT={port} is not a port, from 1 to 65535")
    return port


def is_restart(env: Mapping[str, str]) -> bool:
    """Whether a launcher repeats an earlier start: torchrun or Determined behind a failure, Slurm queueing again."""
    first = {"TORCHELASTIC_RESTART_COUNT": 0, "SLURM_RESTART_COUNT": 0, "DET_TRIAL_RUN_ID": 1}
    return any(env.get(name, "").isdigit() and int(env[name]) > count for name, count in first.items())
