"""Where this process stands among the others, read from the environment its launcher made.

`Launch.from_env` understands torchrun and Determined's torch_distributed launcher, which set the same
variables, and a process started by hand, which has none of them.

As a command it is the launcher for one machine, used by `make train`:

    python -m lm.launch [--nproc N] fsdp.py ARGUMENTS...

Beside torchrun it starts sooner, passes on SIGTERM, SIGINT and SIGUSR2, and exits as the first rank that failed
did (2 = bad configuration), without a traceback of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lm.errors import ConfigError

OLDEST_TORCH = (2, 11)
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    if os.environ.get("RANK", "0") == "0":
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


def before_torch() -> None:
    """What a process has to settle before it imports torch."""
    require_torch()
    keep_freed_memory()
    # A lost connection is said in one line of ours; PyTorch's own log would add forty of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while starting ends at once, without a traceback


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

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Launch:
        """Read the launcher's variables from `env`.

        Raises:
            ConfigError: the variables are half-set, no numbers, or contradict each other.
        """
        given = [name for name in _NEEDED if name in env]
        if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(given):
            return cls()
        missing = [name for name in _NEEDED if name not in env]
        if missing:
            raise ConfigError(
                f"environment: {', '.join(given)} set but {', '.join(missing)} not; start with torchrun,"
                " which sets all of them, or unset all of them for a single process"
            )
        problems = []
        numbers: dict[str, int] = {}
        for name in (*_NEEDED[:4], "MASTER_PORT", "GROUP_RANK"):
            try:
                numbers[name] = int(env.get(name, "0"))
            except ValueError:
                problems.append(f"environment: {name}={env[name]!r} is not a number")
        if problems:
            raise ConfigError(*problems)
        for inner, outer in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
            if not 0 <= numbers[inner] < numbers[outer]:
                problems.append(
                    f"environment: {inner}={numbers[inner]} is outside {outer}={numbers[outer]};"
                    f" it counts from 0 to {outer} - 1"
                )
        if numbers["LOCAL_WORLD_SIZE"] > numbers["WORLD_SIZE"]:
            problems.append(
                f"environment: LOCAL_WORLD_SIZE={numbers['LOCAL_WORLD_SIZE']} is more than"
                f" WORLD_SIZE={numbers['WORLD_SIZE']}"
            )
        if not 0 < numbers["MASTER_PORT"] < 65536:
            problems.append(f"environment: MASTER_PORT={numbers['MASTER_PORT']} is not a port, from 1 to 65535")
        if not env["MASTER_ADDR"]:
            problems.append("environment: MASTER_ADDR is empty; name the machine of rank 0")
        if problems:
            raise ConfigError(*problems)
        return cls(
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            local_size=numbers["LOCAL_WORLD_SIZE"],
            node_rank=numbers["GROUP_RANK"],
            address=env["MASTER_ADDR"],
            port=numbers["MASTER_PORT"],
        )


def default_processes() -> int:
    """As many as there are GPUs; two where there are none."""
    if not has_gpu():
        return 2
    import torch

    return torch.cuda.device_count() or 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _die_with_parent() -> None:
    """In a new rank: be told to stop (SIGTERM) when the launcher dies, even by SIGKILL (Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def run_local(command: list[str], processes: int, grace: float = 1.0) -> int:
    """Run `command` as `processes` ranks on this machine and wait for them.

    When a rank fails, the others are told to stop, and killed `grace` seconds later: they may hang in a
    collective that it will never join.

    Returns:
        0, or the exit code of the first rank that failed (128 + signal number for one killed by a signal).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = os.environ | {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    common.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    ranks: list[subprocess.Popen[bytes]] = []
    passed_on: list[int] = []

    def pass_on(signum: int, _frame: object) -> None:
        passed_on.append(signum)
        for rank in ranks:
            rank.send_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(signum, pass_on)
    for number in range(processes):
        env = common | {"RANK": str(number), "LOCAL_RANK": str(number)}
        # A session of its own: Ctrl-C then reaches the ranks once, from here, and not from the terminal too.
        on_linux = _die_with_parent if sys.platform == "linux" else None
        ranks.append(subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=on_linux))
        for signum in passed_on:  # to ranks that were not there yet
            ranks[-1].send_signal(signum)

    waiting = list(ranks)
    failure = 0
    deadline = float("inf")
    while waiting:
        time.sleep(0.05)
        for rank in [r for r in waiting if r.poll() is not None]:
            waiting.remove(rank)
            if rank.returncode and not failure:
                failure = rank.returncode
                deadline = time.monotonic() + grace
                if failure < 0:
                    name = signal.Signals(-failure).name
                    print(f"rank {ranks.index(rank)} was killed by {name}; stopping the others", file=sys.stderr)
                for other in waiting:
                    other.terminate()
        if time.monotonic() > deadline:
            for other in waiting:
                os.killpg(other.pid, signal.SIGKILL)  # and what it started
    return failure if failure >= 0 else 128 - failure


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lm.launch", description="Run a script as several ranks here.")
    parser.add_argument("--nproc", type=int, help="ranks (default: one per GPU, two where there is none)")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    require_torch()
    if args.nproc is not None and args.nproc < 1:
        parser.error(f"--nproc: {args.nproc} processes; at least 1 is needed")
    return run_local([sys.executable, args.script, *args.arguments], args.nproc or default_processes())


if __name__ == "__main__":
    sys.exit(main())
